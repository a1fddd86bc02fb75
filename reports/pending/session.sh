export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
nvidia-smi -L; date +%T; cd .scratch/final; export PYTHONPATH=$PWD; T=tests/gpu; B=tools/bench/pending
timeout -s INT -k 5 90 python3 -m pytest -v -rf --tb=short -p no:cacheprovider $T/test_distributed_on_gpu.py -k dtensors > $OUT/nccl.txt 2>&1; grep -E "PASSED|FAILED|SKIPPED|ERROR" $OUT/nccl.txt | cut -c1-150 | head; tail -1 $OUT/nccl.txt; date +%T
export CUDA_VISIBLE_DEVICES=1
cp reports/gpu-check.json $OUT/check.json
(timeout -s INT -k 5 440 python3 -m flashsci check --workers 9 --out $OUT/check.json --unit triton --cases 120 --minutes 5.5 > $OUT/triton.txt 2>&1; echo "triton rc $? $(date +%T)"; grep "trap.*failed" -A30 $OUT/triton.txt | head -50 | cut -c1-160; grep -E "seed|triton: |maps" $OUT/triton.txt | cut -c1-200 | tail -6; timeout -s INT -k 5 60 python3 -m flashsci check --workers 8 --out $OUT/check.json --maps 250 --minutes 0.9 > /tmp/maps.txt 2>&1; echo "maps rc $? $(date +%T)"; tail -4 /tmp/maps.txt | cut -c1-200) & C=$!
(timeout -s INT -k 5 360 python3 -m tests.machinery --processes 4 --seconds 330 --known ../known.json --save $OUT/matrix.json > $OUT/matrix.txt 2>&1; echo "matrix rc $? $(date +%T)"; tail -1 $OUT/matrix.txt | cut -c1-300) & M=$!
(timeout -s INT -k 5 420 python3 -m pytest -v -rf --tb=short -p no:cacheprovider -n 4 --dist worksteal $T/test_laplacian_on_gpu.py $T/test_maps_on_gpu.py $T/test_second_order_on_gpu.py $(ls $T/test_many* 2>/dev/null) $T/test_every_raw_op_on_gpu.py $T/test_races.py -k "not test_races or alibi" > $OUT/new.txt 2>&1; echo "tests $(date +%T)"; grep -c PASSED $OUT/new.txt; grep -E "^FAILED" $OUT/new.txt | cut -c1-170 | head -30; tail -1 $OUT/new.txt) & P=$!
(CUDA_VISIBLE_DEVICES= timeout -s INT -k 5 455 python3 -m pytest -v -rf --tb=short -p no:cacheprovider -n 13 --dist worksteal --max-worker-restart=0 tests/compile tests/cpu/triton tests/cpu/api tests/cpu/call tests/cpu/judge tests/cpu/tools tests/cpu/choice tests/cpu/emulator tests/cpu/compat tests/cpu/cuda tests/properties > /tmp/cpu.txt 2>&1; grep -vE "PASSED|SKIPPED" /tmp/cpu.txt | cut -c1-400 | tail -3000 > $OUT/cpu.txt; echo "cpu tests $(date +%T)"; grep -c PASSED /tmp/cpu.txt; grep -E "^FAILED|^ERROR" /tmp/cpu.txt | cut -c1-170 | head -50; tail -1 /tmp/cpu.txt | cut -c1-150) & Q=$!
export CUDA_VISIBLE_DEVICES=0
t() { n=$1; s=$2; shift 2; timeout -s INT -k 3 $s "$@" > /tmp/$n.txt 2>&1; echo "== $n rc $? $(date +%T)"; tail -40 /tmp/$n.txt | cut -c1-190 >> $OUT/times.txt; echo "== $n" >> $OUT/times.txt; }
t mask_tiles 85 python3 $B/mask_tiles.py --seconds 70
t local_energy 75 python3 $B/local_energy.py --seconds 60
t odd_lengths 65 python3 $B/odd_lengths.py 55
t latency 45 python3 -m flashsci bench --suite latency
t gated 40 python3 $B/gated.py 30
t forward_twice 40 python3 $B/forward_twice.py 28
[ -f $B/many_directions.py ] && t many 40 python3 $B/many_directions.py 28
t attention_maps 45 python3 $B/attention_maps.py
t fp8 30 python3 ../fp8time.py cuda triton
(cd ../base; PYTHONPATH=$PWD; export PYTHONPATH; t fp8_base 30 python3 ../fp8time.py triton)
wait $C $M $P $Q; cat $OUT/times.txt | tail -170; date +%T
