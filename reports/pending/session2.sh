# Verification after session1.sh: bash reports/pending/session2.sh [check] [matrix] [tests], each at most 9.5 minutes; with two GPUs two of them at once.
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD NCCL_NVLS_ENABLE=0; T=tests/gpu; : ${OUT:=/tmp/out}; mkdir -p $OUT; N=$(nvidia-smi -L | wc -l); nvidia-smi -L; date +%T
P=$(( $(nproc) / (2 * $#) )); [ $P -gt 14 ] && P=14
check() {
  cp reports/gpu-check.json $OUT/check.json
  timeout -s INT -k 5 ${CHECK_S:-440} python3 -m flashsci check --workers $P --out $OUT/check.json --unit triton --cases ${CASES:-150} --minutes ${MINUTES:-6} > $OUT/triton.txt 2>&1; echo "triton rc $? $(date +%T)"
  grep -E "trap.*failed" -A30 $OUT/triton.txt | head -40 | cut -c1-160; grep -E "seed|triton: |maps" $OUT/triton.txt | cut -c1-300 | tail -8
  timeout -s INT -k 5 90 python3 -m flashsci check --workers $P --out $OUT/check.json --maps 250 --minutes 1.2 > $OUT/maps.txt 2>&1; echo "maps rc $? $(date +%T)"; tail -4 $OUT/maps.txt | cut -c1-250
}
matrix() {
  timeout -s INT -k 5 560 python3 -m tests.machinery --processes $P --seconds 530 ${KNOWN:+--known $KNOWN} --save $OUT/matrix.json > $OUT/matrix.txt 2>&1; echo "matrix rc $? $(date +%T)"; tail -1 $OUT/matrix.txt | cut -c1-300
  grep -E '"(raw|wrong|crashed)"' $OUT/matrix.json | cut -c1-420 | head -30; gzip -k $OUT/matrix.json
}
tests() {
  timeout -s INT -k 5 560 python3 -m pytest -q -rf --tb=short -p no:cacheprovider -n $P --dist worksteal $T/test_laplacian_on_gpu.py $T/test_maps_on_gpu.py $T/test_second_order_on_gpu.py $T/test_every_raw_op_on_gpu.py $T/test_bias_copy_on_gpu.py $T/test_row_pitch_on_gpu.py $T/test_mask_tiles_on_gpu.py $T/test_alibi_on_gpu.py $T/test_batch_invariance_on_gpu.py $T/test_derivatives_on_gpu.py $T/test_repeats_on_gpu.py $T/test_races.py -k "not test_races or alibi" > $OUT/tests.txt 2>&1; echo "tests $(date +%T)"; grep -E "^(FAILED|ERROR)" $OUT/tests.txt | cut -c1-200 | head -30; tail -1 $OUT/tests.txt
}
n=0; for part in "$@"; do (export CUDA_VISIBLE_DEVICES=$((n % N)); $part) & n=$((n + 1)); done; wait; date +%T
