// The gradient of a bias that is shared, in fp32: reduced to the bias's own shape, without atomics.
//
// Maths     dbias = the sum of dS = P (dO V^T - delta) over the dims that the bias lacks.
// Roles     A CTA owns a tile of dbias (one row or one key, if the bias has one) and adds up its
//           members: the batches, heads, row tiles and key tiles that share it. Where tiles are
//           few, `splits` CTAs share the members of one and leave partial sums to
//           bias_sum_fp32_kernel.
// Shared    As bwd_fp32/kernel.cuh; in the end the sums of the warps.
// Pipeline  None inside a CTA: the others of the SM work while one waits for its tiles.
// Limits    Two products and four conversions to halves for each member and tile.
#pragma once
#include "../../core/dbias_reduce.cuh"
#include "../../core/poison.cuh"
#include "../bwd_fp32/kernel.cuh"

namespace flashsci::sm80::dbias_fp32 {

using namespace bwd_fp32;  // of which it is a part

struct BiasFp32Plan : BiasPlan {
  float* sums;  // [splits, elements], if splits > 1
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    bias_gradient_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                              const __grid_constant__ BackwardFp32Plan plan,
                              const __grid_constant__ BiasFp32Plan bias) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  using RowTile = SplitFp16Tile<C::kBlockRows, C::kDim>;
  using ColumnTile = SplitFp16Tile<C::kBlockColumns, C::kDim>;
  const uint32_t split = blockIdx.x % bias.splits;
  BiasMember own;
  own.decode(blockIdx.x / bias.splits, bias.own);
  const uint32_t begin = static_cast<uint64_t>(bias.member_count) * split / bias.splits;
  const uint32_t end = static_cast<uint64_t>(bias.member_count) * (split + 1) / bias.splits;

  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const Window window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k);
  const bool three = p.precision == FLASHSCI_TF32X3;
  Stream<C::kBlockColumns, C::kDim, C::kThreads> stream(shared.stream);
  const uint32_t q_tile = ptx::shared_address(&shared.x),
                 dout_tile = ptx::shared_address(&shared.y);
  const uint32_t q_start = start_of_a<RowTile>(q_tile, warp * C::kRows);
  const uint32_t dout_start = start_of_a<RowTile>(dout_tile, warp * C::kRows);
  const uint32_t k_mixed = start_of_rows<ColumnTile>(stream.tile(0), true);
  const uint32_t k_high = start_of_rows<ColumnTile>(stream.tile(0), false);
  constexpr int kToV = sizeof(ColumnTile);

  float sum[C::kM][C::kN][4];  // dS summed over members: [m16, n8, fragment]
#pragma unroll
  for (int i = 0; i < C::kM * C::kN * 4; ++i) sum[i / (4 * C::kN)][i / 4 % C::kN][i % 4] = 0.f;

#pragma unroll 1
  for (uint32_t number = begin; number < end; number += stream.again ? 0 : 1) {
    BiasMember member;
    member.decode(number, bias.members);
#pragma unroll
    for (int i = 0; i < 5; ++i) member.index[i] += own.index[i];
    const int tile_row = member.index[3] * C::kBlockRows,
              tile_key = member.index[4] * C::kBlockColumns;
    HeadCoord place(0, 1, 1, 1);
    place.batch0 = member.index[0], place.batch1 = member.index[1], place.head = member.index[2];
    const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
    const int warp_row = tile_row + warp * C::kRows;
    const int warp_last_row = min(warp_row + C::kRows, p.seq_q) - 1;
    const int last_row = min(tile_row + C::kBlockRows, p.seq_q) - 1;
    if (window.begin(tile_row) >= tile_key + C::kBlockColumns || window.end(last_row) <= tile_key)
      continue;  // all of the CTA: no key of the tile is seen

    float2 statistics[C::kM][2];  // lse in log2 units, delta
    BiasMaskTile<C::kM, C::kN> pair_tile;
    const BiasMaskOfHead<> bias_mask(p.bias_mask, plan.bias_mask, place, place.head, p.seq_q,
                                     p.seq_k);
    const float2* of_rows =
        plan.statistics +
        ((member.index[0] * p.batch1 + member.index[1]) * p.heads_q + place.head) * p.seq_q +
        warp_row;
    if (!stream.again) {
      __syncthreads();  // nobody reads the member before
      load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
          q_tile,
          static_cast<const float*>(p.q) + place.offset(p.q_strides, place.head) +
              tile_row * p.q_strides.row,
          p.q_strides.row, p.seq_q - tile_row, p.head_dim, plan.vector != 0);
      load_raw<C::kBlockRows, C::kDim, C::kThreads, false>(
          dout_tile,
          static_cast<const float*>(p.dout) + place.offset(p.dout_strides, place.head) +
              tile_row * p.dout_strides.row,
          p.dout_strides.row, p.dout != nullptr ? p.seq_q - tile_row : 0, p.head_dim_v,
          plan.vector != 0);
      stream.load(0,
                  static_cast<const float*>(p.k) + place.offset(p.k_strides, head_k) +
                      tile_key * p.k_strides.row,
                  p.k_strides.row, p.seq_k - tile_key, p.head_dim, plan.vector != 0);
      stream.load(1,
                  static_cast<const float*>(p.v) + place.offset(p.v_strides, head_k) +
                      tile_key * p.v_strides.row,
                  p.v_strides.row, p.seq_k - tile_key, p.head_dim_v, plan.vector != 0);
      ptx::cp_async_commit();
    }
    pair_tile.load(bias_mask, warp_row + lane / 4, tile_key + lane % 4 * 4);
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i) {
      const int row = i * 8 + lane / 4;
      statistics[i / 2][i % 2] =
          warp_row + row < p.seq_q ? __ldg(of_rows + row) : make_float2(INFINITY, 0.f);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (!stream.again) {
      convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(q_tile, shared.x_factor);
      convert_in_place<C::kBlockRows, C::kDim, C::kThreads>(dout_tile, shared.y_factor);
    }
    stream.convert();
    if (warp_row >= p.seq_q || tile_key >= window.end(warp_last_row) ||
        tile_key + C::kBlockColumns <= window.begin(warp_row))
      continue;

    float s[C::kM][C::kN][4], factor[C::kM][2];
    multiply_rows<RowTile, ColumnTile, C::kDim>(s, q_start, k_mixed, k_high, three);
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      factor[i / 2][i % 2] =
          shared.x_factor[warp * C::kRows + i * 8 + lane / 4] * plan.inner * stream.factor(0);
    if (plan.cap != 0.f) {
#pragma unroll
      for (int i = 0; i < C::kM * C::kN * 4; ++i) {
        float& x = s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        x = plan.cap * tanh_accurate(factor[i / (4 * C::kN)][i % 4 / 2] * x);
      }
      set_all(factor, 1.f);
    }
    pair_tile.apply(s, bias_mask, factor);
    if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
    if (window.begin(warp_last_row) > tile_key ||
        window.end(warp_row) < tile_key + C::kBlockColumns)
      mask_interleaved(s, window, warp_row + lane / 4, tile_key + lane % 4 * 4);
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      s[m][n][e] = ptx::ex2_approx(fmaf(s[m][n][e], kLog2e, -statistics[m][e / 2].x));
    }
    if (any_large(statistics)) limit_probabilities(s);
    float dp[C::kM][C::kN][4];
    multiply_rows<RowTile, ColumnTile, C::kDim>(dp, dout_start, k_mixed + kToV, k_high + kToV,
                                                three);
#pragma unroll
    for (int i = 0; i < C::kM * 2; ++i)
      factor[i / 2][i % 2] = shared.y_factor[warp * C::kRows + i * 8 + lane / 4] * stream.factor(1);
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      sum[m][n][e] = fmaf(s[m][n][e], fmaf(dp[m][n][e], factor[m][e / 2], -statistics[m][e / 2].y),
                          sum[m][n][e]);
    }
  }

  // Sums over the rows or keys of the tile itself, where the bias has one for all.
  const bool own_rows = p.dbias_strides.row != 0 || p.seq_q == 1;
  const bool own_keys = p.dbias_strides.column != 0 || p.seq_k == 1;
  const int own_row = own.index[3] * C::kBlockRows + warp * C::kRows + lane / 4;
  const int own_key = own.index[4] * C::kBlockColumns + lane % 4 * 4;
  float* target =
      bias.splits > 1 ? bias.sums + split * bias.elements : static_cast<float*>(p.dbias);
  target += own.offset(p.dbias_strides, own.index[2]);
  if (!own_keys) add_keys(sum);
  if (own_rows) {
#pragma unroll
    for (int i = 0; i < C::kM * C::kN * 4; ++i) {
      const int m = i / (4 * C::kN), n = i / 4 % C::kN, e = i % 4;
      const int row = own_row + m * 16 + e / 2 * 8;
      const int key = own_keys ? own_key + n / 2 * 16 + n % 2 * 2 + e % 2 : 0;
      if (row >= p.seq_q || key >= p.seq_k) continue;
      if (!own_keys && (n > 0 || e % 2 > 0 || lane % 4 > 0)) continue;
      target[row * p.dbias_strides.row + key * p.dbias_strides.column] = sum[m][n][e];
    }
    return;
  }
  float* warp_sums = reinterpret_cast<float*>(shared_memory);  // [warp, key of the tile]
  __syncthreads();                                             // nobody reads Q any more
#pragma unroll
  for (int i = 0; i < C::kN * 2; ++i) {
    float x = 0.f;
#pragma unroll
    for (int j = 0; j < C::kM * 2; ++j) x += sum[j / 2][i / 2][j % 2 * 2 + i % 2];
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    x += __shfl_xor_sync(0xffffffffu, x, 16);
    if (lane < 4) warp_sums[warp * C::kBlockColumns + i / 4 * 16 + lane * 4 + i % 4] = x;
  }
  __syncthreads();
  for (int column = threadIdx.x; column < (own_keys ? C::kBlockColumns : 1);
       column += C::kThreads) {
    const int key = own.index[4] * C::kBlockColumns + column;
    if (key >= p.seq_k) break;
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) x += warp_sums[w * C::kBlockColumns + column];
    target[key * p.dbias_strides.column] = x;
  }
}

// dbias = the sum of the splits, in order.
__global__ void __launch_bounds__(256, 6)
    bias_sum_fp32_kernel(float* __restrict__ dbias, const float* __restrict__ sums, uint32_t splits,
                         int64_t elements) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < elements;
       i += int64_t{256} * gridDim.x) {
    float x = 0.f;
    for (uint32_t split = 0; split < splits; ++split) x += sums[split * elements + i];
    dbias[i] = x;
  }
}

}  // namespace flashsci::sm80::dbias_fp32
