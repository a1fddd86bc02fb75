// The kernel before the main kernel of the sm90 backward, by tiles of query rows: delta, lse in
// powers of two and a cleared accumulator.
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

// The rows of a query tile.
struct QueryTile {
  int row, count;  // row: in the tensor; count <= 0: no work
  uint32_t head, batch1, batch0;
  __device__ __forceinline__ int64_t offset(const FlashsciStrides& strides) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + head * strides.head +
           row * strides.row;
  }
};

template <class C, bool kVarlen>
__device__ __forceinline__ QueryTile find_query_tile(const BackwardArgs& a, uint32_t item) {
  const FlashsciBackwardParams& p = a.p;
  const uint32_t batch_head = item / a.q_tiles, index = item - batch_head * a.q_tiles;
  const uint32_t batch = batch_head / static_cast<uint32_t>(p.heads_q);
  QueryTile tile;
  tile.head = batch_head - batch * p.heads_q;
  tile.batch0 = batch / static_cast<uint32_t>(p.batch1);
  tile.batch1 = batch - tile.batch0 * static_cast<uint32_t>(p.batch1);
  if constexpr (kVarlen) {
    const TileOfSequence found = find_tile<C::kBlockQ>(
        static_cast<int>(index), p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
    const int inside = found.tile * C::kBlockQ;
    tile.row = found.first_q + inside;
    tile.count = found.tile >= 0 ? min(found.seq_q - inside, C::kBlockQ) : 0;
  } else {
    tile.row = index * C::kBlockQ;
    tile.count = min(p.seq_q - tile.row, C::kBlockQ);
  }
  return tile;
}

inline constexpr int kRowThreads = 256;
// Threads that share a row, 16 bytes each: a power of two.
constexpr __host__ __device__ int row_lanes(int boxes) { return boxes == 3 ? 32 : boxes * 8; }

template <class Op, class C, bool kVarlen>
__global__ void __launch_bounds__(kRowThreads)
    backward_preprocess_kernel(const __grid_constant__ BackwardArgs a) {
  __shared__ float sums[C::kBlockQ];  // per row: out times dout
  static_assert(C::kBlockQ <= kRowThreads);
  ptx::launch_dependents();
  constexpr int kLanes = row_lanes(C::kBoxesV);
  constexpr int kStep = kRowThreads / kLanes;
  const FlashsciBackwardParams& p = a.p;
  if constexpr (kVarlen) {
    if (a.dq_semaphores != nullptr && blockIdx.x == 0) {
      bool ascending = true;
      const auto check = [&](const int32_t* cu_seqlens, int total) {
        for (int i = threadIdx.x; i < p.num_seqs + 2; i += kRowThreads)
          ascending &= segment_begin(cu_seqlens, i, p.num_seqs, total) <=
                       segment_begin(cu_seqlens, i + 1, p.num_seqs, total);
      };
      check(p.cu_seqlens_q, p.seq_q);
      check(p.cu_seqlens_k, p.seq_k);
      ascending = __syncthreads_and(ascending);
      if (threadIdx.x == 0) *a.ascending = ascending;
    }
  }
  const QueryTile tile = find_query_tile<C, kVarlen>(a, blockIdx.x);
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.handed_out = a.known;
  if (tile.count <= 0) return;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  const uint16_t* out = static_cast<const uint16_t*>(p.out) + tile.offset(p.out_strides);
  const uint16_t* dout = static_cast<const uint16_t*>(p.dout) + tile.offset(p.dout_strides);
  const bool mine = lane * 8 < p.head_dim_v && p.dout != nullptr;
  const int64_t statistics = static_cast<int64_t>(blockIdx.x) * C::kBlockQ;
  const uint32_t part = blockIdx.x * C::kConsumers;
  // One thread per row loads its lse, before out and dout are loaded.
  const bool row_thread = threadIdx.x < C::kBlockQ;
  const bool row_exists = row_thread && static_cast<int>(threadIdx.x) < tile.count;
  const int64_t batch_head = (tile.batch0 * p.batch1 + tile.batch1) * p.heads_q + tile.head;
  const float natural_lse =
      row_exists ? p.lse[batch_head * p.seq_q + tile.row + threadIdx.x] : -INFINITY;
  const float dlse = row_exists && p.dlse != nullptr
                         ? p.dlse[tile.offset(p.dlse_strides) + threadIdx.x * p.dlse_strides.row]
                         : 0.f;
  uint4 x[C::kBlockQ / kStep], y[C::kBlockQ / kStep];
#pragma unroll
  for (int i = 0; i < C::kBlockQ / kStep; ++i) {
    const int row = first + i * kStep;
    x[i] = y[i] = make_uint4(0, 0, 0, 0);
    if (mine && row < tile.count) {
      x[i] = *reinterpret_cast<const uint4*>(out + row * p.out_strides.row + lane * 8);
      y[i] = *reinterpret_cast<const uint4*>(dout + row * p.dout_strides.row + lane * 8);
    }
  }
  if (a.dq_semaphores != nullptr && threadIdx.x < C::kCounters)
    a.dq_semaphores[static_cast<int64_t>(blockIdx.x) * C::kCounters + threadIdx.x] = 0;
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w) {
    if (!wants_dq<C>(a, w)) continue;
    auto* accumulator = reinterpret_cast<float4*>(dq_of<C>(a, part + w, w));
#pragma unroll
    for (int i = 0; i < C::dq_columns(w) * 16; i += kRowThreads)
      accumulator[i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int i = 0; i < C::kBlockQ / kStep; ++i) {
    const uint32_t u[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, v[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
    float sum = 0.f;
#pragma unroll
    for (int word = 0; word < 4; ++word)
      sum += Op::to_float(static_cast<uint16_t>(u[word])) *
                 Op::to_float(static_cast<uint16_t>(v[word])) +
             Op::to_float(static_cast<uint16_t>(u[word] >> 16)) *
                 Op::to_float(static_cast<uint16_t>(v[word] >> 16));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) sums[first + i * kStep] = sum;
  }
  // lse in powers of two; finite for rows that see no key and for rows past the last.
  const bool sees_none = natural_lse == -INFINITY;
  const float lse = sees_none ? 3.4e38f : lse_of_backward(natural_lse);
  const bool large = __syncthreads_or(!sees_none && is_large(lse));
  if (row_thread) {
    a.lse[statistics + threadIdx.x] = threadIdx.x < kFlaggedRows ? flagged(lse, large) : lse;
    a.delta[statistics + threadIdx.x] = sees_none ? 0.f : dlse - sums[threadIdx.x];
  }
}

}  // namespace flashsci::sm90::bwd
