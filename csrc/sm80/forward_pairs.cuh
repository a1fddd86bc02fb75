// The forward of forward.cuh with a bias or a mask.
//
// Maths     as there, with s_ij + bias_ij before the softmax and -inf where the mask hides.
// Roles     A unit of work is a query tile of kMembers neighbours along the dimension that shares
//           the bias. Up to D = 64 CTAs are persistent: each takes a run of units, the tiles side
//           by side, then the other members, so that a bias is read while it is in L2. Every warp
//           works on its rows of all members in turn and starts their scores from the one bias tile
//           that it has converted: S = Q K^T + bias / scale costs nothing beyond the product.
// Shared    kSlots stages of 32 keys: K and V of every member (interleaved, see tile.cuh), the bias
//           tile, one byte a key of each member's key mask; Q of every member, of two units where
//           CTAs are persistent: `PairsStorage`.
// Pipeline  The copies of stage n + kSlots - 1 fly while stage n is worked on, from one unit into
//           the next; one barrier a stage. Q stays in registers where it fits.
// Limits    Issue slots and exponentials at D = 32, HMMA from D = 64 on; a bias that is not shared:
//           HBM.
#pragma once
#include <algorithm>
#include <cstddef>

#include "forward.cuh"
#include "pair_tile.cuh"

namespace flashsci::sm80 {

// 32 keys at a time: scores and bias take 64 registers, the outputs of all members dims x members,
// Q (where it is kept) half of that. kBias_: bytes of a bias element where nothing else is special
// (16-byte copies, no window, no softcap, scale > 0, no mask of pairs); 0: anything.
template <class Tiling_, int kMembers_, int kSlots_, int kBias_>
struct PairsTiling : Tiling_ {
  static constexpr int kMembers = kMembers_, kSlots = kSlots_, kBias = kBias_;
  static constexpr bool kKeepQ = Tiling_::kHeadDim * kMembers * Tiling_::kM <= 128;
  static constexpr bool kPersistent = kKeepQ;  // else nowhere to put the next unit's Q
  static constexpr int kUnitsQ = kPersistent ? 2 : 1;
  static constexpr int kKeyBlocks = Tiling_::kBlockK / kBlockKeys;
  static_assert(Tiling_::kBlockK % kBlockKeys == 0 && kMembers * kKeyBlocks <= Tiling_::kWarps,
                "whole blocks, and a warp for the key mask of each");
};

template <class C>
struct alignas(128) PairsStage {
  uint16_t k[C::kMembers][C::kBlockK * C::kHeadDim];                 // [member, kBlockK, D]
  uint16_t v[C::kMembers][C::kBlockK * C::kHeadDim];                 // [member, kBlockK, D]
  uint16_t bias[C::kBlockK * C::kBlockQ * (C::kBias == 2 ? 1 : 2)];  // [kBlockK / 32, kBlockQ, 32]
  uint32_t shown[C::kMembers][C::kKeyBlocks];                        // a bit for each key
};

template <class C>
struct PairsStorage {
  uint16_t q[C::kUnitsQ][C::kMembers][C::kBlockQ * C::kHeadDim];  // [unit, member, kBlockQ, D]
  PairsStage<C> stage[C::kSlots];
};

// What the host derives from the parameters, beyond ForwardPlan.
struct PairsPlan {
  int64_t q_step, k_step, v_step, out_step, lse_step, mask_step;  // elements to the next member
  uint32_t members, groups;    // along the shared dimension; ceil(members / kMembers)
  int32_t shared_dim;          // 0 batch0, 1 batch1, 2 head
  int32_t shares;              // members have a bias or a mask of pairs in common
  int32_t bias_copy;           // 16, 8, 4, 2: what bias rows are aligned to; 0: columns are strided
  int32_t aligned_mask;        // every four keys of every mask row are an aligned word
  int32_t key_mask;            // the mask is the same for all queries
  float bias_factor;           // from natural units to those of the scores
  uint32_t units, units_rest;  // units of every CTA; of so many CTAs one more
};

// Where the first member of a unit is.
struct PairsPlace {
  uint32_t batch0, batch1, head, count, tile;

  __device__ __forceinline__ PairsPlace(uint32_t unit, int of_unit, const FlashsciForwardParams& p,
                                        const ForwardPlan& plan, const PairsPlan& pairs) {
    const uint32_t rest = unit / plan.tiles;
    tile = unit - rest * plan.tiles;
    if (p.window_right >= 0) tile = plan.tiles - 1 - tile;  // the longest first
    const uint32_t outer = rest / pairs.groups;
    const uint32_t member = (rest - outer * pairs.groups) * of_unit;
    count = pairs.members - member;  // at least 1; more than of_unit: all there
    const auto heads = static_cast<uint32_t>(p.heads_q), second = static_cast<uint32_t>(p.batch1);
    const uint32_t inner = pairs.shared_dim == 2 ? second : heads;
    const uint32_t a = outer / inner, b = outer - a * inner;
    batch0 = pairs.shared_dim == 0 ? member : a;
    batch1 = pairs.shared_dim == 0 ? a : pairs.shared_dim == 1 ? member : b;
    head = pairs.shared_dim == 2 ? member : b;
  }
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

// Tiles [first, end) of keys that some row of a query tile sees.
template <class C>
struct KeyTiles {
  int first, end;

  __device__ __forceinline__ KeyTiles(const Window& window, int tile_row, int seq_q) {
    if constexpr (C::kBias != 0) {
      first = 0, end = (window.seq_k + C::kBlockK - 1) / C::kBlockK;
      return;
    }
    const int begin_key = window.begin(tile_row);
    const int end_key = window.end(min(tile_row + C::kBlockQ, seq_q) - 1);
    first = begin_key / C::kBlockK;
    end = begin_key < end_key ? (end_key + C::kBlockK - 1) / C::kBlockK : first;
  }
};

template <class C>
__device__ __forceinline__ uint32_t next_stage(uint32_t stage, PairsStorage<C>& shared) {
  const uint32_t first = ptx::shared_address(shared.stage);
  stage += sizeof(PairsStage<C>);
  return stage == first + C::kSlots * static_cast<uint32_t>(sizeof(PairsStage<C>)) ? first : stage;
}

// The pointers of a thread into the stage whose copies start next, where nothing is special.
template <class C, bool kPlain = C::kBias != 0>
struct PairsCopies {
  using Keys = TileCopy<C::kBlockK, C::kHeadDim, C::kThreads, true>;
  Keys k, v;
  TileCopy<C::kBlockQ, kBlockKeys * C::kBias / 2, C::kThreads, false> bias;
};
template <class C>
struct PairsCopies<C, false> {};

// The stage whose copies start next.
template <class C, bool kVector>
struct PairsFetch {
  uint32_t unit;
  const uint32_t end_unit;
  int tile, first_tile, tile_row;
  uint32_t stage, count;
  const uint16_t *k, *v;      // [seq_k, D], [seq_k, Dv] of the first member
  const unsigned char* bias;  // [rows, seq_k]
  const uint8_t* mask;        // [seq_k]
  PairsCopies<C> copies;
  uint32_t mask_target = 0;  // where `shown` goes; 0: not this warp's
  bool shown = false;        // this lane's key of the stage that was issued last

  __device__ __forceinline__ PairsFetch(PairsStorage<C>& shared, uint32_t first, uint32_t end)
      : unit(first), end_unit(end), stage(ptx::shared_address(shared.stage)) {}

  // Goes to the first unit from `unit` on that has keys, and starts the copies of its Q.
  __device__ __forceinline__ void seek(PairsStorage<C>& shared, const FlashsciForwardParams& p,
                                       const ForwardPlan& plan, const PairsPlan& pairs,
                                       const Window& window) {
    for (; unit < end_unit; ++unit) {
      const PairsPlace place(unit, C::kMembers, p, plan, pairs);
      tile_row = place.tile * C::kBlockQ;
      const KeyTiles<C> tiles(window, tile_row, p.seq_q);
      if (tiles.first >= tiles.end) continue;
      tile = tiles.end - 1, first_tile = tiles.first, count = place.count;
      const auto* q = static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
                      tile_row * p.q_strides.row;
#pragma unroll
      for (int r = 0; r < C::kMembers; ++r)
        if (r < count)
          load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, kVector, true>(
              ptx::shared_address(shared.q[unit % C::kUnitsQ][r]), q + r * pairs.q_step,
              p.q_strides.row, p.seq_q - tile_row, p.head_dim, p.copy_bytes);
      const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
      k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k);
      v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k);
      const FlashsciPairStrides& bias_strides = p.pairs.bias_strides;
      bias = static_cast<const unsigned char*>(p.pairs.bias) +
             (place.offset(bias_strides, place.head) + tile_row * bias_strides.row) *
                 (p.pairs.bias_is_fp32 ? 4 : 2);
      mask = p.pairs.mask + place.offset(p.pairs.mask_strides, place.head);
      if constexpr (C::kBias != 0) {
        const int key = tile * C::kBlockK;
        copies.k.start(k + key * p.k_strides.row, p.k_strides.row);
        copies.v.start(v + key * p.v_strides.row, p.v_strides.row);
        copies.bias.start(reinterpret_cast<const uint16_t*>(bias) + key * (C::kBias / 2),
                          bias_strides.row * (C::kBias / 2));
      }
      return;
    }
  }

  __device__ __forceinline__ void copy_plainly(uint32_t to, const FlashsciForwardParams& p,
                                               const PairsPlan& pairs, int keys) {
    constexpr int kTileBytes = C::kBlockK * C::kHeadDim * 2;
#pragma unroll
    for (int r = 0; r < C::kMembers; ++r) {
      if (r >= count) break;
      copies.k.copy(to + offsetof(PairsStage<C>, k) + r * kTileBytes, p.k_strides.row,
                    r * pairs.k_step, keys, p.head_dim);
      copies.v.copy(to + offsetof(PairsStage<C>, v) + r * kTileBytes, p.v_strides.row,
                    r * pairs.v_step, keys, p.head_dim_v);
    }
    copies.bias.copy(to + offsetof(PairsStage<C>, bias), p.pairs.bias_strides.row * (C::kBias / 2),
                     0, p.seq_q - tile_row, keys * (C::kBias / 2));
    copies.k.source -= C::kBlockK * p.k_strides.row;
    copies.v.source -= C::kBlockK * p.v_strides.row;
    copies.bias.source -= C::kBlockK * (C::kBias / 2);
  }

  __device__ __forceinline__ void copy_anything(uint32_t to, const FlashsciForwardParams& p,
                                                const PairsPlan& pairs, int key, int keys) {
    constexpr int kTileBytes = C::kBlockK * C::kHeadDim * 2;
#pragma unroll
    for (int r = 0; r < C::kMembers; ++r) {
      if (r >= count) break;
      load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, true, true>(
          to + offsetof(PairsStage<C>, k) + r * kTileBytes,
          k + r * pairs.k_step + key * p.k_strides.row, p.k_strides.row, keys, p.head_dim,
          p.copy_bytes);
      load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, true, true>(
          to + offsetof(PairsStage<C>, v) + r * kTileBytes,
          v + r * pairs.v_step + key * p.v_strides.row, p.v_strides.row, keys, p.head_dim_v,
          p.copy_bytes);
    }
    if (p.pairs.bias == nullptr) return;
    const int size = p.pairs.bias_is_fp32 ? 4 : 2;
#pragma unroll 1
    for (int block = 0; block < C::kKeyBlocks; ++block)
      load_bias<C>(to + offsetof(PairsStage<C>, bias) + block * C::kBlockQ * kBlockKeys * size,
                   bias + (key + block * kBlockKeys) * p.pairs.bias_strides.column * size,
                   p.pairs.bias_strides, p.pairs.bias_is_fp32 != 0, p.seq_q - tile_row,
                   keys - block * kBlockKeys, pairs.bias_copy);
  }

  // The key mask of the stage that was issued last, before the barrier at its begin.
  __device__ __forceinline__ void write_mask() const {
    if (mask_target == 0) return;
    const uint32_t word = __ballot_sync(0xffffffffu, shown);
    if (threadIdx.x % 32 == 0) ptx::st_shared(mask_target, word);
  }

  // Starts the copies of a stage and goes to the next one.
  __device__ __forceinline__ void issue(PairsStorage<C>& shared, const FlashsciForwardParams& p,
                                        const ForwardPlan& plan, const PairsPlan& pairs,
                                        const Window& window) {
    mask_target = 0;
    if (unit >= end_unit) return;
    const int key = tile * C::kBlockK, keys = p.seq_k - key;
    if constexpr (C::kBias != 0)
      copy_plainly(stage, p, pairs, keys);
    else
      copy_anything(stage, p, pairs, key, keys);
    if (pairs.key_mask) {
      // A warp for every 32 keys of every member.
      const int r = threadIdx.x / 32 / C::kKeyBlocks, block = threadIdx.x / 32 % C::kKeyBlocks;
      const int i = block * kBlockKeys + threadIdx.x % 32;
      if (r < C::kMembers && r < count) {
        mask_target = stage + offsetof(PairsStage<C>, shown) + (r * C::kKeyBlocks + block) * 4;
        shown = i < keys &&
                __ldg(mask + r * pairs.mask_step + (key + i) * p.pairs.mask_strides.column) != 0;
      }
    }
    stage = next_stage<C>(stage, shared);
    if (--tile < (C::kBias != 0 ? 0 : first_tile)) {
      ++unit;
      seek(shared, p, plan, pairs, window);
    }
  }
};

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

// O += P V with P packed.
template <class Op, class C>
__device__ __forceinline__ void multiply_packed_pv(float (&o)[C::kM][C::kDimBlocks][4],
                                                   const uint32_t (&p)[C::kN / 2][C::kM][4],
                                                   uint32_t v_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int n = 0; n < C::kN / 2; ++n) {
#pragma unroll
    for (int d = 0; d < C::kDimBlocks / 2; ++d) {
      uint32_t b[4];  // V [16 keys, 16 columns]: two n8 blocks
      ptx::ldmatrix_x4_trans(b, T::pair_address(v_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(o[m][2 * d], p[n][m], b[0], b[1]);
        Op::mma(o[m][2 * d + 1], p[n][m], b[2], b[3]);
      }
    }
  }
}

// Normalises, writes lse and output from registers: the lanes of a quad exchange the words of four
// n8 blocks, so that each has 16 bytes in a row.
template <class Op, class C>
__device__ __forceinline__ void store_rows(const float (&o)[C::kM][C::kDimBlocks][4],
                                           const float (&offset)[C::kM][2],
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
        lse[row] = sum == 0.f ? -INFINITY : fmaf(offset[m][half], plan.lse_scale, logf(sum));
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
#pragma unroll 1
  for (int i = 0; i < C::kSlots - 1; ++i) {
    fetch.issue(shared, p, plan, pairs, window);
    fetch.write_mask();
    ptx::cp_async_commit();
  }

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

    SoftmaxRows<C::kM, C::kDimBlocks> rows[kMembers];
#pragma unroll
    for (int r = 0; r < kMembers; ++r) rows[r].start();
    bool careful = true;  // raise the offsets first: no key seen yet, or
    bool again = false;   // this tile was found to need it
    const uint32_t q_start = ptx::shared_address(shared.q[unit % C::kUnitsQ]) +
                             warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
    constexpr int kQBytes = C::kBlockQ * T::kRowBytes;
    constexpr int kKeptQ = C::kKeepQ ? C::kHeadDim / 16 : 1;
    uint32_t q_kept[kMembers][kKeptQ][C::kM][4];  // Q [kRows, D] of each member

#pragma unroll 1
    for (int tile = tiles.end - 1; tile >= tiles.first;) {
      if (!again) {
        ptx::cp_async_wait<C::kSlots - 2>();
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
      }

      const int first_key = tile * C::kBlockK;
      bool active = kAnything ? first_key < seen_end && first_key + C::kBlockK > seen_begin
                              : warp_row < seq_q;
      uint32_t shown[kMembers][C::kKeyBlocks];  // a bit for each key
      bool any_shown = false, any_hidden = false;
#pragma unroll
      for (int i = 0; i < kMembers * C::kKeyBlocks; ++i) {
        uint32_t& word = shown[i / C::kKeyBlocks][i % C::kKeyBlocks];
        word = pairs.key_mask ? ptx::ld_shared(stage + offsetof(Stage, shown) + i * 4)
                              : first_bits(seq_k - first_key - i % C::kKeyBlocks * kBlockKeys);
        any_shown |= word != 0;
        any_hidden |= word != 0xffffffffu;
      }
      active &= any_shown;
      if (active) {
        constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
        // Opaque: what follows from the lane alone is not worth a register through the loop.
        const int here = opaque(lane);
        const int row = warp_row + here / 4, key = first_key + here % 4 * 8;
        const uint32_t k_start = stage + T::offset(here % 8 + here / 16 * 8, here / 8 % 2);
        const uint32_t v_start = stage + offsetof(Stage, v) + T::offset(here % 16, here / 16);
        const uint32_t bias_tile = stage + offsetof(Stage, bias);
        float s[kMembers][C::kM][C::kN][4];  // [member, m16, n8 of keys, fragment]
        auto& start = s[kMembers - 1];       // what the scores of all members start from
        if (kAnything && p.pairs.bias == nullptr)
          clear(start);
        else if (C::kBias == 4 || (kAnything && p.pairs.bias_is_fp32))
          read_bias<Op, C, true>(start, bias_tile, warp, here, pairs.bias_factor);
        else
          read_bias<Op, C, false>(start, bias_tile, warp, here, pairs.bias_factor);
        if (kAnything && mask != nullptr && !pairs.key_mask)
          hide_pairs<C>(start, mask, p.pairs.mask_strides, pairs.aligned_mask != 0, row, key, seq_q,
                        seq_k);
        const auto multiply = [&](float (&x)[C::kM][C::kN][4], int r) {
          if constexpr (C::kKeepQ)
            multiply_kept_qk<Op, C>(x, q_kept[r], k_start + r * kTileBytes);
          else
            multiply_qk<Op, C>(x, q_start + r * kQBytes, k_start + r * kTileBytes);
        };
#pragma unroll
        for (int r = 0; r < kMembers - 1; ++r) copy(s[r], start);
#pragma unroll
        for (int r = 0; r < kMembers; ++r) {
          if (!kAnything || plan.score_mode == kScaled) {
            multiply(s[r], r);
          } else {
            float x[C::kM][C::kN][4];
            clear(x);
            multiply(x, r);
            scale_scores<C>(x, plan);
            add(s[r], x);
          }
        }
        if (any_hidden) {
#pragma unroll
          for (int r = 0; r < kMembers; ++r) hide_keys<C>(s[r], shown[r], here);
        }
        if (kAnything && (first_key < full_begin || first_key + C::kBlockK > full_end)) {
#pragma unroll
          for (int r = 0; r < kMembers; ++r) mask_scores<true>(s[r], window, row, key);
        }
        if (careful) {
#pragma unroll
          for (int r = 0; r < kMembers; ++r) raise_offsets(s[r], rows[r], plan.exp_scale);
        }
        float sums[kMembers][C::kM][2];
        uint32_t p16[kMembers][C::kN / 2][C::kM][4];  // P [kRows, 16 keys] of each member
        bool too_large = false;
#pragma unroll
        for (int r = 0; r < kMembers; ++r)
          too_large |= exponentiate<Op>(p16[r], sums[r], s[r], rows[r], plan.exp_scale);
        again = !careful && __any_sync(0xffffffffu, too_large);
        careful = again;
        if (again) continue;
#pragma unroll
        for (int r = 0; r < kMembers; ++r) {
#pragma unroll
          for (int m = 0; m < C::kM; ++m) {
            rows[r].row_sum[m][0] += sums[r][m][0];
            rows[r].row_sum[m][1] += sums[r][m][1];
          }
          multiply_packed_pv<Op, C>(rows[r].o, p16[r], v_start + r * kTileBytes);
        }
      }
      --tile;
      fetch.write_mask();
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
      store_rows<Op, C>(rows[r].o, rows[r].offset, rows[r].row_sum, out + r * pairs.out_step,
                        lse + r * pairs.lse_step, p.out_strides.row, seq_q - warp_row, p.head_dim_v,
                        plan);
    }
  }
}

// Streaming multiprocessors of a device, asked once; a lost race only asks again.
inline int processors_of(int device) {
  static std::atomic<int> known[64];
  std::atomic<int>& mine = known[device & 63];
  int count = device < 64 ? mine.load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
      return 1;
    if (device < 64) mine.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Whether scores may stay in units of 1 / scale, and the bias be divided by it, without overflow.
inline bool scale_fits(float scale) { return scale > 1e-4f && scale * kLog2e <= 1.f; }

template <class Op, class C, bool kVector>
cudaError_t launch_pairs_tiling(const FlashsciForwardParams& p, PairsPlan pairs,
                                cudaStream_t stream) {
  using Storage = PairsStorage<C>;
  constexpr int kOfMembers = C::kMembers * (C::kBlockK * 4 * C::kHeadDim + C::kKeyBlocks * 4);
  constexpr int kOfBias = C::kBlockQ * C::kBlockK * (C::kBias == 2 ? 2 : 4);
  static_assert(sizeof(PairsStage<C>) == (kOfMembers + kOfBias + 127) / 128 * 128 &&
                    sizeof(Storage) == C::kUnitsQ * C::kMembers * C::kBlockQ * C::kHeadDim * 2 +
                                           C::kSlots * sizeof(PairsStage<C>),
                "the plan has no padding");
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
  plan.lse_scale = 1.f / kLog2e;  // offsets are powers of two
  return launch_kernel<forward_pairs_kernel<Op, C, kVector>, sizeof(Storage), C::kThreads>(
      p.device, blocks, stream, p, plan, pairs);
}

template <class Op, int kHeadDim>
cudaError_t launch_pairs_padded(const FlashsciForwardParams& p, const PairsPlan& pairs,
                                cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  using Tiles = Tiling<kHeadDim, (kHeadDim <= 128 ? 128 : 64), 32, 4, 2, 2>;
  constexpr int kSlots = kHeadDim <= 64 ? 3 : 2;
  using Any = PairsTiling<Tiles, 1, kSlots, 0>;
  if (!vector) return launch_pairs_tiling<Op, Any, false>(p, pairs, stream);
  if constexpr (kHeadDim <= 64) {
    using Wide = Tiling<kHeadDim, 128, 64, 4, 2, 2>;
    constexpr int kSharedSlots = kHeadDim <= 32 ? 3 : 2;
    const bool plain = pairs.bias_copy == 16 && (p.pairs.mask == nullptr || pairs.key_mask) &&
                       p.window_left < 0 && p.window_right < 0 && p.softcap == 0.f &&
                       scale_fits(p.scale);
    if (plain && pairs.shares)
      return p.pairs.bias_is_fp32
                 ? launch_pairs_tiling<Op, PairsTiling<Tiles, 2, kSharedSlots, 4>, true>(p, pairs,
                                                                                         stream)
                 : launch_pairs_tiling<Op, PairsTiling<Tiles, 2, kSharedSlots, 2>, true>(p, pairs,
                                                                                         stream);
    if (plain && !p.pairs.bias_is_fp32)
      return launch_pairs_tiling<Op, PairsTiling<Wide, 1, 2, 2>, true>(p, pairs, stream);
    if (plain)
      return launch_pairs_tiling<Op,
                                 std::conditional_t<kHeadDim <= 32, PairsTiling<Wide, 1, 2, 4>,
                                                    PairsTiling<Tiles, 1, 3, 4>>,
                                 true>(p, pairs, stream);
  }
  return launch_pairs_tiling<Op, Any, true>(p, pairs, stream);
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
