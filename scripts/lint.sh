#!/usr/bin/env bash
# Formatting, layers, self-contained headers, thread-safety annotations, naming
# and bugs (clang-tidy; not with --quick), Python. Changes nothing.
. "$(dirname "$0")/common.sh"
status=0
sources=$(git ls-files -co --exclude-standard '*.cpp' '*.h')

say "lint: format"
# shellcheck disable=SC2086
.venv/bin/clang-format --dry-run -Werror $sources || status=1
.venv/bin/ruff format -q --check . || status=1
.venv/bin/ruff check -q . || status=1

say "lint: layers"
python3 scripts/check_layers.py || status=1

# The torch-free code, compiled by clang: every header by itself, and every
# source with -Wthread-safety.
say "lint: headers and thread safety"
cmake -S . -B build/lint -G Ninja -DCMAKE_CXX_COMPILER=clang++-19 -DZINF_TORCH=OFF \
  -DZINF_BENCH=OFF -DCMAKE_BUILD_TYPE=Debug > /dev/null
check_header() {
  echo "#include \"$1\"" | clang++-19 -std=c++20 -fsyntax-only -Wall -Wextra -Werror \
    -Iinclude -I. -x c++ - || { echo "$1 does not compile by itself"; return 1; }
}
export -f check_header
git ls-files -co --exclude-standard 'include/*.h' 'src/*.h' 'cli/*.h' 'tests/*.h' |
  grep -v -e '-inl.h$' -e '^tests/unit/torch/' | xargs grep -L '#include <torch/' |
  xargs -P"$(nproc)" -I{} bash -c 'check_header {}' || status=1
git ls-files -co --exclude-standard 'src/*.cpp' |
  xargs -P"$(nproc)" -I{} clang++-19 -std=c++20 -fsyntax-only -Wall -Wextra \
    -Wthread-safety -Werror -Iinclude -I. -DZINF_VERSION='"lint"' {} || status=1

# Minutes, so not in CI.
if [ "${1:-}" = --quick ]; then
  exit $status
fi
say "lint: clang-tidy"
git ls-files -co --exclude-standard 'src/*.cpp' 'cli/*.cpp' |
  xargs -P"$(nproc)" -n4 clang-tidy-19 -p build/lint --quiet \
    --warnings-as-errors='*' 2> /dev/null || status=1
[ $status = 0 ] && say "lint: clean"
exit $status
