// Hopper's speed of reading a KV cache, by the size of a CTA's requests: the upper bound of
// decoding. Nothing is computed.
//
// A cache has pages of rows, a row has heads, a head has lines of 128 bytes, in any order (Layout).
// Each CTA reads runs of pages, for some of the heads, at the same time as CTAs that read the same
// rows for the others; a stage of its ring is 32 KiB.
#include <cuda_runtime.h>

#include <cstdint>

#include "../../csrc/ptx/bulk.cuh"
#include "../../csrc/ptx/cp_async.cuh"
#include "../../csrc/ptx/mbarrier.cuh"
#include "../../csrc/ptx/shared.cuh"
#include "../../csrc/ptx/tma.cuh"
#include "../../csrc/sm90/tma_map.h"

// Strides in bytes.
struct Layout {
  int32_t lines, heads, page_rows, log_pages, shuffled;
  int64_t head, row, page;
};

// The size of one copy, and the number of heads that a CTA reads.
struct Pattern {
  int32_t lines, copy_heads, rows, heads;
};

namespace {

namespace ptx = flashsci::ptx;

constexpr int kLineBytes = 128, kStageBytes = 32768, kMostStages = 6;
constexpr int kLoaders = 128, kConsumers = 4, kThreads = kLoaders + kConsumers * 32;

struct Args {
  const unsigned char* cache;
  Layout layout;
  Pattern pattern;
  int keys;  // rows per stage
  int stages;
  unsigned* sum;  // sum of all words that were read, or null
};

struct Storage {
  uint64_t full[kMostStages], empty[kMostStages];
  alignas(1024) unsigned char ring[1][kStageBytes];  // one per stage
};

// A permutation of 2^bits numbers.
__device__ __forceinline__ int shuffled(uint32_t x, int bits) {
  const uint32_t mask = (1u << bits) - 1;
#pragma unroll
  for (int round = 0; round < 3; ++round) {
    x = x * 0x9E3779B1u & mask;
    x ^= x >> (bits / 2);
  }
  return static_cast<int>(x);
}
__device__ __forceinline__ int page_of(const Layout& layout, int row) {
  const int page = row / layout.page_rows;
  return layout.shuffled ? shuffled(page, layout.log_pages) : page;
}

// The rows that a CTA reads, in blocks of a stage.
struct Part {
  int first_head, begin, end;
  __device__ __forceinline__ explicit Part(const Args& a) {
    const int groups = a.layout.heads / a.pattern.heads;
    const int ctas = static_cast<int>(gridDim.x) / groups,
              cta = static_cast<int>(blockIdx.x) % ctas;
    const int64_t blocks = (int64_t{a.layout.page_rows} << a.layout.log_pages) / a.keys;
    first_head = static_cast<int>(blockIdx.x) / ctas * a.pattern.heads;
    begin = static_cast<int>(blocks * cta / ctas),
    end = static_cast<int>(blocks * (cta + 1) / ctas);
    if (first_head >= a.layout.heads) begin = end;  // the remaining CTAs have no heads
  }
};

// A thread's part of a stage.
__device__ __forceinline__ unsigned sum_of(const unsigned char* stage) {
  unsigned sum = 0;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) - kLoaders; i < kStageBytes / 16;
       i += kConsumers * 32) {
    const uint4 words = ptx::ld_shared_v4(ptx::shared_address(stage) + i * 16);
    sum += words.x + words.y + words.z + words.w;
  }
  return sum;
}

// Calls load(stage, row, head) with the first row and head of each block, on `arrivals` threads,
// each of which arrives once.
template <class Load>
__device__ __forceinline__ void for_blocks(Storage& shared, const Args& a, int arrivals,
                                           const Load& load) {
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
      load(stage, block * a.keys, part.first_head);
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

// Boxes of a tensor map: the first half of the lines (K) before the second (V).
__global__ void __launch_bounds__(kThreads)
    read_boxes(const __grid_constant__ CUtensorMap map, const __grid_constant__ Args a) {
  Storage& shared = storage();
  const Pattern& p = a.pattern;
  const int bytes = p.lines * p.copy_heads * p.rows * kLineBytes, copies = kStageBytes / bytes;
  const int lines = max(1, a.layout.lines / 2 / p.lines), heads = p.heads / p.copy_heads,
            slices = a.keys / p.rows;
  for_blocks(shared, a, copies, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
    const int line = i % lines, head = i / lines % heads, slice = i / lines / heads % slices;
    const int half = i / lines / heads / slices;
    const int key = row + slice * p.rows;
    const uint32_t full = ptx::shared_address(&shared.full[stage]);
    ptx::mbarrier_arrive_expect(full, bytes);
    ptx::tma_load_5d(ptx::shared_address(shared.ring[stage]) + i * bytes, &map, full, 0,
                     (half * lines + line) * p.lines, first_head + head * p.copy_heads,
                     key % a.layout.page_rows, page_of(a.layout, key));
  });
}

__device__ __forceinline__ const unsigned char* line_at(const Args& a, int row, int head,
                                                        int line) {
  const Layout& layout = a.layout;
  return a.cache + page_of(layout, row) * layout.page + row % layout.page_rows * layout.row +
         head * layout.head + line * kLineBytes;
}

// "cp.async.bulk": neighbouring lines, and neighbouring rows.
__global__ void __launch_bounds__(kThreads) read_rows(const __grid_constant__ Args a) {
  Storage& shared = storage();
  const Pattern& p = a.pattern;
  const int bytes = p.lines * p.rows * kLineBytes,
            copies = kStageBytes / bytes;  // at most kLoaders
  const int slices = a.keys / p.rows;
  for_blocks(shared, a, copies, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
    const uint32_t full = ptx::shared_address(&shared.full[stage]);
    ptx::mbarrier_arrive_expect(full, bytes);
    const int head = i % p.heads, slice = i / p.heads % slices, last = i / p.heads / slices;
    ptx::bulk_load(ptx::shared_address(shared.ring[stage]) + i * bytes,
                   line_at(a, row + slice * p.rows, first_head + head, last * p.lines), bytes,
                   full);
  });
}

// "cp.async": 16 bytes per thread, 16 threads for two lines of a row.
__global__ void __launch_bounds__(kThreads) read_pieces(const __grid_constant__ Args a) {
  Storage& shared = storage();
  for_blocks(shared, a, kLoaders, [&](int stage, int row, int first_head) {
    const int i = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int pass = 0; pass < kStageBytes / 16 / kLoaders; ++pass) {
      const int at = pass * kLoaders + i, key = at / 16 % a.keys, last = at / 16 / a.keys;
      ptx::cp_async_16(ptx::shared_address(shared.ring[stage]) + at * 16,
                       line_at(a, row + key, first_head, last * 2) + at % 16 * 16, true);
    }
    ptx::cp_async_arrive(ptx::shared_address(&shared.full[stage]));
  });
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int ctas, int stages, cudaStream_t stream,
                   const Arguments&... arguments) {
  const int bytes = static_cast<int>(sizeof(Storage)) + (stages - 1) * kStageBytes + 1024;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<ctas, kThreads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace

// by: 0 boxes, 1 rows, 2 pieces. promotion: CUtensorMapL2promotion, of boxes.
extern "C" int read_pages(int by, const void* cache, const Layout* layout, const Pattern* pattern,
                          int promotion, int stages, int ctas, unsigned* sum, void* stream) {
  const Layout& l = *layout;
  const Pattern& p = *pattern;
  const int keys = kStageBytes / (l.lines * p.heads * kLineBytes);
  const Args a = {static_cast<const unsigned char*>(cache), l, p, keys, stages, sum};
  const auto on = static_cast<cudaStream_t>(stream);
  if (by == 1) return launch(read_rows, ctas, stages, on, a);
  if (by == 2) return launch(read_pieces, ctas, stages, on, a);
  const auto encode = flashsci::sm90::encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  CUtensorMap map;
  const auto dim = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t size[5] = {64, dim(l.lines), dim(l.heads), dim(l.page_rows),
                              dim(1) << l.log_pages};
  const cuuint64_t stride[4] = {kLineBytes, dim(l.head), dim(l.row), dim(l.page)};
  const auto box_dim = [](int x) { return static_cast<cuuint32_t>(x); };
  const cuuint32_t box[5] = {64, box_dim(p.lines), box_dim(p.copy_heads), box_dim(p.rows), 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult encoded =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(cache), size, stride, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             static_cast<CUtensorMapL2promotion>(promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (encoded != CUDA_SUCCESS) return cudaErrorInvalidValue;
  return launch(read_boxes, ctas, stages, on, map, a);
}
