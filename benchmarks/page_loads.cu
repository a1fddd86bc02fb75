// How fast Hopper reads pages of a KV cache, by what a CTA asks for at a time: the roof of paged attention. Nothing is computed.
//
// The cache is [pages][16 rows][8 heads][4 lines][64] of 16 bits, as vLLM has it at head dim 128: two lines of K, two of V. Each CTA
// reads runs of pages, in an order that looks random, for some of the heads; a stage of its ring is 32 KiB.
#include <cuda_runtime.h>

#include <cstdint>

#include "../csrc/ptx/bulk.cuh"
#include "../csrc/ptx/cp_async.cuh"
#include "../csrc/ptx/mbarrier.cuh"
#include "../csrc/ptx/shared.cuh"
#include "../csrc/ptx/tma.cuh"
#include "../csrc/sm90/tma_map.h"

namespace {

namespace ptx = flashsci::ptx;

constexpr int kPageRows = 16, kHeads = 8, kLines = 4, kLineBytes = 128;
constexpr int kRowBytes = kHeads * kLines * kLineBytes, kPageBytes = kPageRows * kRowBytes;
constexpr int kStageBytes = 32768, kMostStages = 6;
constexpr int kLoaders = 128, kConsumers = 4, kThreads = kLoaders + kConsumers * 32;

// What one copy takes, and what a stage holds: heads * keys = 64.
struct Pattern {
  int lines, copy_heads, rows;
  int heads, keys;
};

struct Args {
  const unsigned char* cache;
  int log_pages, stages;
  Pattern pattern;
  unsigned* sum;  // of all words that were read, if there is such a place
};

struct Storage {
  alignas(1024) unsigned char ring[kMostStages][kStageBytes];
  uint64_t full[kMostStages], empty[kMostStages];
};

// A permutation of 2^bits numbers.
__device__ __forceinline__ uint32_t shuffled(uint32_t x, int bits) {
  const uint32_t mask = (1u << bits) - 1;
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    x = x * 0x9E3779B1u & mask;
    x ^= x >> (bits / 2);
  }
  return x;
}

// The rows that a CTA reads: all of them, of its heads, side by side with what CTAs of other heads read.
struct Part {
  int first_head, begin, end;  // blocks of pattern.keys rows
  __device__ __forceinline__ explicit Part(const Args& a) {
    const int groups = kHeads / a.pattern.heads;
    const int ctas = static_cast<int>(gridDim.x) / groups, cta = static_cast<int>(blockIdx.x) % ctas;
    const int64_t blocks = (int64_t{kPageRows} << a.log_pages) / a.pattern.keys;
    first_head = static_cast<int>(blockIdx.x) / ctas * a.pattern.heads;
    begin = static_cast<int>(blocks * cta / ctas), end = static_cast<int>(blocks * (cta + 1) / ctas);
    if (first_head >= kHeads) begin = end;  // what is left over
  }
};

// A thread's part of a stage.
__device__ __forceinline__ unsigned sum_of(const unsigned char* stage) {
  unsigned sum = 0;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) - kLoaders; i < kStageBytes / 16; i += kConsumers * 32) {
    const uint4 words = ptx::ld_shared_v4(ptx::shared_address(stage) + i * 16);
    sum += words.x + words.y + words.z + words.w;
  }
  return sum;
}

// load(stage, row, head) on `arrivals` threads, each of which arrives once, for each block: its first row and head.
template <class Load>
__device__ __forceinline__ void for_blocks(Storage& shared, const Args& a, int arrivals, const Load& load) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), arrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const Part part(a);
  int stage = 0;
  uint32_t parity = 0;
  unsigned sum = 0;
  for (int block = part.begin; block < part.end; ++block) {
    if (threadIdx.x < arrivals) {  // the other loading threads would be left behind
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity ^ 1);
      load(stage, block * a.pattern.keys, part.first_head);
    } else if (threadIdx.x >= kLoaders) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
      if (a.sum != nullptr) sum += sum_of(shared.ring[stage]);
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
    }
    if (++stage == a.stages) stage = 0, parity ^= 1;
  }
  if (a.sum != nullptr) atomicAdd(a.sum, sum);
}

__device__ __forceinline__ Storage& storage() {
  extern __shared__ unsigned char memory[];
  return *reinterpret_cast<Storage*>(memory + (-ptx::shared_address(memory) & 1023u));
}

// Boxes of a tensor map: K before V, page by page.
__global__ void __launch_bounds__(kThreads, 1)
    read_boxes(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args a) {
  Storage& shared = storage();
  const Pattern& p = a.pattern;
  const int bytes = p.lines * p.copy_heads * p.rows * kLineBytes, copies = kStageBytes / bytes;
  const int lines = max(1, 2 / p.lines), lasts = kLines / p.lines / lines;  // of K or V; K and V
  const int heads = p.heads / p.copy_heads;
  for_blocks(shared, a, copies, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
    const int line = i % lines, head = i / lines % heads;
    const int slice = i / lines / heads % (p.keys / p.rows), last = i / lines / heads / (p.keys / p.rows);
    const int key = row + slice * p.rows;
    const uint32_t full = ptx::shared_address(&shared.full[stage]);
    ptx::mbarrier_arrive_expect(full, bytes);
    ptx::tma_load_5d(ptx::shared_address(shared.ring[stage]) + i * bytes, &map, full, 0,
                     (last % lasts * lines + line) * p.lines, first_head + head * p.copy_heads,
                     key % kPageRows, static_cast<int>(shuffled(key / kPageRows, a.log_pages)));
  });
}

__device__ __forceinline__ const unsigned char* row_of(const Args& a, int key, int head, int line) {
  const int64_t page = shuffled(key / kPageRows, a.log_pages);
  return a.cache + page * kPageBytes + key % kPageRows * kRowBytes + (head * kLines + line) * kLineBytes;
}

// Rows of K or V, or of both, side by side: a thread each.
__global__ void __launch_bounds__(kThreads, 1) read_rows(const __grid_constant__ Args a) {
  Storage& shared = storage();
  const Pattern& p = a.pattern;
  const int bytes = p.lines * kLineBytes, copies = kStageBytes / bytes;  // at most kLoaders
  for_blocks(shared, a, copies, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
    const uint32_t full = ptx::shared_address(&shared.full[stage]);
    ptx::mbarrier_arrive_expect(full, bytes);
    const int head = i % p.heads, key = i / p.heads % p.keys, last = i / p.heads / p.keys;
    ptx::bulk_load(ptx::shared_address(shared.ring[stage]) + i * bytes,
              row_of(a, row + key, first_head + head, last * p.lines), bytes, full);
  });
}

// 16 bytes of a thread, 16 threads a row of K or V.
__global__ void __launch_bounds__(kThreads, 1) read_pieces(const __grid_constant__ Args a) {
  Storage& shared = storage();
  for_blocks(shared, a, kLoaders, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int pass = 0; pass < 16; ++pass) {
      const int at = pass * kLoaders + i, key = row + at / 16 % 64, last = at / 16 / 64;
      ptx::cp_async_16(ptx::shared_address(shared.ring[stage]) + at * 16,
                        row_of(a, key, first_head, last * 2) + at % 16 * 16, true);
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(
                     ptx::shared_address(&shared.full[stage]))
                 : "memory");
  });
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int ctas, cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kBytes = sizeof(Storage) + 1024;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<ctas, kThreads, kBytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace

// by: 0 boxes, 1 rows, 2 pieces. promotion: CUtensorMapL2promotion, of boxes.
extern "C" int read_pages(int by, const void* cache, int log_pages, int lines, int copy_heads, int rows,
                          int heads, int promotion, int stages, int ctas, unsigned* sum,
                          void* stream) {
  const Pattern pattern = {lines, copy_heads, rows, heads, 64 / heads};
  const Args a = {static_cast<const unsigned char*>(cache), log_pages, stages, pattern, sum};
  const auto on = static_cast<cudaStream_t>(stream);
  if (by == 1) return launch(read_rows, ctas, on, a);
  if (by == 2) return launch(read_pieces, ctas, on, a);
  const auto encode = flashsci::sm90::encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  CUtensorMap map;
  const cuuint64_t size[5] = {64, kLines, kHeads, kPageRows, cuuint64_t{1} << log_pages};
  const cuuint64_t stride[4] = {kLineBytes, kLines * kLineBytes, kRowBytes, kPageBytes};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(lines), static_cast<cuuint32_t>(copy_heads),
                             static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult encoded = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(cache), size, stride, box,
                                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  static_cast<CUtensorMapL2promotion>(promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS) return cudaErrorInvalidValue;
  return launch(read_boxes, ctas, on, map, a);
}
