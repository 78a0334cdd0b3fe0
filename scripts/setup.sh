#!/usr/bin/env bash
# Makes everything that building, testing and the demo need: system packages, .venv with pinned
# Python packages, zensync itself in it. Safe to repeat: each step is skipped while what it depends
# on is unchanged (stamps in .venv/stamps, keyed by content). Needs no root: without it, missing
# system packages are named and libraries are built from pinned sources.
#
#   scripts/setup.sh             all steps
#   ZENSYNC_SETUP_PYTHON=PATH    the Python to make .venv with (3.11 or newer)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamps=$venv/stamps
started=$SECONDS

say() { printf '\n== setup [%3ds] %s\n' "$((SECONDS - started))" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# A compiler, libraries (else their pinned sources), the test network; Python where it is Debian's.
packages=(g++ make libhwy-dev libasio-dev libxxhash-dev libgtest-dev iproute2 util-linux)
python_packages_of_debian=(python3 python3-venv python3-dev)

# The first Python of version 3.11 or newer; nothing if there is none.
find_python() {
  local candidate
  for candidate in "${ZENSYNC_SETUP_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$candidate"
      return
    fi
  done
}

missing_packages() {
  command -v dpkg-query >/dev/null || return 0
  local package state
  for package in "$@"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || printf '%s ' "$package"
  done
}

system_packages() {
  local missing
  case $(find_python) in
    '' | /usr/bin/*) packages+=("${python_packages_of_debian[@]}") ;;
  esac
  missing=$(missing_packages "${packages[@]}")
  if [ -z "$missing" ]; then
    return
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    printf 'Not installed (root would: apt-get install %s)\n' "$missing"
    printf 'Going on without: libraries that are missing are built from pinned sources.\n'
    return
  fi
  say "system packages: $missing"
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086  # a list of names
  { apt-get update && apt-get install -y --no-install-recommends $missing; } ||
    printf 'apt-get failed; going on, what is missing will be named.\n' >&2
}

make_venv() {
  if [ -x $venv/bin/python ] && $venv/bin/python -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  [ -n "$python" ] || die "no Python of version 3.11 or newer found (ZENSYNC_SETUP_PYTHON names one)"
  say "virtual environment from $python"
  "$python" -m venv --clear $venv || die "python3 -m venv failed; Debian's package is python3-venv"
}

# Whether step `$1` was last done with content `$2`; remembered by `done_with`.
is_done() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
done_with() { mkdir -p $stamps && printf '%s' "$2" >"$stamps/$1"; }

python_packages() {
  local key
  key=$({ $venv/bin/python -V && cat requirements-dev.txt; } | sha256sum)
  if is_done requirements "$key"; then
    return
  fi
  say "Python packages (torch is large: minutes on a slow line)"
  $venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt
  done_with requirements "$key"
}

zensync_package() {
  local key
  key=$({ cat $stamps/requirements; printf '%s' "${CMAKE_ARGS:-}"
    find bench core cmake python CMakeLists.txt pyproject.toml README.md LICENSE NOTICE -type f \
      ! -path '*/__pycache__/*' ! -name '*.so' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum)
  if is_done zensync "$key" && [ -n "$(ls -d $venv/lib/python3.*/site-packages/zensync 2>/dev/null)" ]
  then
    return
  fi
  say "zensync into .venv (compiles the core; whole output in build/setup.log)"
  mkdir -p build
  if ! PATH="$PWD/$venv/bin:$PATH" $venv/bin/python -m pip install -v --no-build-isolation --no-deps \
    --force-reinstall --disable-pip-version-check --config-settings=build-dir=build/python . 2>&1 |
    tee build/setup.log | grep -E --line-buffered '^ *\[[0-9]+/[0-9]+\]|zensync:|Successfully'; then
    { grep -E -A5 'error' build/setup.log || tail -n 20 build/setup.log; } | head -40 >&2 || true
    die "pip install . failed; the whole output is in build/setup.log"
  fi
  done_with zensync "$key"
}

command -v g++ >/dev/null || [ "$(id -u)" = 0 ] || die "no C++20 compiler; Debian's package is g++"
system_packages
make_venv
python_packages
zensync_package
say "ready"
