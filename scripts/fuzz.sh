#!/usr/bin/env bash
# The readers of the store's format under libFuzzer, each for SECONDS (10).
. "$(dirname "$0")/common.sh"
seconds=${1:-10}
cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DZINF_TORCH=OFF -DZINF_TESTS=OFF -DZINF_BENCH=OFF -DZINF_FUZZ=ON \
  -DZINF_SANITIZE=address,undefined,fuzzer-no-link > /dev/null
cmake --build build/fuzz --target store_corpus fuzz_volume_header fuzz_superblock fuzz_catalog fuzz_table
programs=$PWD/build/fuzz/tests/fuzz
"$programs/store_corpus" "$programs/seeds"
cd "$programs"
for target in volume_header superblock catalog table; do
  say "fuzzing $target for $seconds s"
  mkdir -p "corpus/$target"
  code=0
  "./fuzz_$target" -max_total_time="$seconds" -rss_limit_mb=1024 -malloc_limit_mb=64 -print_final_stats=1 \
    -verbosity=0 "corpus/$target" "seeds/$target" > "$target.log" 2>&1 || code=$?
  [ "$code" = 0 ] || { cat "$target.log"; fail "the reader of $target failed; the input is in $programs"; }
  grep -E 'executed_units|peak_rss' "$target.log"
done
