#!/usr/bin/env bash
. "$(dirname "$0")/common.sh"
git ls-files -co --exclude-standard '*.cpp' '*.h' | xargs .venv/bin/clang-format -i
.venv/bin/ruff format -q .
.venv/bin/ruff check -q --fix .
