cp .scratch/so/_C.so flashsci/_C.so
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
nvidia-smi -L; date +%T
C=tests/compile; T=tests/gpu
(CUDA_VISIBLE_DEVICES=1 python3 -m tests.machinery --processes 14 --seconds 95 --known .scratch/known.json --save $OUT/rest.json > $OUT/rest.txt 2>&1; echo "matrix rc $? $(date +%T)"; tail -1 $OUT/rest.txt | cut -c1-200) &
(CUDA_VISIBLE_DEVICES=1 timeout -s INT -k 5 150 compute-sanitizer --error-exitcode=9 --tool memcheck --target-processes all python3 -m pytest -q --tb=short -p no:cacheprovider $T/test_every_raw_op_on_gpu.py -k "test_memory and cuda" > $OUT/san.txt 2>&1; echo "sanitizer rc $?"; tail -3 $OUT/san.txt | cut -c1-200) &
(CUDA_VISIBLE_DEVICES=1 timeout -s INT -k 5 190 python3 -m pytest -v -rf --tb=short -p no:cacheprovider -n 9 --dist worksteal $T/test_first_calls_on_gpu.py $T/test_races.py $C/test_jit_trace.py $C/test_modes.py $C/test_saved_strides.py $C/test_choice.py $T/test_repeats_on_gpu.py $T/test_explain_on_gpu.py $T/test_kernels.py $T/test_derivatives_on_gpu.py > $OUT/tests.txt 2>&1; echo "tests $(date +%T)"; grep -c PASSED $OUT/tests.txt; grep -E "^FAILED" $OUT/tests.txt | cut -c1-180 | head -30; tail -1 $OUT/tests.txt) & P=$!
export CUDA_VISIBLE_DEVICES=0
timeout -s INT -k 3 62 python3 -m flashsci bench --base .scratch/base --backends cuda --quick --case small-call,decode-b16-s8192,dense-bf16-d64-causal-s4096,dense-bf16-d128-full-s4096,dense-bf16-d256-full-s4096,triangle-bf16-s384,pet-md-4096 --json $OUT/bench.json > $OUT/bench.txt 2>&1; echo "bench rc $?"; tail -22 $OUT/bench.txt | cut -c1-170
timeout -s INT -k 3 40 python3 -m flashsci bench --suite latency > $OUT/latency.txt 2>&1; echo "latency rc $? $(date +%T)"
bash .scratch/g4b.sh $P
