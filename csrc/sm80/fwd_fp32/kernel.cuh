// Forward attention in fp32 on fp16 tensor cores (Ampere and newer).
//
// Maths     As sm80/fwd/kernel.cuh. Products of fp32 are three products of fp16 halves
//           (core/split_fp16.cuh), or one in TF32 precision; everything else is fp32.
// Roles     One CTA per (query tile, head, batch), all on grid.x. Each of kWarps warps owns 16 kM
//           query rows; all threads convert K and V to halves, a row or a part of one each.
// Shared    Halves of Q (raw at first; scaled row by row), of K and of V; raw K and V of the next
//           tile: `ForwardStorage`.
// Pipeline  Raw K_n-1 and V_n-1 are copied, and the bias of tile n - 1 is loaded into registers,
//           during the work on tile n; two barriers a tile: raw tile complete, halves complete.
// Limits    HMMA and other instructions take turns rather than overlap:
//           docs/develop/kernels/sm80_fp32.md.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../../core/coord.cuh"
#include "../../core/launch.cuh"
#include "../../core/mask.cuh"
#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../fp32_common/bias_mask.cuh"
#include "../fp32_common/rows.cuh"
#include "../fp32_common/stream.cuh"
#include "../fp32_common/visible_tiles.cuh"
#include "../fp32_common/warp_mma.cuh"

namespace flashsci::sm80::fwd_fp32 {

template <int kDim_, int kWarps_, int kM_, int kN_, int kMinBlocks_>
struct ForwardTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kM = kM_, kN = kN_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = kM * 16;  // query rows per warp
  static constexpr int kBlockQ = kRows * kWarps, kBlockK = kN * 8;
  static constexpr int kDimBlocks = kDim / 8;
};

template <class C>
struct alignas(128) ForwardStorage {
  SplitFp16Tile<C::kBlockQ, C::kDim> q;
  StreamStorage<C::kBlockK, C::kDim, C::kThreads> stream;
  float q_factor[C::kBlockQ];  // factor of the halves of a row of Q
};

// The values that the host derives once from the parameters.
struct ForwardFp32Plan {
  uint32_t tiles;  // grid slots per head
  int vector;      // rows of Q, K and V take 16-byte copies
  int plain;       // scores are the exponents, up to a positive factor
  float inner;     // factor of the scores: to log2 units if plain, else to natural units
                   // or those of the cap

  float cap;       // softcap or 0
  int vector_out;  // output rows take 8-byte stores
  BiasMaskAccess bias_mask;
  float inverse_cap;  // 1 / softcap; `capped` only, where `inner` is that of natural units
};

// P is exponentiated to at most 2^15: 2^kShift at the running maximum, which may be stale.
inline constexpr float kShift = 11.f, kStale = 4.f;
inline constexpr float kLowest = -3.4028234664e38f;  // finite: hidden keys stay at -inf below it

// s = cap tanh(factor s), with factor 1 afterwards. hides: scores of -inf, from a bias, stay.
template <int kM, int kN>
__device__ __forceinline__ void cap_scores(float (&s)[kM][kN][4], float (&factor)[kM][2], float cap,
                                           bool hides) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = s[m][n][e];
        s[m][n][e] = hides && x == -INFINITY ? x : cap * tanh_accurate(factor[m][e / 2] * x);
      }
  set_all(factor, 1.f);
}

// S, times the row's factor in the units of row_max, becomes P times 2^kShift. These units are
// natural ones with a bias (whose lowest numbers overflow in other units), and log2 units without.
// The factor is consumed.
template <bool kNatural, int kM, int kN, int kDimBlocks>
__device__ __forceinline__ void online_softmax_fp32(float (&s)[kM][kN][4],
                                                    float (&o)[kM][kDimBlocks][4],
                                                    float (&row_max)[kM][2],
                                                    float (&row_sum)[kM][2],
                                                    float (&factor)[kM][2]) {
  constexpr float kUnit = kNatural ? kLog2e : 1.f;  // to those of log2
  float tile_max[kM][2];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile_max[m][half] = quad_max(lane_max(s[m], half)) * factor[m][half];
      grew |= (tile_max[m][half] - row_max[m][half]) * kUnit > kStale;
    }
  }
  if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(row_max[m][half], tile_max[m][half]);
        rescale_row(row_max[m][half], row_sum[m][half], o[m], half, next, kUnit);
      }
    }
  }
  float offset[kM][2];
  bool large = false;
#pragma unroll
  for (int i = 0; i < kM * 2; ++i) {
    const float maximum = row_max[i / 2][i % 2] * kUnit;
    offset[i / 2][i % 2] = maximum == -INFINITY ? 0.f : maximum;
    large |= row_max[i / 2][i % 2] != -INFINITY && fabsf(maximum) > kExactExponent;
  }
  if (__any_sync(0xffffffffu, large)) {
    // Rounded like the maximum; otherwise the difference of large numbers would be meaningless.
#pragma unroll
    for (int i = 0; i < kM * kN * 4; ++i) {
      const int m = i / (4 * kN), half = i % 4 / 2;
      float& x = s[m][i / 4 % kN][i % 4];
      x = __fsub_rn(__fmul_rn(x, factor[m][half]), fmaxf(row_max[m][half], kLowest));
    }
    set_all(factor, 1.f);
    set_all(offset, 0.f);
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; ++e) {
          s[m][n][e] =
              ptx::ex2_approx(fmaf(s[m][n][e], factor[m][half] * kUnit, kShift - offset[m][half]));
          sum += s[m][n][e];
        }
      }
      row_sum[m][half] += sum;
    }
  }
}

// A warp's results for its query rows. They are separate from its other state: the compiler keeps
// scalars in the same object as looped-over arrays in memory until it has unrolled the loops.
template <class C>
struct ForwardRows {
  float q_factor[C::kM][2];  // from halves of Q, and units of the scores, to the plan's
  float sum[C::kM][2];       // of P, this lane's part
  float max[C::kM][2];       // [m16, row g or g + 8], natural or log2 units; stale by <= kStale
  float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]

  __device__ __forceinline__ ForwardRows() {
    set_all(max, -INFINITY);
    set_all(sum, 0.f);
    clear(o);
  }
};

// A warp of the CTA: its query rows from S to the stores, and its part of the copies and of the
// conversions. `run` is the loop over tiles of keys, from right to left.
template <class C, bool kHasBiasMask>
struct ForwardWarp {
  using QTile = SplitFp16Tile<C::kBlockQ, C::kDim>;
  using KTile = SplitFp16Tile<C::kBlockK, C::kDim>;
  static constexpr int kTogether = C::kM * C::kDim >= 128 ? 2 : 4;  // limited by registers
  static constexpr bool kZerosApart = !kHasBiasMask && C::kDim == 64;
  using KeyStream = Stream<C::kBlockK, C::kDim, C::kThreads, kZerosApart>;
  using PairTile = BiasMaskTile<kHasBiasMask ? C::kM : 1, kHasBiasMask ? C::kN : 2>;

  const FlashsciForwardParams& p;
  const ForwardFp32Plan& plan;
  ForwardStorage<C>& shared;
  const HeadCoord& place;
  const TileOfSequence& work;
  const int tile_row;
  const uint32_t head_k;
  const float *k, *v;  // of the first key
  const int warp, lane, warp_row;
  const Window window;
  const VisibleTiles<C::kBlockK> visible;
  const uint32_t q_start;
  KeyStream& stream;
  const uint32_t k_mixed, k_high, v_mixed, v_high;  // in the halves of the stream
  const bool three;
  const BiasMaskOfHead<> bias_mask;
  PairTile& pair_tile;
  ForwardRows<C>& rows;
  int next_key;  // of the next tile, or of this one if it comes again

  __device__ __forceinline__ ForwardWarp(ForwardStorage<C>& shared_,
                                         const FlashsciForwardParams& p_,
                                         const ForwardFp32Plan& plan_, const HeadCoord& place_,
                                         const TileOfSequence& work_, int64_t first_bias,
                                         KeyStream& stream_, PairTile& pair_tile_,
                                         ForwardRows<C>& rows_)
      : p(p_),
        plan(plan_),
        shared(shared_),
        place(place_),
        work(work_),
        tile_row(work.tile * C::kBlockQ),
        head_k(place.head / static_cast<uint32_t>(p.heads_q / p.heads_k)),
        k(rows_of(p.k, p.k_strides, place, head_k, work.first_k)),
        v(rows_of(p.v, p.v_strides, place, head_k, work.first_k)),
        warp(ptx::redux_max(threadIdx.x / 32)),
        lane(threadIdx.x % 32),
        warp_row(tile_row + warp * C::kRows),
        window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k),
        visible(window, work.seq_q, tile_row, C::kBlockQ, warp_row, C::kRows),
        q_start(start_of_a<QTile>(ptx::shared_address(&shared.q), warp * C::kRows)),
        stream(stream_),
        k_mixed(start_of_rows<KTile>(stream.tile(0), true)),
        k_high(start_of_rows<KTile>(stream.tile(0), false)),
        v_mixed(start_of_dims<KTile>(stream.tile(1), true)),
        v_high(start_of_dims<KTile>(stream.tile(1), false)),
        three(p.precision == FLASHSCI_TF32X3),
        bias_mask(p.bias_mask, plan.bias_mask, place, place.head, work.seq_q, work.seq_k,
                  p.lower_right != 0, first_bias),
        pair_tile(pair_tile_),
        rows(rows_) {}

  // --- loads

  __device__ __forceinline__ void load(int tile) const {
    const int first = tile * C::kBlockK;
    stream.load(0, k + first * p.k_strides.row, p.k_strides.row, work.seq_k - first, p.head_dim,
                plan.vector != 0);
    stream.load(1, v + first * p.v_strides.row, p.v_strides.row, work.seq_k - first, p.head_dim_v,
                plan.vector != 0);
  }
  __device__ __forceinline__ void load_next_bias_mask() {
    if constexpr (kHasBiasMask) {
      if (next_key >= visible.first_tile * C::kBlockK)
        pair_tile.load(bias_mask, warp_row + lane / 4, next_key + lane % 4 * 4);
    }
  }
  // Loads Q, as halves, and the first tile.
  __device__ __forceinline__ void load_first() {
    if constexpr (kHasBiasMask)
      pair_tile.load(bias_mask, warp_row + lane / 4,
                     (visible.end_tile - 1) * C::kBlockK + lane % 4 * 4);
    const uint32_t q_tile = ptx::shared_address(&shared.q);
    load_raw<C::kBlockQ, C::kDim, C::kThreads, false>(
        q_tile, rows_of(p.q, p.q_strides, place, place.head, work.first_q + tile_row),
        p.q_strides.row, work.seq_q - tile_row, p.head_dim, plan.vector != 0);
    ptx::cp_async_commit();
    load(visible.end_tile - 1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    convert_in_place<C::kBlockQ, C::kDim, C::kThreads>(q_tile, shared.q_factor);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows.q_factor[m][half] =
            shared.q_factor[warp * C::kRows + m * 16 + half * 8 + lane / 4] * plan.inner;
  }

  // --- a tile of keys

  // Softcap, bias and mask; factor becomes the factor from s to the units of rows.max.
  __device__ __forceinline__ void modify_scores(float (&s)[C::kM][C::kN][4],
                                                float (&factor)[C::kM][2]) const {
    if (plan.plain) {
      keep_finite(factor);
    } else {
      if constexpr (kHasBiasMask) {
        const bool capped = p.bias_mask.capped != 0;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {  // a loop: the code of each is there once
          if (capped == (turn != 0)) {
            if (plan.cap != 0.f) cap_scores(s, factor, plan.cap, capped);
          } else {
            pair_tile.add(s, bias_mask, factor);
            if (capped) set_all(factor, plan.inverse_cap);
          }
        }
        pair_tile.hide(s, bias_mask);
      } else {
        if (plan.cap != 0.f) cap_scores(s, factor, plan.cap, false);
        scale_rows(s, factor);
      }
      set_all(factor, kHasBiasMask ? 1.f : kLog2e);
    }
  }
  __device__ __forceinline__ void step(int tile) {
    const int first_key = tile * C::kBlockK;
    float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
    multiply_rows<QTile, KTile, C::kDim>(s, opaque(q_start), opaque(k_mixed), opaque(k_high),
                                         three);
    float factor[C::kM][2];
#pragma unroll
    for (int m = 0; m < C::kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[m][half] = rows.q_factor[m][half] * stream.factor(0);
    modify_scores(s, factor);
    if (stream.hide) hide_columns(s, stream.shared.state, lane % 4 * 4);
    if (first_key < visible.full_begin || first_key + C::kBlockK > visible.full_end)
      mask_interleaved(s, window, warp_row + lane / 4, first_key + lane % 4 * 4);
    load_next_bias_mask();
    online_softmax_fp32<kHasBiasMask>(s, rows.o, rows.max, rows.sum, factor);
    if constexpr (!kZerosApart) drop_zero_rows(s, stream.shared.state, lane % 4 * 4, 1);
    Operand<C::kM, C::kN> probabilities;
    probabilities.take(s, three);
    set_all(factor, stream.factor(1));
    multiply_dims<KTile, C::kDim, kTogether>(rows.o, probabilities, opaque(v_mixed), opaque(v_high),
                                             factor, three);
  }

  __device__ __forceinline__ void write() const {
    // Recomputed rather than kept through the loop.
    const HeadCoord home(opaque(blockIdx.x), plan.tiles, p.heads_q, p.batch1);
    int row = warp_row;
    if (p.cu_seqlens_q != nullptr)
      row += find_tile<C::kBlockQ>(opaque(blockIdx.x) - home.batch_head * plan.tiles,
                                   p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k)
                 .first_q;
    float* lse = p.lse + static_cast<int64_t>(home.batch_head) * p.seq_q + row;
    float inverse[C::kM][2];
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(rows.sum[m][half]);
        inverse[m][half] = sum == 0.f ? 0.f : 1.f / sum;
        const int of_warp = m * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && of_warp < work.seq_q - warp_row)
          lse[of_warp] = sum == 0.f ? -INFINITY
                                    : fmaf(rows.max[m][half], kHasBiasMask ? 1.f : kLn2,
                                           logf(sum * exp2f(-kShift)));
      }
    }
    store_rows_fp32(rows.o, inverse, rows_of(p.out, p.out_strides, home, home.head, row),
                    p.out_strides.row, work.seq_q - warp_row, p.head_dim_v, plan.vector_out != 0);
  }

  __device__ __forceinline__ void run() {
    if (visible.first_tile < visible.end_tile) load_first();
#pragma unroll 1
    for (int tile = visible.end_tile - 1; tile >= visible.first_tile;
         tile -= stream.again ? 0 : 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // the raw tile is complete; no warp still reads the halves of tile n + 1
      stream.convert();
      if (!stream.again && tile > visible.first_tile) load(tile - 1);
      ptx::cp_async_commit();
      const int first_key = tile * C::kBlockK;
      next_key = stream.again ? first_key : first_key - C::kBlockK;
      if (first_key < visible.seen_end && first_key + C::kBlockK > visible.seen_begin)
        step(tile);
      else
        load_next_bias_mask();
    }
    if (warp_row < work.seq_q) write();
  }
};

template <class C, bool kHasBiasMask>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_fp32_kernel(const __grid_constant__ FlashsciForwardParams p,
                        const __grid_constant__ ForwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ForwardStorage<C>*>(shared_memory);
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
  const int tile_row = work.tile * C::kBlockQ;
  if (work.tile < 0 || tile_row >= work.seq_q) return;
  int64_t first_bias = 0;
  if constexpr (kHasBiasMask) {
    if (p.cu_seqlens_q != nullptr)
      first_bias =
          BiasMaskOfHead<>::first_of(p, work.segment - 1, work.first_k, work.seq_q, work.seq_k);
    if (first_bias < 0) work.seq_k = 0;
  }
  using Warp = ForwardWarp<C, kHasBiasMask>;
  typename Warp::KeyStream stream(shared.stream);
  typename Warp::PairTile pair_tile;
  ForwardRows<C> rows;
  Warp(shared, p, plan, place, work, first_bias, stream, pair_tile, rows).run();
}

}  // namespace flashsci::sm80::fwd_fp32
