#!/usr/bin/env bash
# The main job: a GPT on real text, with a fraction of the memory that it takes.
. "$(dirname "$0")/common.sh"
path=${ZINF_PATH:-build}
mkdir -p "$path"
say "zinf doctor $path"
.venv/bin/zinf doctor "$path"
say "training (examples/train_gpt.py)"
.venv/bin/python examples/train_gpt.py --nvme "$path" "$@"
