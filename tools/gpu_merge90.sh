# seconds: 60
# Whether branch merge90 is right, and when a CTA should take tile after tile: docs/kernels/sm90_backward.md, "Next".
#
# Build (no GPU, four minutes, 24 MB; sm80's unit sums the gradient of a shared bias). The first commit of the branch beside it
# has packed `deterministic` alone; all other kernels are the same SASS as reland's:
#   git worktree add --detach /tmp/wt/first90 5742840
#   bash tools/gpu_merge90.sh build /tmp/wt/first90
# Run on an H200, the tree copied there with build/merge90 (60 s each at most; times when all are right):
#   bash tools/gpu_merge90.sh turns      `deterministic`, packed and dense: the first commit, tile after tile always, the rule
#   bash tools/gpu_merge90.sh check      everything at D 64 and 128, both dtypes (check 64, check 128: a part of it)
#   bash tools/gpu_merge90.sh wide       D 192 and 256
#   bash tools/gpu_merge90.sh time       reland's, a CTA for every tile, tile after tile, the rule, and FA3 (FA3=/tmp/fa3)
#   bash tools/gpu_merge90.sh rest       bias and mask, head dims beyond 128, deterministic
set -eu
libs=build/merge90
export PYTHONPATH=$PWD
tool="python3 -m tools.gpu_sm90_backward"
case ${1:-turns} in
build)
  mkdir -p $libs
  object() { # object NAME TREE FLAGS...: both dtypes of a tree's unit
    for dtype in bf16 fp16; do
      (cd "$2" && nice nvcc $(cat cmake/nvcc_flags.txt) --compress-mode=size -gencode arch=compute_90a,code=sm_90a -Xcompiler=-fvisibility=default "${@:3}" \
        -c csrc/sm90/backward_$dtype.cu -o "$OLDPWD/$libs/$1_$dtype.o")
    done
  }
  for dtype in bf16 fp16; do
    nice nvcc $(cat cmake/nvcc_flags.txt) --compress-mode=size -gencode arch=compute_80,code=sm_90 -Xcompiler=-fvisibility=default \
      -c csrc/sm80/backward_$dtype.cu -o $libs/sm80_$dtype.o
  done
  object first "$2"
  object rule .
  object one . -DFLASHSCI_SM90_SHORT_BLOCKS=0
  object after . -DFLASHSCI_SM90_SHORT_BLOCKS=1073741824
  for name in first rule one after; do
    nvcc -shared -Xcompiler=-fPIC $libs/${name}_*.o $libs/sm80_*.o -o $libs/$name.so
  done
  rm $libs/*.o
  ;;
turns)
  $tool check first=$libs/first.so@64+128 after=$libs/after.so@64+128 rule=$libs/rule.so@64+128 --only turns
  ;;
check)
  $tool check rule=$libs/rule.so@${2:-64+128}
  ;;
wide)
  for part in turns packed dense softcap; do $tool check rule=$libs/rule.so@192+256 --only $part; done
  ;;
time)
  $tool time first=$libs/first.so one=$libs/one.so after=$libs/after.so rule=$libs/rule.so --peers fa3 --fa3 "${FA3:-/tmp/fa3}"
  ;;
rest)
  $tool pairs first=$libs/first.so rule=$libs/rule.so --peers ""
  $tool time first=$libs/first.so rule=$libs/rule.so --peers "" --dims 192,256 --seqs 512,4096
  $tool time det_first=$libs/first.so det_one=$libs/one.so det_after=$libs/after.so --peers "" --seqs 512,2048,8192
  ;;
esac
