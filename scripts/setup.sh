#!/usr/bin/env bash
# System packages, .venv with torch, build, and installation into .venv. What is
# there already is left alone, so that a second run starts at once.
#   setup.sh          for running: the package and the command
#   setup.sh --all    for testing too: the test and benchmark programs
#   setup.sh --lint   for `make lint` and `make format` (tools only, no build)
. "$(dirname "$0")/common.sh"

packages=(g++ cmake ninja-build ccache pkg-config make python3 python3-venv
  python3-dev liburing-dev nlohmann-json3-dev libcli11-dev libgtest-dev
  librapidcheck-dev libxxhash-dev libopenmpi-dev openmpi-bin fortunes)
[ "${1:-}" = --lint ] && packages+=(clang-19 clang-tidy-19 libclang-rt-19-dev)

# A tool counts as there when its command is, whoever installed it.
there() {
  case $1 in
    cmake | make | g++ | ccache | pkg-config | clang-19 | clang-tidy-19 | python3)
      command -v "$1" > /dev/null ;;
    ninja-build) command -v ninja > /dev/null ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2> /dev/null ;;
    python3-dev) [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
    *) dpkg -s "$1" > /dev/null 2>&1 ;;
  esac
}

missing=()
for package in "${packages[@]}"; do there "$package" || missing+=("$package"); done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get > /dev/null || fail "needs these Debian packages, or what they hold: ${missing[*]}"
  if [ "$(id -u)" = 0 ]; then as_root=(); elif command -v sudo > /dev/null; then as_root=(sudo); else
    fail "missing system packages; as root: apt-get install ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  "${as_root[@]}" apt-get -qq update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install "${missing[@]}" > /dev/null
fi

if [ ! -x .venv/bin/python ]; then
  say "making .venv"
  python3 -m venv .venv
fi

# torch first and exactly: other packages must not choose its version.
stamp=.venv/.zinf-requirements
if ! cmp -s requirements.txt "$stamp"; then
  say "installing Python packages (torch is large)"
  .venv/bin/python -c 'import torch' 2> /dev/null ||
    .venv/bin/pip install --progress-bar on "$(grep '^torch==' requirements.txt)"
  .venv/bin/pip install -q -r requirements.txt
  cp requirements.txt "$stamp"
fi
[ "${1:-}" = --lint ] && exit 0

[ -e build/release/build.ninja ] || { say "configuring"; cmake --preset release > /dev/null; }
target=zinf_package
[ "${1:-}" = --all ] && target=all
if ! cmake --build --preset release --target $target -- -n | grep -q 'no work to do'; then
  say "building $target"
  cmake --build --preset release --target $target
fi
cmake --install build/release --prefix .venv > /dev/null
