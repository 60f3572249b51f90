# Sourced by the other scripts: where we are, and how we talk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'zinf: %s\n' "$*" >&2; exit 1; }
