# Diagnostics and timings, about 6 minutes on two GPUs (x2) or 9 on one: bash reports/pending/session1.sh, in the tree with flashsci/_C.so.
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD; B=tools/bench/pending; : ${OUT:=/tmp/out}; mkdir -p $OUT
nvidia-smi -L; date +%T; N=$(nvidia-smi -L | wc -l)
t() { n=$1; s=$2; shift 2; timeout -s INT -k 3 $s "$@" > $OUT/$n.txt 2>&1; echo "== $n rc $? $(date +%T)"; }
(export CUDA_VISIBLE_DEVICES=$((N-1)); t diag_case 200 python3 reports/pending/diag.py case; t diag_cells 120 python3 reports/pending/diag.py cells ops
 t jvp2 60 python3 -m pytest -q -x --tb=short -p no:cacheprovider tests/gpu/test_second_order_on_gpu.py -k "forward_mode_over_forward_mode and float16") & A=$!
export CUDA_VISIBLE_DEVICES=0
t odd_lengths 90 python3 $B/odd_lengths.py 80
t gated 50 python3 $B/gated.py 40
t maps 50 python3 $B/attention_maps.py
t mask_tiles 85 python3 $B/mask_tiles.py --seconds 70
wait $A
for n in diag_case diag_cells jvp2 odd_lengths gated maps mask_tiles; do echo "######## $n"; tail -${LINES_OF:-45} $OUT/$n.txt | cut -c1-260; done
