#!/usr/bin/env bash
# One call on the GPU machine: the library built elsewhere, the GPU check, the tests, the headline
# figures, the sanitizers; a short table last. Results go to $OUT.
#
#   make wheel build-manual      (here)
#   run with carry dist, build/manual:  bash tools/gpu_session.sh [check|tests|cpu|bench|sanitize ...]
#   CHECK='--cases 1000' adds options to the check.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
out=${OUT:-build/gpu}
mkdir -p "$out"
steps=${*:-check tests bench sanitize}

# The wheel's own library serves the tree: the same file on every machine.
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/flashsci-wheel dist/*.whl || exit 1
cp /tmp/flashsci-wheel/flashsci/_C.so flashsci/_C.so

report() { # name, seconds, lines of the end to show, command
  local name=$1 seconds=$2 lines=$3 start=$SECONDS
  shift 3
  timeout "$seconds" "$@" >"$out/$name.log" 2>&1
  echo "== $name: rc $?, $((SECONDS - start)) s"
  tail -n "$lines" "$out/$name.log"
}

for step in $steps; do
  case $step in
    check) report check 560 60 python3 -m flashsci check --minutes 9 ${CHECK:-} --out "$out/gpu-check.json" ;;
    tests) report tests 500 25 python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n 14 --maxfail=20 --tb=short \
      --durations=10 tests/gpu tests/compile/test_torch_features.py tests/compile/test_compile.py tests/properties ;;
    cpu) CUDA_VISIBLE_DEVICES='' report cpu 400 25 python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n 14 \
      --maxfail=20 --tb=short --durations=10 tests/cpu ;;
    bench) report bench 240 30 python3 -m flashsci bench --suite headline --quick --seconds 1 --json "$out/headline.json" ;;
    sanitize) for tool in memcheck initcheck synccheck; do
      report "$tool" 120 3 compute-sanitizer --tool "$tool" build/manual/forward_runner
    done ;;
    *) echo "gpu_session: no step named $step" >&2; exit 2 ;;
  esac
done
