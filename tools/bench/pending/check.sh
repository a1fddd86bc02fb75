export PYTHONPATH=$PWD; mkdir -p $OUT/t; T=$OUT/t; date +%T
(for t in ragged alibi capped raw_ops; do timeout 200 python -m pytest -q -p no:cacheprovider tests/gpu/test_${t}_on_gpu.py > $T/py_$t.txt 2>&1 & done; wait)
for t in ragged alibi capped raw_ops; do echo "== $t"; tail -6 $T/py_$t.txt | cut -c1-250; grep -E "^(FAILED|ERROR)" $T/py_$t.txt | cut -c1-250 | head -12; done
date +%T
timeout 130 python -m flashsci check --unit cuda/sm80/fwd --cases 1200 --minutes 2 --out $T/gpu-fwd.json > $T/fwd.txt 2>&1; tail -9 $T/fwd.txt | cut -c1-300
date +%T
timeout 170 python -m flashsci check --unit cuda/sm80/bwd --cases 1800 --minutes 2.6 --out $T/gpu-bwd.json > $T/bwd.txt 2>&1; tail -9 $T/bwd.txt | cut -c1-300
date +%T
timeout 90 python -m flashsci check --unit cuda/sm80/dropout --cases 260 --cases-only --minutes 1.3 --out $T/gpu-drop.json > $T/drop.txt 2>&1; tail -6 $T/drop.txt | cut -c1-300
date +%T
timeout 60 python .scratch/p/ragged_time.py 2>&1 | cut -c1-250 | tail -9
date +%T
timeout 50 python -m flashsci bench --case calls-triangle-fp32-s384,calls-diffusion-fp32-s384,calls-unimol-fp32-s256-model,calls-pair-fp32-s384,wide-d256-full-s512 --backends cuda:own,sdpa:efficient --seconds 0.15 --json $T/fp32.json > $T/fp32.txt 2>&1; tail -30 $T/fp32.txt | cut -c1-200
date +%T
tar czf $OUT/t.tgz -C $OUT t; rm -rf $OUT/t
