#!/usr/bin/env bash
# The CUDA library without CMake or pip: what the build does, as a dozen lines of nvcc and g++.
#
#   scripts/build_manual.sh [OUTPUT]      default build/manual/_C.so
#   FA_ARCHS=80,90 FA_TILE_PRESET=1 PYTHON=.venv/bin/python NVCC=nvcc CXX=g++
#
# Same sources, flags (cmake/nvcc_flags.txt) and exported symbols as the wheel's _C.so.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-build/manual/_C.so}
python=${PYTHON:-python3} nvcc=${NVCC:-nvcc} cxx=${CXX:-g++}
command -v "$nvcc" >/dev/null || { echo "build_manual: no nvcc; install the CUDA toolkit or set NVCC" >&2; exit 1; }
torch=${TORCH_DIR:-$("$python" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")}
[ -n "$torch" ] || { echo "build_manual: no torch in $python; set PYTHON or TORCH_DIR" >&2; exit 1; }
cuda=$("$nvcc" --dryrun -c x.cu 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a wrapper
version=$("$nvcc" --version | sed -n 's/.*release .*, V//p')

archs=${FA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | paste -sd, || true)}
archs=$(echo "${archs:-75,80,90}" | tr ' ;' ',,')
preset=${FA_TILE_PRESET:-}
preset=${preset/t4_safe/0} preset=${preset/ampere_balanced/1}

sm90= sm80= # one pass of the front end (PTX 80), one of ptxas for each architecture
for arch in ${archs//,/ }; do
  arch=${arch%[af]}
  [ "$arch" -ge 80 ] && sm80+=,sm_$arch
  [ "$arch" -eq 90 ] && sm90=1
done

work=$(dirname "$output")/objects
mkdir -p "$work"
mapfile -t flags <cmake/nvcc_flags.txt
flags+=(--compress-mode=size ${preset:+-DFLASHSCI_TILE_PRESET=$preset})
objects=() have=()
if [ -n "$sm80" ]; then
  for dtype in fp16 bf16; do # two at a time
    "$nvcc" "${flags[@]}" -gencode "arch=compute_80,code=[compute_80$sm80]" -c "csrc/sm80/forward_$dtype.cu" -o "$work/sm80_$dtype.o" &
    objects+=("$work/sm80_$dtype.o") have+=("-DFLASHSCI_HAVE_SM80_${dtype^^}=1")
  done
  wait -n && wait -n
fi
if [ -n "$sm90" ]; then
  for dtype in fp16 bf16; do
    "$nvcc" "${flags[@]}" -gencode arch=compute_90a,code=sm_90a -c "csrc/sm90/forward_$dtype.cu" -o "$work/sm90_$dtype.o" &
    objects+=("$work/sm90_$dtype.o") have+=("-DFLASHSCI_HAVE_SM90_${dtype^^}=1")
  done
  wait -n && wait -n
fi
kernels=(${objects[@]+"${objects[@]}"})
"$python" flashsci/digest.py cuda --build-info "$work/build_info.inc" --archs "$archs" "--preset=$preset" "--nvcc=$version"
for unit in library forward info; do
  "$cxx" -std=c++17 -O2 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden ${have[@]+"${have[@]}"} \
    -DTORCH_TARGET_VERSION=0x020a000000000000ULL -isystem "$torch/include" -isystem "$cuda/include" -I"$work" \
    -c "csrc/bindings/$unit.cpp" -o "$work/$unit.o"
  objects+=("$work/$unit.o")
done
"$cxx" -shared -o "$output" "${objects[@]}" -Wl,--version-script=cmake/exports.map,--exclude-libs,ALL,-s \
  -Wl,--no-as-needed "$torch/lib/libtorch.so" "$torch/lib/libtorch_cpu.so" \
  -L"$cuda/lib64" -L"$cuda/targets/x86_64-linux/lib" -lcudart_static -ldl -lrt -lpthread
# The standalone runner, for compute-sanitizer and profilers (csrc/tests).
if [ -n "$sm80" ]; then
  "$cxx" -std=c++17 -O2 "${have[@]}" -isystem "$cuda/include" csrc/tests/forward_runner.cpp "${kernels[@]}" -o "$(dirname "$output")/forward_runner" \
    -L"$cuda/lib64" -L"$cuda/targets/x86_64-linux/lib" -lcudart_static -ldl -lrt -lpthread
fi
echo "built $output for $archs ($(du -k "$output" | cut -f1) kB)"
