// The kernels before and after the backward products, by rows of queries.
//
// Maths     statistics_i = (-lse_i log2(e), -delta_i), delta_i = sum_d dout_id out_id - dlse_i, with
//           dropout -(1 - p) delta_i;
//           before that the fp32 sums of dq are zeroed. After: dq = scale * sums, rounded.
// Roles     statistics_kernel: a row is read by 4 to 32 lanes, 16 bytes each. dq_kernel: a CTA
//           converts one tile of sums, whose order is that of the fragments that were added
//           (BackwardTiling).
// Shared    None.
// Pipeline  None: enough CTAs.
// Limits    Memory.
#pragma once
#include "kernel.cuh"

namespace flashsci::sm80::bwd {

template <class Op, class... Drop>
__global__ void __launch_bounds__(kRowThreads, 6)
    statistics_kernel(const __grid_constant__ FlashsciBackwardParams p,
                      const __grid_constant__ BackwardPlan plan, uint32_t tiles, int lanes,
                      int vector, int64_t sums_float4, Drop... dropout) {
  find_statistics<Op>(p, plan, tiles, lanes, vector);
  if constexpr (sizeof...(Drop) != 0) {
    const TileCoord place(blockIdx.x, tiles, p.heads_q, p);
    const int row = place.tile * (kRowThreads / lanes) + threadIdx.x / lanes;
    if (row < p.seq_q && threadIdx.x % lanes == 0)  // this thread's own entry
      plan.statistics[(static_cast<int64_t>(place.batch) * p.heads_q + place.head) * p.seq_q + row]
          .y *= (1.f / ... / dropout.keep_scale);
  }
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kRowThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; i < sums_float4;
       i += threads)
    reinterpret_cast<float4*>(plan.dq_sums)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A thread converts the values of a quad's four lanes for one row of one n8 block.
template <class Op, class C>
__global__ void __launch_bounds__(kRowThreads, 6)
    dq_kernel(const __grid_constant__ FlashsciBackwardParams p,
              const __grid_constant__ BackwardPlan plan) {
  const TileCoord place(blockIdx.x, plan.query_slots, p.heads_q, p);
  int tile = static_cast<int>(place.tile), first = 0, queries = p.seq_q;
  if (p.cu_seqlens_q != nullptr) {
    const TileOfSequence work = find_tile<C::kBlockQ>(place.tile, p.cu_seqlens_q, p.cu_seqlens_k,
                                                      p.num_seqs, p.seq_q, p.seq_k);
    tile = work.tile, first = work.first_q, queries = work.seq_q;
  }
  const int tile_row = tile * C::kBlockQ;
  if (tile < 0 || tile_row >= queries) return;
  const float* sums = plan.dq_sums + static_cast<int64_t>(blockIdx.x) * (C::kBlockQ * C::kHeadDim);
  uint16_t* dq = static_cast<uint16_t*>(p.dq) + place.offset(p.dq_strides, place.head) +
                 (first + tile_row) * p.dq_strides.row;
  constexpr int kN = 2 * C::kDqPairs;
#pragma unroll
  for (int i = threadIdx.x; i < C::kBlockQ * C::kHeadDim / kChunkElements; i += kRowThreads) {
    const int g = i % 8, n = i / 8 % kN, half = i / (8 * kN) % 2, m = i / (16 * kN) % C::kDqM;
    const int warp = i / (16 * kN * C::kDqM);
    const int row = (warp / C::kDqWarpsD * C::kDqM + m) * 16 + half * 8 + g;
    const int column = (warp % C::kDqWarpsD * kN + n) * kChunkElements;
    const int left = p.head_dim - column;
    if (tile_row + row >= queries || left <= 0) continue;
    const float* source = sums + (warp * C::kDqValues + (m * kN + n) * 4 + half * 2) * 32 + g * 4;
    const float4 even = *reinterpret_cast<const float4*>(source);
    const float4 odd = *reinterpret_cast<const float4*>(source + 32);
    const uint32_t word[4] = {
        Op::pack2(even.x * p.scale, odd.x * p.scale), Op::pack2(even.y * p.scale, odd.y * p.scale),
        Op::pack2(even.z * p.scale, odd.z * p.scale), Op::pack2(even.w * p.scale, odd.w * p.scale)};
    uint16_t* target = dq + row * p.dq_strides.row + column;
    if (plan.vector_dq) {
      *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int e = 0; e < kChunkElements; ++e)
        if (e < left) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
    }
  }
}

}  // namespace flashsci::sm80::bwd
