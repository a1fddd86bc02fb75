// dQ of query tiles from its fp32 accumulator, and the kernel that does so after the main kernel of
// the sm90 backward.
#pragma once
#include <cstdint>

#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "preprocess.cuh"

namespace flashsci::sm90::bwd {

// By kThreads threads. In an accumulator, `quad` of four threads has 8 columns of a row, and of the
// eighth row behind it.
template <class Op, class C, int kThreads>
__device__ __forceinline__ void finish_rows(const BackwardArgs& a, const QueryTile& tile,
                                            uint32_t query_tile, uint32_t thread) {
  const FlashsciBackwardParams& p = a.p;
  auto* dq = static_cast<uint16_t*>(p.dq) + tile.offset(p.dq_strides);
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w) {
    if (!wants_dq<C>(a, w)) continue;
    const auto* accumulator =
        reinterpret_cast<const float4*>(dq_of<C>(a, query_tile * C::kConsumers + w, w));
    const uint32_t pieces = C::dq_columns(w) / 8;
#pragma unroll 2
    for (uint32_t i = thread; i < pieces * 32; i += kThreads) {
      const uint32_t piece = i % pieces, quad = i / pieces;
      const int row = (C::kSplitRows ? w * 64 : 0) + quad / 8 * 16 + quad % 8;
      const int column = (C::kSplitRows ? 0 : w * C::kDqColumns) + piece * 8;
      if (column >= p.head_dim) continue;
      uint32_t first[4], second[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 x = accumulator[piece * 128 + quad * 4 + j];
        first[j] = Op::pack2(x.x * p.scale, x.y * p.scale);
        second[j] = Op::pack2(x.z * p.scale, x.w * p.scale);
      }
      const auto store = [&](int to, const uint32_t (&x)[4]) {
        if (to < tile.count)
          *reinterpret_cast<uint4*>(dq + to * p.dq_strides.row + column) =
              make_uint4(x[0], x[1], x[2], x[3]);
      };
      store(row, first);
      store(row + 8, second);
    }
  }
}

template <class Op, class C, bool kVarlen>
__global__ void __launch_bounds__(kRowThreads)
    backward_postprocess_kernel(const __grid_constant__ BackwardArgs a) {
  const QueryTile tile = find_query_tile<C, kVarlen>(a, blockIdx.x);
  if (tile.count <= 0) return;
  ptx::wait_for_prerequisites();
  finish_rows<Op, C, kRowThreads>(a, tile, blockIdx.x, threadIdx.x);
}

}  // namespace flashsci::sm90::bwd
