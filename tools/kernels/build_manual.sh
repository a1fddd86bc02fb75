#!/usr/bin/env bash
# The CUDA library without CMake or pip: what the build does, as a dozen lines of nvcc and g++.
#
#   tools/kernels/build_manual.sh [OUTPUT]      default build/manual/_C.so
#   FA_ARCHS=80,90 FA_TILE_PRESET=1 PYTHON=.venv/bin/python NVCC=nvcc CXX=g++
#   FLASHSCI_POISON=1                     a debug build: free memory holds NaN (csrc/core/poison.cuh)
#
# Same sources, flags (cmake/nvcc_flags.txt) and exported symbols as the wheel's _C.so, which runs on older glibc, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
output=${1:-build/manual/_C.so}
python=${PYTHON:-python3} nvcc=${NVCC:-nvcc} cxx=${CXX:-g++}
command -v "$nvcc" >/dev/null || { echo "build_manual: no nvcc; install the CUDA toolkit or set NVCC" >&2; exit 1; }
torch=${TORCH_DIR:-$("$python" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")}
[ -n "$torch" ] || { echo "build_manual: no torch in $python; set PYTHON or TORCH_DIR" >&2; exit 1; }
cuda=$("$nvcc" --dryrun -c x.cu 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a wrapper
version=$("$nvcc" --version | sed -n 's/.*release .*, V//p')

archs=${FA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | paste -sd, || true)}
archs=$(echo "${archs:-75,80,90}" | tr ' ;,' '\n' | grep . | sort -nu | paste -sd,)
preset=${FA_TILE_PRESET:-}
preset=${preset/t4_safe/0} preset=${preset/ampere_balanced/1}
poison=${FLASHSCI_POISON:-}
case ${poison,,} in 0 | off | no | false) poison= ;; esac

declare -A code # of a folder of csrc: one pass of the front end, one of ptxas for each architecture
for arch in ${archs//,/ }; do
  arch=${arch%[af]}
  if [ "$arch" -lt 80 ]; then code[sm75]=arch=compute_75,code=[compute_75,sm_75]; else sm80+=,sm_$arch; fi
  if [ "$arch" -eq 90 ]; then code[sm90]=arch=compute_90a,code=sm_90a; fi
done
[ -z "${sm80:-}" ] || code[sm80]="arch=compute_80,code=[compute_80$sm80]"
code_of() { # of csrc/$1/..., with what cmake/left_out.txt leaves out
  local targets=${code[${1%%/*}]} folder left_out arch
  while read -r folder left_out; do
    [[ $1/ == "$folder"/* ]] || continue
    for arch in $left_out; do
      if [[ $targets =~ ,sm_.*,sm_$arch[],] ]]; then targets=${targets/,sm_$arch/}; fi
    done
  done < <(grep -v '^#' cmake/left_out.txt)
  echo "$targets"
}

work=$(dirname "$output")/objects
mkdir -p "$work"
mapfile -t flags <cmake/nvcc_flags.txt
flags+=(--compress-mode=size ${preset:+-DFLASHSCI_TILE_PRESET=$preset} ${poison:+-DFLASHSCI_POISON})
kernels=() have=()
for source in csrc/sm*/*/*.cu; do # two at a time
  IFS=/ read -r _ folder kernel name <<<"${source%.cu}"
  [ -n "${code[$folder]:-}" ] || continue
  unit=${folder}_${kernel%%_*}_$name # such as sm80_fwd_bf16
  [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
  "$nvcc" "${flags[@]}" -gencode "$(code_of "$folder/$kernel")" -c "$source" -o "$work/$unit.o" &
  kernels+=("$work/$unit.o") have+=("-DFLASHSCI_HAVE_${unit^^}=1")
done
while [ -n "$(jobs -p)" ]; do wait -n; done
objects=(${kernels[@]+"${kernels[@]}"})
"$python" flashsci/digest.py cuda --build-info "$work/build_info.inc" --archs "$archs" "--preset=$preset" "--nvcc=$version" ${poison:+--poison}
for unit in library call forward backward fp8 paged info older_runtimes; do
  "$cxx" -std=c++17 -O2 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden ${have[@]+"${have[@]}"} \
    -DTORCH_TARGET_VERSION=0x020a000000000000ULL ${poison:+-DFLASHSCI_POISON} -isystem "$torch/include" -isystem "$cuda/include" -I"$work" \
    -c "csrc/bindings/$unit.cpp" -o "$work/$unit.o"
  objects+=("$work/$unit.o")
done
"$cxx" -shared -o "$output" "${objects[@]}" -Wl,--version-script=cmake/exports.map,--exclude-libs,ALL,-s \
  -Wl,--no-as-needed "$torch/lib/libtorch.so" "$torch/lib/libtorch_cpu.so" \
  -L"$cuda/lib64" -L"$cuda/targets/x86_64-linux/lib" -lcudart_static -ldl -lrt -lpthread
# The standalone runners, for compute-sanitizer and profilers (tests/cuda).
if [ -n "${code[sm80]:-}" ]; then
  for runner in tests/cuda/*.cpp; do
    "$cxx" -std=c++17 -O2 "${have[@]}" -isystem "$cuda/include" "$runner" "${kernels[@]}" -o "$(dirname "$output")/$(basename "$runner" .cpp)" \
      -L"$cuda/lib64" -L"$cuda/targets/x86_64-linux/lib" -lcudart_static -ldl -lrt -lpthread
  done
fi
echo "built $output for $archs ($(du -k "$output" | cut -f1) kB)"
