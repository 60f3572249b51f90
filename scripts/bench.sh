#!/usr/bin/env bash
# The micro-benchmarks: several minutes, on a quiet machine. fio is installed where
# that is allowed; DeepSpeed takes part where ZINF_DEEPSPEED_PYTHON names a Python
# that has it (and TORCH_EXTENSIONS_DIR its compiled operators).
. "$(dirname "$0")/common.sh"
path=${ZINF_PATH:-build}
peers=${ZINF_DEEPSPEED_PYTHON:-}
if ! command -v fio > /dev/null; then
  [ "$(id -u)" = 0 ] && apt-get -qq -y install fio > /dev/null || fail "install fio"
fi
say "I/O beside fio${peers:+ and DeepSpeed}"
.venv/bin/python bench/micro/io_vs_fio.py "$path" ${peers:+--deepspeed "$peers"}
say "Adam beside the memory's limit"
build/release/bench/micro/adam_bench
say "Adam beside torch${peers:+ and DeepSpeed}"
PYTHONPATH=build/release/python "${peers:-.venv/bin/python}" bench/micro/adam_vs_peers.py
say "the arena beside malloc"
build/release/bench/micro/alloc_bench
