// The end of a tile in the sm90 forward: output and lse from the accumulators to global memory.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fwd {

// Normalises, writes lse and the output: every warp stages its rows in its own part of shared
// memory, 64 columns at a time, and the copy engine stores them. Where a packed sequence ends
// inside a box, lanes store 16 bytes each.
template <class Op, class C, bool kVarlen>
__device__ __forceinline__ void write_output(const float (&o)[C::kHeadDimV / 2],
                                             const RowStatistics& rows, const ForwardArgs& a,
                                             const TileInfo& tile, int seq_q,
                                             int warp_row,  // in the tile
                                             unsigned char (&staging)[C::kStaging][2048]) {
  const int lane = threadIdx.x % 32;
  const int row = ptx::redux_max(tile.row + warp_row);  // first of this warp's 16 rows
  const int rows_left = ptx::redux_max(seq_q) - row;
  if (rows_left <= 0) return;
  const int tensor_row = kVarlen ? tile.first_q + row : row;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    inverse[half] = sum == 0.f ? 0.f : ptx::rcp_approx(sum);
    const int i = lane / 4 + 8 * half;
    if (lane % 4 == 0 && i < rows_left) {
      const int64_t batch_head = (tile.batch0 * a.p.batch1 + tile.batch1) * a.p.heads_q + tile.head;
      a.p.lse[batch_head * a.p.seq_q + tensor_row + i] =
          sum == 0.f ? -INFINITY : (rows.row_max_log2[half] + ptx::lg2_approx(sum)) * kLn2;
    }
  }
  const bool whole = !kVarlen || rows_left >= 16;
#pragma unroll
  for (int block = 0; block < C::kBoxesV; ++block) {
    const uint32_t target = ptx::shared_address(staging[block % C::kStaging]);
    // The previous store from this place is as many groups back as there are places, except for the
    // first box of a tile, if the number of boxes is no multiple of the number of places.
    if (block == 0 && C::kBoxesV % C::kStaging != 0)
      ptx::bulk_wait_read<0>();
    else
      ptx::bulk_wait_read<C::kStaging - 1>();
    __syncwarp();
    poison_warp(target, 2048);
    // Rows of 128 bytes, their 16-byte chunks permuted by the row.
    const uint32_t target_row = target + lane % 16 * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns
      const int e = block * 32 + j * 8;
      if (e >= C::kHeadDimV / 2) break;
      ptx::stmatrix_x4(target_row + ((j * 2 + lane / 16) ^ (lane % 8)) * 16,
                       Op::pack2(o[e] * inverse[0], o[e + 1] * inverse[0]),
                       Op::pack2(o[e + 2] * inverse[1], o[e + 3] * inverse[1]),
                       Op::pack2(o[e + 4] * inverse[0], o[e + 5] * inverse[0]),
                       Op::pack2(o[e + 6] * inverse[1], o[e + 7] * inverse[1]));
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect()) {
      if (whole)
        ptx::tma_store_5d(&a.out, target, block * 64, tensor_row, tile.head, tile.batch1,
                          tile.batch0);
      ptx::bulk_commit();  // an empty group too: the wait above counts groups
    }
    if (!whole) {
      const int column = block * 64 + lane % 8 * 8;
#pragma unroll 1
      for (int i = lane / 8; i < rows_left; i += 4) {
        const uint4 words = ptx::ld_shared_v4(target + i * 128 + ((lane % 8) ^ (i % 8)) * 16);
        uint16_t* out = static_cast<uint16_t*>(a.p.out) +
                        offset_of(a.p.out_strides, tile, tile.head, tensor_row + i) + column;
        if (column < a.p.head_dim_v) *reinterpret_cast<uint4*>(out) = words;
      }
      __syncwarp();
    }
  }
}

}  // namespace flashsci::sm90::fwd
