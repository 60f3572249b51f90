#!/usr/bin/env bash
# Compiles the adapter against the headers of torch's CUDA wheel, and links and
# runs nothing: no toolkit is needed. The wheel is a download of 0.5 GB or more.
. "$(dirname "$0")/common.sh"
wheels=build/cuda-wheel
mkdir -p "$wheels"
say "cuda headers: the wheel of torch 2.13.0 as PyPI has it"
# "===" is the version without +cpu.
ls "$wheels"/torch-2.13.0-*.whl > /dev/null 2>&1 ||
  .venv/bin/pip download -q --no-deps -d "$wheels" 'torch===2.13.0'
.venv/bin/python - "$wheels" << 'END'
import glob, sys, zipfile
with zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/torch-2.13.0-*.whl")[0]) as wheel:
    names = [name for name in wheel.namelist() if name.startswith("torch/include/")]
    wheel.extractall(sys.argv[1], [*names, "torch/version.py"])
END
grep -q "^cuda: Optional\[str\] = '" "$wheels/torch/version.py" ||
  { echo "this wheel is not a CUDA build:"; cat "$wheels/torch/version.py"; exit 1; }
if grep -rnE '\bcuda[A-Z]|__CUDA|USE_CUDA|c10/cuda|ATen/cuda' adapters/torch src include; then
  echo "the adapter names CUDA"
  exit 1
fi
say "cuda headers: adapters/torch"
compile() {
  g++ -std=c++20 -fsyntax-only -I. -Iinclude -Iadapters/torch/include \
    -isystem "$1/torch/include" -isystem "$1/torch/include/torch/csrc/api/include" "$2" ||
    { echo "$2 does not compile"; return 1; }
}
export -f compile
git ls-files -co --exclude-standard 'adapters/torch/*.cpp' |
  xargs -P"$(nproc)" -I{} bash -c "compile $wheels {}"
say "cuda headers: every source compiles"
