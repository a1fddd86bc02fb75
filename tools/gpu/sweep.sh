#!/usr/bin/env bash
# `make sweep`: is the GPU fit, build, is it right, how fast is it, say so. Stops at the first failure and names it.
#
#   SUITE=dense,bias CHECK='--minutes 3' BENCH='--quick' make sweep      RESULTS=reports/bench/h200 make sweep
#
# Logs are in build/sweep/; results in RESULTS, figures in docs/figures, tables where README.md and docs/ have markers.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PY:-python3} suite=${SUITE:-headline}
mkdir -p build/sweep

step() { # name, command
  local name=$1 log=build/sweep/$1.log start=$SECONDS
  shift
  printf '\n=== %s: %s\n' "$name" "$*"
  "$@" 2>&1 | tee "$log"
  local status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] && { printf '=== %s: done in %d s\n' "$name" $((SECONDS - start)); return; }
  printf '\nsweep: %s failed (exit %d): %s\n' "$name" "$status" "$*" >&2
  printf 'sweep: its last line: %s\n' "$(grep -v '^ *$' "$log" | tail -n 1)" >&2
  exit 1
}

step preflight python3 tools/gpu/preflight.py
step build make --no-print-directory install VENV="${VENV-.venv}"
gpu=$(sed -n 's/^GPU  *\(NVIDIA \)\{0,1\}//p' build/sweep/preflight.log | tr 'A-Z ' 'a-z-')
results=${RESULTS:-reports/bench/$gpu}
# shellcheck disable=SC2086  # CHECK and BENCH are lists of options
step check "$python" -m flashsci check ${CHECK:-}
# shellcheck disable=SC2086
step bench "$python" -m flashsci bench --suite "$suite" --json "$results/${suite//,/-}.json" ${BENCH:-}
step report "$python" -m flashsci report "$results/${suite//,/-}.json" --write --plots docs/figures
printf '\nsweep: all done in %d s; results in %s, figures in docs/figures\n' "$SECONDS" "$results"
