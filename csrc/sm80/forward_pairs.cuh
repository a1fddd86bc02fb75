// The forward of forward.cuh with a bias or a mask.
//
// Maths     as there, with s_ij + bias_ij before the softmax and -inf where the mask hides.
// Roles     A unit of work is a query tile of kMembers neighbours along the dimension that shares
//           the bias. Up to D = 64 CTAs are persistent: each takes a run of units, the tiles side
//           by side, then the other members, so that a bias is read while it is in L2. Every warp
//           works on its rows of all members in turn and starts their scores from the one bias tile
//           that it has converted: S = Q K^T + bias / scale costs nothing beyond the product.
// Shared    Two stages of 32 keys: K and V of every member (interleaved, see tile.cuh), the bias
//           tile, one byte a key of each member's key mask; Q of every member, of two units where
//           CTAs are persistent: `PairsStorage`.
// Pipeline  The copies of the next stage fly while one is worked on, from one unit into the next;
//           one barrier a stage. Q stays in registers where it fits.
// Limits    Issue slots and exponentials at D = 32, HMMA from D = 64 on; a bias that is not shared:
//           HBM.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../common/poison.cuh"
#include "../common/processors.cuh"
#include "forward.cuh"
#include "pair_fetch.cuh"
#include "pair_tile.cuh"

namespace flashsci::sm80 {

template <int kM, int kN>
__device__ __forceinline__ void copy(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] = y[i / (kN * 4)][i / 4 % kN][i % 4];
}

template <int kM, int kN>
__device__ __forceinline__ void add(float (&x)[kM][kN][4], const float (&y)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i)
    x[i / (kN * 4)][i / 4 % kN][i % 4] += y[i / (kN * 4)][i / 4 % kN][i % 4];
}

// S += Q K^T with Q in registers.
template <class Op, class C>
__device__ __forceinline__ void multiply_kept_qk(float (&s)[C::kM][C::kN][4],
                                                 const uint32_t (&q)[C::kHeadDim / 16][C::kM][4],
                                                 uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], q[d][m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], q[d][m], b[2], b[3]);
      }
    }
  }
}

// Normalises, writes lse and output from registers: the lanes of a quad exchange the words of four
// n8 blocks, so that each has 16 bytes in a row.
template <class Op, class C>
__device__ __forceinline__ void store_rows(const float (&o)[C::kM][C::kDimBlocks][4],
                                           const float (&row_max)[C::kM][2],
                                           const float (&row_sum)[C::kM][2],
                                           uint16_t* __restrict__ out,  // [rows, Dv] of this warp
                                           float* __restrict__ lse,     // [rows] of this warp
                                           int64_t row_stride, int rows, int head_dim_v,
                                           const ForwardPlan& plan) {
  const int group = threadIdx.x / 4 % 8, quad = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < C::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(row_sum[m][half]);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      const int row = m * 16 + half * 8 + group;
      if (quad == 0 && row < rows)
        lse[row] = sum == 0.f ? -INFINITY : fmaf(row_max[m][half], plan.lse_scale, logf(sum));
#pragma unroll
      for (int block = 0; block < C::kDimBlocks / 4; ++block) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word[i] = Op::pack2(o[m][block * 4 + i][half * 2] * inverse,
                              o[m][block * 4 + i][half * 2 + 1] * inverse);
        transpose_quad(word);
        const int columns = head_dim_v - (block * 4 + quad) * kChunkElements;
        uint16_t* target = out + row * row_stride + (block * 4 + quad) * kChunkElements;
        if (row >= rows || columns <= 0) continue;
        if (plan.vector_out) {
          *reinterpret_cast<uint4*>(target) = make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
          for (int e = 0; e < kChunkElements; ++e)
            if (e < columns) target[e] = static_cast<uint16_t>(word[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
}

template <class Op, class C, bool kVector>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_pairs_kernel(const __grid_constant__ FlashsciForwardParams p,
                         const __grid_constant__ ForwardPlan plan,
                         const __grid_constant__ PairsPlan pairs) {
  using T = Tile<C::kHeadDim>;
  using Stage = PairsStage<C>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<PairsStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  constexpr int kMembers = C::kMembers;
  constexpr bool kAnything = C::kBias == 0;

  const int seq_q = p.seq_q, seq_k = p.seq_k;
  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const Window window(kAnything ? p.window_left : -1, kAnything ? p.window_right : -1,
                      p.lower_right != 0, seq_q, seq_k);

  uint32_t unit = blockIdx.x * pairs.units + min(blockIdx.x, pairs.units_rest);
  const uint32_t end_unit = unit + pairs.units + (blockIdx.x < pairs.units_rest);
  PairsFetch<C, kVector> fetch(shared, unit, end_unit);
  fetch.seek(shared, p, plan, pairs, window);
  fetch.issue(shared, p, plan, pairs, window);
  ptx::cp_async_commit();

  uint32_t stage = ptx::shared_address(shared.stage);
#pragma unroll 1
  for (; unit < end_unit; ++unit) {
    const PairsPlace place(unit, kMembers, p, plan, pairs);
    const int tile_row = place.tile * C::kBlockQ, warp_row = tile_row + warp * C::kRows;
    const KeyTiles<C> tiles(window, tile_row, seq_q);
    // Of the keys, some rows of this warp see [seen_begin, seen_end), all [full_begin, full_end).
    const int warp_last_row = min(warp_row + C::kRows, seq_q) - 1;
    const int seen_begin = window.begin(warp_row);
    const int seen_end = warp_row < seq_q ? window.end(warp_last_row) : 0;
    const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);
    const uint8_t* mask = p.pairs.mask;  // of pairs
    if (kAnything && mask != nullptr) mask += place.offset(p.pairs.mask_strides, place.head);

    struct Rows {
      float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]
      float row_max[C::kM][2];  // [m16, row g or g + 8], in units of 1 / exp_scale; stale by <= 2^8
      float row_sum[C::kM][2];  // this lane's part of the sum
    } rows[kMembers];
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      clear(rows[r].o);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        rows[r].row_max[m][0] = rows[r].row_max[m][1] = -INFINITY;
        rows[r].row_sum[m][0] = rows[r].row_sum[m][1] = 0.f;
      }
    }
    const uint32_t q_start = ptx::shared_address(shared.q[unit % C::kUnitsQ]) +
                             warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
    constexpr int kQBytes = C::kBlockQ * T::kRowBytes;
    constexpr int kKeptQ = C::kKeepQ ? C::kHeadDim / 16 : 1;
    uint32_t q_kept[kMembers][kKeptQ][C::kM][4];  // Q [kRows, D] of each member

#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage has landed; nobody reads the one before any more
      if (C::kKeepQ && tile == tiles.end - 1) {
#pragma unroll
        for (int i = 0; i < kMembers * kKeptQ * C::kM; ++i) {
          const int r = i / (kKeptQ * C::kM), d = i / C::kM % kKeptQ, m = i % C::kM;
          ptx::ldmatrix_x4(q_kept[r][d][m],
                           T::pair_address(q_start, d) + r * kQBytes + m * 16 * T::kRowBytes);
        }
        // The next copies may be of the Q after the next: into the place of this one.
        if (tile == tiles.first) __syncthreads();
      }
      fetch.issue(shared, p, plan, pairs, window);
      ptx::cp_async_commit();

      const int first_key = tile * C::kBlockK;
      const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
      const int row = warp_row + opaque(lane) / 4, key = first_key + opaque(lane) % 4 * 8;
      uint32_t words[kMembers][C::kN / 2];  // of the key masks
      bool any_shown[kMembers], any_hidden[kMembers];
#pragma unroll
      for (int r = 0; r < kMembers; ++r) {
        any_shown[r] = active && r < place.count;
        any_hidden[r] = false;
        if (pairs.key_mask) {
          bool shown;
          read_key_mask<C>(words[r], stage + offsetof(Stage, shown) + r * C::kBlockK, shown,
                           any_hidden[r]);
          any_shown[r] &= shown;
        }
      }
      float c[C::kM][C::kN][4];  // what the scores start from
      const uint32_t bias_tile = stage + offsetof(Stage, bias);
      if (kAnything && p.pairs.bias == nullptr)
        clear(c);
      else if (C::kBias == 4 || (kAnything && p.pairs.bias_is_fp32))
        read_bias<Op, C, true>(c, bias_tile + bias_start<C, true>(warp), pairs.bias_factor);
      else
        read_bias<Op, C, false>(c, bias_tile + bias_start<C, false>(warp), pairs.bias_factor);
      if (kAnything && active && mask != nullptr && !pairs.key_mask)
        hide_pairs<C>(c, mask, p.pairs.mask_strides, pairs.aligned_mask != 0, row, key, seq_q,
                      seq_k);
      const uint32_t k_start = stage + T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      const uint32_t v_start = stage + offsetof(Stage, v) + T::offset(lane % 16, lane / 16);
      constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
#pragma unroll
      for (int r = 0; r < kMembers; ++r) {
        if (!any_shown[r]) continue;
        float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
        const auto multiply = [&] {
          if constexpr (C::kKeepQ)
            multiply_kept_qk<Op, C>(s, q_kept[r], k_start + r * kTileBytes);
          else
            multiply_qk<Op, C>(s, q_start + r * kQBytes, k_start + r * kTileBytes);
        };
        if (!kAnything || plan.score_mode == kScaled) {
          copy(s, c);
          multiply();
        } else {
          clear(s);
          multiply();
          scale_scores<C>(s, plan);
          add(s, c);
        }
        if (any_hidden[r]) hide_keys<C>(s, words[r]);
        if (first_key < full_begin || first_key + C::kBlockK > full_end)
          mask_scores<true>(s, window, row, key);
        online_softmax_lazily(s, rows[r].o, rows[r].row_max, rows[r].row_sum, plan.exp_scale);
        multiply_pv<Op, C>(rows[r].o, s, v_start + r * kTileBytes);
      }
      stage = next_stage<C>(stage, shared);
    }

    if (warp_row >= seq_q) continue;
    const PairsPlace home(opaque(unit), kMembers, p, plan, pairs);  // not kept through the loop
    auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
                warp_row * p.out_strides.row;
    float* lse =
        p.lse + ((home.batch0 * p.batch1 + home.batch1) * p.heads_q + home.head) * seq_q + warp_row;
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      if (r >= home.count) break;
      store_rows<Op, C>(rows[r].o, rows[r].row_max, rows[r].row_sum, out + r * pairs.out_step,
                        lse + r * pairs.lse_step, p.out_strides.row, seq_q - warp_row, p.head_dim_v,
                        plan);
    }
  }
}

// Whether scores may stay in units of 1 / scale, and the bias be divided by it, without overflow.
inline bool scale_fits(float scale) { return scale > 1e-4f && scale * kLog2e <= 1.f; }

template <class Op, class C, bool kVector>
cudaError_t launch_pairs_tiling(const FlashsciForwardParams& p, PairsPlan pairs,
                                cudaStream_t stream) {
  using Storage = PairsStorage<C>;
  constexpr int kOfMembers = C::kMembers * C::kBlockK * (4 * C::kHeadDim + 1);
  constexpr int kOfBias = C::kBlockQ * C::kBlockK * (C::kBias == 2 ? 2 : 4);
  static_assert(sizeof(PairsStage<C>) == (kOfMembers + kOfBias + 127) / 128 * 128 &&
                    sizeof(Storage) == C::kUnitsQ * C::kMembers * C::kBlockQ * C::kHeadDim * 2 +
                                           C::kSlots * sizeof(PairsStage<C>),
                "the plan has no padding");
  static_assert(sizeof(Storage) <= 99 * 1024, "sm_86 and sm_89 have no more");
  const int64_t tiles = (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  pairs.groups = (pairs.members + C::kMembers - 1) / C::kMembers;
  const int64_t units =
      tiles * p.heads_q * p.batch0 * p.batch1 / std::max(pairs.members, 1u) * pairs.groups;
  if (units == 0) return cudaSuccess;
  if (units > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  // Units of different length are left to the hardware's scheduler.
  int64_t blocks = units;
  if (C::kPersistent && p.window_left < 0 && p.window_right < 0)
    blocks = std::min<int64_t>(units, int64_t{C::kMinBlocks} * processors_of(p.device));
  pairs.units = static_cast<uint32_t>(units / blocks);
  pairs.units_rest = static_cast<uint32_t>(units % blocks);

  ForwardPlan plan = plan_of(p, tiles);
  // Else the units of the scores are those of the exponential.
  if (plan.score_mode == kScaled && !scale_fits(p.scale)) plan.score_mode = kLinear;
  if (plan.score_mode == kScaled) {
    pairs.bias_factor = 1.f / p.scale;
  } else {
    plan.score_inner *= plan.score_mode == kLinear ? kLog2e : 1.f;
    plan.score_outer *= kLog2e;
    plan.exp_scale = 1.f;
    pairs.bias_factor = kLog2e;
  }
  plan.lse_scale = plan.score_mode == kScaled ? p.scale : kLn2;
  return launch_kernel<forward_pairs_kernel<Op, C, kVector>, sizeof(Storage), C::kThreads>(
      p.device, blocks, stream, p, plan, pairs);
}

template <class Op, int kHeadDim>
cudaError_t launch_pairs_padded(const FlashsciForwardParams& p, const PairsPlan& pairs,
                                cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  // 99 KiB are all that sm_86 and sm_89 have.
  using Wide = Tiling<kHeadDim,
                      (kHeadDim <= 128   ? 128
                       : kHeadDim <= 192 ? 64
                                         : 32),
                      32, (kHeadDim <= 192 ? 4 : 2), 2, 2>;
  if (!vector) {
    // Copies without alignment need registers.
    using Unaligned = std::conditional_t<kHeadDim == 128, Tiling<128, 64, 32, 4, 2, 2>, Wide>;
    return launch_pairs_tiling<Op, PairsTiling<Unaligned, 1, 0>, false>(p, pairs, stream);
  }
  if constexpr (kHeadDim <= 64) {
    const bool plain = pairs.bias_copy == 16 && (p.pairs.mask == nullptr || pairs.key_mask) &&
                       p.window_left < 0 && p.window_right < 0 && p.softcap == 0.f &&
                       scale_fits(p.scale);
    // Two outputs of D = 64 leave no room for Q.
    constexpr int kMost = kHeadDim <= 32 ? 2 : 1;
    if (plain && pairs.shares)
      return p.pairs.bias_is_fp32
                 ? launch_pairs_tiling<Op, PairsTiling<Wide, kMost, 4>, true>(p, pairs, stream)
                 : launch_pairs_tiling<Op, PairsTiling<Wide, kMost, 2>, true>(p, pairs, stream);
    if (plain)
      return p.pairs.bias_is_fp32
                 ? launch_pairs_tiling<Op, PairsTiling<Wide, 1, 4>, true>(p, pairs, stream)
                 : launch_pairs_tiling<Op, PairsTiling<Wide, 1, 2>, true>(p, pairs, stream);
  }
  return launch_pairs_tiling<Op, PairsTiling<Wide, 1, 0>, true>(p, pairs, stream);
}

// All but what depends on the tile shape.
inline PairsPlan pairs_plan_of(const FlashsciForwardParams& p) {
  const FlashsciPairStrides &bias = p.pairs.bias_strides, &mask = p.pairs.mask_strides;
  PairsPlan pairs{};
  if (p.pairs.bias != nullptr && bias.column == 1) {
    const int size = p.pairs.bias_is_fp32 ? 4 : 2;
    const uint64_t bits =
        reinterpret_cast<uintptr_t>(p.pairs.bias) |
        static_cast<uint64_t>(bias.batch0 | bias.batch1 | bias.head | bias.row) * size | 16;
    pairs.bias_copy = static_cast<int32_t>(bits & -bits);
    if (p.seq_k * int64_t{size} % 16 != 0) pairs.bias_copy = std::min(pairs.bias_copy, 8);
  }
  pairs.aligned_mask = mask.column == 1 && p.seq_k % 4 == 0 &&
                       (mask.batch0 | mask.batch1 | mask.head | mask.row) % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.pairs.mask) % 4 == 0;
  pairs.key_mask = p.pairs.mask != nullptr && mask.row == 0;

  // The members of a unit differ in the dimension of most members along which the bias, and a mask
  // of pairs, is the same.
  const bool bias_plane = p.pairs.bias != nullptr;
  const bool mask_plane = p.pairs.mask != nullptr && mask.row != 0;
  const bool one_to_one = p.heads_k == p.heads_q || p.heads_k == 1;
  const int64_t sizes[3] = {p.batch0, p.batch1, p.heads_q};
  const bool shared[3] = {!(bias_plane && bias.batch0) && !(mask_plane && mask.batch0),
                          !(bias_plane && bias.batch1) && !(mask_plane && mask.batch1),
                          !(bias_plane && bias.head) && !(mask_plane && mask.head) && one_to_one};
  int dim = 2;
  for (int i = 0; i < 3; ++i) {
    if (!shared[i] || sizes[i] < 2 || !(bias_plane || mask_plane)) continue;
    if (!pairs.shares || sizes[i] > sizes[dim]) dim = i;
    pairs.shares = 1;
  }
  pairs.shared_dim = dim;
  pairs.members = static_cast<uint32_t>(sizes[dim]);
  const auto step = [&](const auto& strides) {
    return dim == 0 ? strides.batch0 : dim == 1 ? strides.batch1 : strides.head;
  };
  pairs.q_step = step(p.q_strides), pairs.out_step = step(p.out_strides);
  pairs.k_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.k_strides);
  pairs.v_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.v_strides);
  pairs.mask_step = p.pairs.mask != nullptr ? step(mask) : 0;
  pairs.lse_step = int64_t{p.seq_q} * (dim == 2 ? 1 : p.heads_q * (dim == 1 ? 1 : p.batch1));
  return pairs;
}

// Dense problems with a bias or a mask, any strides.
template <class Op>
cudaError_t launch_forward_pairs(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q != nullptr) return cudaErrorNotSupported;
  const PairsPlan pairs = pairs_plan_of(p);
  const int width = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (width <= 32) return launch_pairs_padded<Op, 32>(p, pairs, stream);
  if (width <= 64) return launch_pairs_padded<Op, 64>(p, pairs, stream);
  if (width <= 96) return launch_pairs_padded<Op, 96>(p, pairs, stream);
  if (width <= 128) return launch_pairs_padded<Op, 128>(p, pairs, stream);
  if (width <= 192) return launch_pairs_padded<Op, 192>(p, pairs, stream);
  if (width <= 256) return launch_pairs_padded<Op, 256>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flashsci::sm80
