#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each; exits 1 if one finds an input that breaks a
# property, and keeps that input under build/fuzz/findings.
#
#   FUZZ_S=60 scripts/fuzz.sh [TARGET...]    seconds for all targets together
#   FUZZ_RUNS=10000000 scripts/fuzz.sh       executions per target instead
#
# Corpora grow in build/fuzz/corpus from run to run; remove it to start from the seeds again. A
# finding is run again by: build/fuzz/fuzz/fuzz_TARGET FILE.
set -euo pipefail
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"
if ! command -v clang++ >/dev/null; then
  echo "fuzzing needs clang++ with libFuzzer" >&2
  exit 2
fi
mkdir -p build/fuzz
echo "building (minutes at first; output in build/fuzz/build.log)" >&2
if ! { cmake --preset fuzz && cmake --build --preset fuzz; } >build/fuzz/build.log 2>&1; then
  tail -n 30 build/fuzz/build.log >&2
  exit 2
fi

programs=build/fuzz/fuzz
findings=build/fuzz/findings
mkdir -p "$findings"
seeds=$("$programs/fuzz_seeds" build/fuzz/seeds) # a line each: name, longest input
[ $# -gt 0 ] || mapfile -t all < <(cut -d' ' -f1 <<<"$seeds")
[ $# -gt 0 ] || set -- "${all[@]}"

if [ -n "${FUZZ_RUNS:-}" ]; then
  bound=-runs=$FUZZ_RUNS
else
  share=$((${FUZZ_S:-60} / $#))
  bound=-max_total_time=$((share > 0 ? share : 1))
fi

failed=0
printf '%-14s %12s %10s %8s  %s\n' target executions per_second edges result
for target in "$@"; do
  longest=$(awk -v name="$target" '$1 == name { print $2 }' <<<"$seeds")
  if [ -z "$longest" ]; then
    echo "no such target: $target" >&2
    exit 2
  fi
  corpus=build/fuzz/corpus/$target
  log=build/fuzz/$target.log
  mkdir -p "$corpus"
  result=ok
  "$programs/fuzz_$target" "$corpus" "build/fuzz/seeds/$target" "$bound" -max_len="$longest" \
    -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$findings/$target-" >"$log" 2>&1 || result=FOUND
  done_runs=$(awk '/^stat::number_of_executed_units/ { print $2 }' "$log")
  per_second=$(awk '/^stat::average_exec_per_sec/ { print $2 }' "$log")
  edges=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1 | cut -d' ' -f2 || true)
  printf '%-14s %12s %10s %8s  %s\n' "$target" "${done_runs:-?}" "${per_second:-?}" "${edges:-?}" \
    "$result"
  if [ $result != ok ]; then
    failed=1
    grep -E 'does not hold|ERROR|SUMMARY|runtime error|Test unit written' "$log" | head -n 5 >&2
  fi
done
exit $failed
