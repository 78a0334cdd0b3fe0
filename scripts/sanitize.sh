#!/usr/bin/env bash
# Builds and runs the C++ tests under a sanitizer: scripts/sanitize.sh asan-ubsan | tsan
# gcc's thread sanitizer can't start where the kernel randomises addresses over more bits than it
# knows of; without randomisation (setarch -R) it can. Tests are listed at build time by running
# them, so the build needs it too.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
export PATH="$PWD/.venv/bin:$PATH"
run=()
if [ "$preset" = tsan ] && setarch -R true 2>/dev/null; then
  run=(setarch -R)
fi
"${run[@]}" cmake --preset "$preset"
"${run[@]}" cmake --build --preset "$preset"
"${run[@]}" ctest --preset "$preset"
