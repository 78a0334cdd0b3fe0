#!/usr/bin/env bash
# Runs every check and ends with the closing lines of ctest and pytest as they printed them.
# All steps run even after a failure; the exit status is non-zero if any failed. Logs: build/logs.
#
#   scripts/test.sh [PRESET]     PRESET of CMakePresets.json, dev unless given
set -uo pipefail
cd "$(dirname "$0")/.."

preset=${1:-dev}
bin=$PWD/.venv/bin
logs=build/logs
failed=()
mkdir -p $logs
export PATH="$bin:$PATH"

# step NAME COMMAND...: runs it, shows and keeps its output, remembers whether it failed.
step() {
  local name=$1 from=$SECONDS
  shift
  printf '\n== %s: %s\n' "$name" "$*"
  if "$@" 2>&1 | tee "$logs/$name.log"; then
    printf '== %s: ok, %d s\n' "$name" $((SECONDS - from))
  else
    printf '== %s: FAILED, %d s\n' "$name" $((SECONDS - from))
    failed+=("$name")
  fi
}

cpp_files() { git ls-files -co --exclude-standard -- '*.cpp' '*.hpp'; }
format_check() { cpp_files | xargs clang-format --dry-run --Werror; }

step configure cmake --preset "$preset"
step build cmake --build --preset "$preset"
step ctest ctest --preset "$preset" -j "$(nproc)"
step pytest python -m pytest -rs
step ruff ruff check .
step ruff-format ruff format --check .
step mypy mypy
if command -v clang-format >/dev/null; then
  step clang-format format_check
fi

printf '\n== skipped: these showed nothing\n'
grep -hE '\*\*\*Skipped|^SKIPPED' $logs/ctest.log $logs/pytest.log || echo "none"
printf '\n== closing lines of ctest and pytest\n'
grep -E '^[0-9]+% tests passed|^Total Test time|^No tests were found' $logs/ctest.log ||
  echo "ctest printed no closing line"
tail -n 1 $logs/pytest.log
if [ ${#failed[@]} -ne 0 ]; then
  printf 'failed steps: %s\n' "${failed[*]}" >&2
  exit 1
fi
