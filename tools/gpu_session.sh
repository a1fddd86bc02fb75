#!/usr/bin/env bash
# One call on the GPU machine: the library built elsewhere, the GPU check, the tests, the headline
# figures, the sanitizers; a short table last. Results go to $OUT.
#
#   make wheel build-manual      (here)
#   run with carry dist, build/manual:  bash tools/gpu_session.sh [check|generations|tests|cpu|bench|sanitize|sweep ...]
#   CHECK='--cases 1000' adds options to the check, BENCH='--quick' to the sweep's bench.
#
# `sweep` is `make sweep` with that library and FlashAttention-3 where /tmp/fa3 has it; what it wrote is packed into
# $OUT/sweep.tgz, to be unpacked over the tree. `generations` judges the older CUDA generations on cases that they serve, and
# adds what it finds to the report of the check.
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
    generations) # after check or sweep, whose report it adds to
      cp -n reports/gpu-check.json "$out/gpu-check.json" 2>/dev/null
      for each in sm80:2300 sm75:600; do
        report "${each%:*}" 280 12 python3 -m flashsci check --unit "cuda/${each%:*}" --backends "cuda:${each%:*}" --seed 1 \
          --cases "${each#*:}" --minutes 4 --out "$out/gpu-check.json"
      done ;;
    sweep)
      mkdir -p build && touch -d '+1 day' build/.flashsci-tools && touch -d '+2 days' build/.flashsci-installed
      [ -e /tmp/fa3/_C.so ] && export FLASHSCI_FA3=/tmp/fa3/_C.so
      export CHECK=${CHECK:---cases 1700 --minutes 6}
      # flex is left out: compiling and tracing it takes as long as all the rest.
      export BENCH=${BENCH:---quick --seconds 0.6 --backends ours,sdpa:flash,sdpa:cudnn,sdpa:efficient,fa3}
      sweep=(make sweep VENV=)
      if ! command -v make >/dev/null; then # there is nothing to build
        mkdir -p build/bin && printf '#!/bin/sh\necho "no make on this machine: the library was carried"\n' >build/bin/make
        chmod +x build/bin/make
        sweep=(env VENV= PY=python3 "PATH=$PWD/build/bin:$PATH" bash scripts/sweep.sh)
      fi
      report sweep 570 75 "${sweep[@]}"
      cp reports/gpu-check.json "$out/"
      tar czf "$out/sweep.tgz" README.md docs benchmarks/results reports/gpu-check.json build/sweep ;;
    sanitize) # all at once: each leaves most of the GPU idle
      for tool in memcheck initcheck synccheck; do
        for pass in forward backward; do
          report "$tool-$pass" 180 3 compute-sanitizer --tool "$tool" "build/manual/${pass}_runner" &
        done
      done
      wait ;;
    *) echo "gpu_session: no step named $step" >&2; exit 2 ;;
  esac
done
