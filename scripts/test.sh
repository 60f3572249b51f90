#!/usr/bin/env bash
# Every test: the whole build, the core under ASan+UBSan, its threaded parts
# under TSan, Python. Ends with one line of counts.
. "$(dirname "$0")/common.sh"
results=build/results
rm -rf "$results" && mkdir -p "$results"
status=0

run_ctest() { # preset, further ctest arguments
  local preset=$1
  shift
  say "tests: $preset"
  ctest --test-dir "build/$preset" -j"$(nproc)" --output-on-failure --progress \
    --output-junit "$PWD/$results/$preset.xml" "$@" || status=1
}

build() {
  say "building: $1"
  cmake --preset "$1" > /dev/null
  cmake --build --preset "$1" > "$results/$1.log" || { cat "$results/$1.log"; fail "the $1 build failed"; }
}

run_ctest release
build asan && run_ctest asan
build tsan && run_ctest tsan -L threads
say "tests: python"
jobs=$(nproc)
[ "$jobs" -le 8 ] || jobs=8 # a worker takes up to 2 GiB
.venv/bin/python -m pytest -q -n "$jobs" --dist worksteal --junitxml="$results/python.xml" tests/python || status=1
if [ "${CI:-}" = true ]; then
  say "lint"
  scripts/setup.sh --lint
  scripts/lint.sh --quick || status=1
fi
python3 scripts/count_results.py "$results" || status=1
exit $status
