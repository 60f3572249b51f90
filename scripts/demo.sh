#!/usr/bin/env bash
# The main job. Until there is training: is this machine fit, and how fast is its
# disk.
. "$(dirname "$0")/common.sh"
path=${ZINF_PATH:-build}
mkdir -p "$path"
say "zinf doctor $path"
.venv/bin/zinf doctor "$path"
say "zinf io bench $path"
.venv/bin/zinf io bench "$path" --read --write --mix
