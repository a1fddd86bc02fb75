#!/bin/bash
# Backward units: base (before), new (clusters above D 128, rows among tiles), bound (additions of dQ left out: wrong on purpose).
export PYTHONPATH=$PWD
mkdir -p $OUT/t /tmp/fa3; date +%T
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
python - <<'PY'
import lzma, shutil
shutil.copyfileobj(lzma.open("fa3/_C90.so.xz"), open("/tmp/fa3/_C.so", "wb"), 1 << 24)
shutil.copy("fa3/libcudart.so.12", "/tmp/fa3/")
PY
export FLASHSCI_FA3=/tmp/fa3/_C.so
date +%T
# a wrong wait would hang: one small cell each first, with a limit
for d in 64 128 256 192 192/128; do timeout 40 python -m tools.kernels.time_builds new=units/new.so --dims $d --seqs 512 --peers "" --seconds 0.05 > $OUT/t/try_${d/\//_}.txt 2>&1 || { echo "FAILED $d"; tail -3 $OUT/t/try_${d/\//_}.txt | cut -c1-300; }; done
date +%T
timeout 400 python -m tools.kernels.time_builds base=units/base.so new=units/new.so --dims 64,128,256,192,192/128,96 --seqs 512,1024,2048,4096,8192,16384 --peers sdpa:cudnn,fa3 --seconds 0.12 --json $OUT/t/bwd.json > $OUT/t/bwd.txt 2>&1
grep -v forward $OUT/t/bwd.txt | cut -c1-230 | tail -75
date +%T
timeout 60 python -m tools.kernels.time_builds new=units/new.so bound=units/bound.so --dims 64,128,256 --seqs 4096,16384 --peers "" --seconds 0.1 --no-check > $OUT/t/bound.txt 2>&1; grep -v forward $OUT/t/bound.txt | cut -c1-200 | tail -14
timeout 40 python -m tools.kernels.time_builds detbase=units/base.so detnew=units/new.so --dims 64,128,256 --seqs 1024,4096 --peers "" --seconds 0.1 > $OUT/t/det.txt 2>&1; grep -v forward $OUT/t/det.txt | cut -c1-200 | tail -14
date +%T
tar czf $OUT/t.tgz -C $OUT t; rm -rf $OUT/t
