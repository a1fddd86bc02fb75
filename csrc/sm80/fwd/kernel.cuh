// Forward attention for tensor cores of the mma.sync generation (Ampere and Ada; Hopper for calls
// that its own kernels do not take).
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij, lse_i = m_i + log
//           l_i, s = scale q k^T or softcap tanh(scale q k^T / softcap), over the keys the window
//           shows. kAlibi: s also has the addend of core/alibi.cuh, before the softcap if
//           `capped`. With dropout p_ij is 0, or divided by 1 - p, in the sum over v_j alone.
// Roles     One CTA per (query tile, head, batch), all on grid.x, the tiles of a head in sequence
//           and the longest first. kWarps warps own kBlockQ / kWarps query rows each and exchange
//           no values: they share only the K and V tiles. Packed calls find their sequence on the
//           device.
// Shared    Q (later the output), kStages x K, kStages x V, all swizzled 16-byte chunks:
//           `SharedStorage` (config.cuh).
// Pipeline  kStages 1: V_n is copied during S = Q K_n^T, K_n-1 during softmax and P V_n; two
//           barriers a tile, and the other CTA of the SM fills the gaps. kStages 2: K_n-1 and V_n-1
//           are copied during all of tile n; one barrier a tile. Tiles go from the diagonal to the
//           left.
// Limits    HMMA issue with shared-memory reads of K and V close behind (32 rows per warp: a
//           fragment feeds two mma), then exp: docs/develop/kernels/sm80_forward.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../../core/alibi.cuh"
#include "../../core/coord.cuh"
#include "../../core/dropout.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "rows.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::fwd {

// The state of a thread in the work on one query tile.
template <class Op, class C, bool kVector, bool kAlibi, class Drop>
struct QueryTile {
  using T = Tile<C::kHeadDim>;
  static constexpr int kStageBytes = C::kBlockK * T::kRowBytes;

  SharedStorage<C>& shared;
  const FlashsciForwardParams& p;
  const ForwardPlan& plan;
  const HeadCoord& place;
  const TileOfSequence& work;
  const Drop dropping;
  const typename Drop::Seed seed = dropping.read_seed();
  const int tile_row = work.tile * C::kBlockQ;
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
                      (work.first_q + tile_row) * p.q_strides.row;
  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const uint16_t* k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k) +
                      work.first_k * p.k_strides.row;
  const uint16_t* v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k) +
                      work.first_k * p.v_strides.row;
  const int warp = ptx::redux_max(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  const Window window{p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k};
  const KeyTiles<C> tiles{window, tile_row, work.seq_q};
  const WarpKeys<C> keys{window, warp_row, work.seq_q};
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t k_tile = ptx::shared_address(shared.k), v_tile = ptx::shared_address(shared.v);
  // The addresses for this lane's ldmatrix. The two registers of a B operand are neighbours: K
  // fetches 8 keys x 2 chunks for each n8 block, V (through the transpose) 16 keys x 1 chunk.
  const uint32_t q_start =
      q_tile + warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
  uint32_t k_start = k_tile + T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  uint32_t v_start = v_tile + T::offset(lane % 16, lane / 16);
  int stage = 0;

  // --- copies

  template <int kRows>
  __device__ __forceinline__ void load(uint32_t to, const uint16_t* from, int64_t row_stride,
                                       int rows_valid, int columns) const {
    load_tile<kRows, C::kHeadDim, C::kThreads, kVector, C::kFewRegisters>(
        to, from, row_stride, rows_valid, columns, p.copy_bytes);
  }
  __device__ __forceinline__ void load_q() const {
    load<C::kBlockQ>(q_tile, q, p.q_strides.row, work.seq_q - tile_row, p.head_dim);
  }
  __device__ __forceinline__ void load_k(int tile, int to_stage) const {
    const int first = tile * C::kBlockK;
    load<C::kBlockK>(k_tile + to_stage * kStageBytes, k + first * p.k_strides.row, p.k_strides.row,
                     work.seq_k - first, p.head_dim);
  }
  __device__ __forceinline__ void load_v(int tile, int to_stage) const {
    const int first = tile * C::kBlockK;
    load<C::kBlockK>(v_tile + to_stage * kStageBytes, v + first * p.v_strides.row, p.v_strides.row,
                     work.seq_k - first, p.head_dim_v);
  }
  __device__ __forceinline__ void load_first() const {
    load_q();
    load_k(tiles.end - 1, 0);
    if (C::kStages == 2) load_v(tiles.end - 1, 0);
    ptx::cp_async_commit();
  }
  // At the start of a tile, when K_n is complete.
  __device__ __forceinline__ void load_during_qk(int tile) const {
    if constexpr (C::kStages == 1) {
      load_v(tile, 0);
    } else if (tile > tiles.first) {
      load_k(tile - 1, stage ^ 1);
      load_v(tile - 1, stage ^ 1);
    }
    ptx::cp_async_commit();
  }
  // With one stage, between the products.
  __device__ __forceinline__ void load_during_pv(int tile) const {
    ptx::cp_async_wait<0>();
    __syncthreads();  // V_n is complete; no warp still reads K_n
    if (tile > tiles.first) load_k(tile - 1, 0);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void next_stage() {
    stage ^= 1;
    k_start += stage != 0 ? kStageBytes : -kStageBytes;
    v_start += stage != 0 ? kStageBytes : -kStageBytes;
  }

  // --- tiles

  // ALiBi's slope in the units of the scores.
  __device__ __forceinline__ float slope_in_scores() const {
    const float slope = p.cu_seqlens_q != nullptr
                            ? slope_of_segment(p.bias_mask, work.segment, p.num_seqs, place.head)
                            : slope_of(p.bias_mask, place, place.head);
    return plan.scores.mode == kScaled ? slope / p.scale : slope;
  }
  // The bits of the probabilities of a tile that stay, drawn before its scores need the registers.
  using Kept = uint32_t[(C::kM * C::kN + 7) / 8];
  __device__ __forceinline__ void draw(Kept& kept, int first_key) const {
    if constexpr (Drop::kDrops) {
      if (!keys.any_seen(first_key)) return;
      const uint32_t stream = p.cu_seqlens_q != nullptr
                                  ? (work.segment - 1) * p.heads_q + place.head
                                  : place.batch_head;
#pragma unroll
      for (int word = 0; word < (C::kM * C::kN + 7) / 8; ++word)
        kept[word] = dropping.template draw_rows<C::kM, C::kN>(
            seed, word, stream, warp_row + opaque(threadIdx.x) % 32 / 4, first_key);
    }
  }
  __device__ __forceinline__ void drop_probabilities(float (&s)[C::kM][C::kN][4],
                                                     const Kept& kept) const {
    if constexpr (Drop::kDrops) {
#pragma unroll
      for (int word = 0; word < (C::kM * C::kN + 7) / 8; ++word) drop(s, word, kept[word]);
    }
  }
  __device__ __forceinline__ void add_slope(float (&s)[C::kM][C::kN][4], int first_key,
                                            float slope) const {
    const int own = opaque(threadIdx.x) % 32, shift = work.seq_k - work.seq_q;
    add_alibi(s, slope,
              warp_row + own / 4 - own % 4 * 2 - first_key + (p.lower_right != 0 ? shift : 0));
  }
  // From raw scores to the output. slope: with ALiBi only.
  __device__ __forceinline__ void softmax_and_pv(OutputRows<C>& rows, float (&s)[C::kM][C::kN][4],
                                                 int first_key, float slope, const Kept& kept) {
    if constexpr (kAlibi) {
      if (p.bias_mask.capped) {
        scale(s, p.scale);
        add_slope(s, first_key, slope);
      }
    }
    if (plan.scores.mode != kScaled) scale_scores(s, plan.scores);
    if constexpr (kAlibi) {
      if (!p.bias_mask.capped) add_slope(s, first_key, slope);
    }
    if (keys.any_hidden(first_key))
      mask_scores(s, window, warp_row + lane / 4, first_key + lane % 4 * 2);
    online_softmax(s, rows.o, rows.row_max, rows.row_sum, plan.scores.exp_scale);
    drop_probabilities(s, kept);
    multiply_pv<Op, C>(rows.o, s, v_start);
  }
  __device__ __forceinline__ void write(const OutputRows<C>& rows) const {
    const int row = work.first_q + warp_row;
    // Recomputed rather than kept through the loop.
    const HeadCoord home(opaque(blockIdx.x), plan.tiles, p.heads_q, p.batch1);
    auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
                row * p.out_strides.row;
    float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
    write_output<Op, C>(rows, q_tile + warp * C::kRows * T::kRowBytes, out, lse, p.out_strides.row,
                        work.seq_q - warp_row, p.head_dim_v, plan);
  }

  __device__ __forceinline__ void run() {
    OutputRows<C> rows;
    rows.reset();
    const float slope = kAlibi ? slope_in_scores() : 0.f;
    if (tiles.first < tiles.end) load_first();
#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile) {
      Kept kept;
      draw(kept, tile * C::kBlockK);
      ptx::cp_async_wait<0>();
      __syncthreads();  // K_n is complete; no warp reads V_n+1 (nor, with two stages, K_n+1)
      load_during_qk(tile);
      const int first_key = tile * C::kBlockK;
      const bool active = keys.any_seen(first_key);
      float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
      if (active) {
        clear(s);
        multiply_qk<Op, C>(s, q_start, k_start);
      }
      if constexpr (C::kStages == 1) load_during_pv(tile);
      if (active) softmax_and_pv(rows, s, first_key, slope, kept);
      if constexpr (C::kStages == 2) next_stage();
    }
    if constexpr (Drop::kDrops) rows.scale(dropping.scale);
    if (warp_row < work.seq_q) write(rows);
  }
};

template <class Op, class C, bool kVector, bool kAlibi, class... Drop>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ ForwardPlan plan, Drop... dropout) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  const HeadCoord place(blockIdx.x, plan.tiles, p.heads_q, p.batch1);
  const uint32_t slot = blockIdx.x - place.batch_head * plan.tiles;
  TileOfSequence work;
  if (p.cu_seqlens_q != nullptr) {
    work =
        find_tile<C::kBlockQ>(slot, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
  } else {
    work = {static_cast<int>(p.window_right >= 0 ? plan.tiles - 1 - slot : slot), 0, p.seq_q, 0,
            p.seq_k};
  }
  if (work.tile < 0 || work.tile * C::kBlockQ >= work.seq_q) return;
  using Dropped = Dropping<Drop...>;
  QueryTile<Op, C, kVector, kAlibi, Dropped>{shared, p, plan, place, work, Dropped(dropout...)}
      .run();
}

}  // namespace flashsci::sm80::fwd
