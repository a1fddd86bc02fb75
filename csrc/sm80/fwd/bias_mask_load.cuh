// The work of bias_mask_kernel.cuh: its units and stages, their places, and their copies to shared
// memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../../core/alibi.cuh"
#include "../../core/mask.cuh"
#include "../../core/ragged_bias.cuh"
#include "../../core/varlen.cuh"
#include "bias_mask_tile.cuh"
#include "config.cuh"
#include "rows.cuh"

namespace flashsci::sm80::fwd {

// 32 keys at a time: scores and bias take 64 registers, the outputs of all members dims x members,
// Q (if it is kept) half of that. kBias_: bytes of a bias element if nothing else is special
// (16-byte copies, no window, no softcap, scale > 0, no mask of pairs); 0: anything.
template <class Tiling_, int kMembers_, int kBias_>
struct BiasMaskTiling : Tiling_ {
  static constexpr int kMembers = kMembers_, kBias = kBias_;
  static constexpr int kSlots = 2;  // three were not faster
  static constexpr bool kKeepQ = Tiling_::kHeadDim * kMembers * Tiling_::kM <= 128;
  static constexpr bool kPersistent = kKeepQ;  // otherwise the next unit's Q has no place
  static constexpr int kUnitsQ = kPersistent ? 2 : 1;
  static_assert(Tiling_::kBlockK == 32, "what the interleaving permutes");
};

template <class C>
struct alignas(128) BiasMaskStage {
  uint16_t k[C::kMembers][C::kBlockK * C::kHeadDim];                 // [member, kBlockK, D]
  uint16_t v[C::kMembers][C::kBlockK * C::kHeadDim];                 // [member, kBlockK, D]
  uint16_t bias[C::kBlockQ * C::kBlockK * (C::kBias == 2 ? 1 : 2)];  // [kBlockQ, kBlockK]
  uint8_t shown[C::kMembers][C::kBlockK];                            // [member, kBlockK]
};

template <class C>
struct BiasMaskStorage {
  uint16_t q[C::kUnitsQ][C::kMembers][C::kBlockQ * C::kHeadDim];  // [unit, member, kBlockQ, D]
  BiasMaskStage<C> stage[C::kSlots];
};

// Values that the host derives from the parameters, in addition to ForwardPlan.
struct BiasMaskPlan {
  int64_t q_step, k_step, v_step, out_step, lse_step, mask_step;  // elements to the next member
  uint32_t members, groups;    // along the shared dimension; ceil(members / kMembers)
  int32_t shared_dim;          // 0 batch0, 1 batch1, 2 head
  int32_t shares;              // members share a bias or a mask of pairs
  int32_t bias_copy;           // 16, 8, 4, 2: alignment of bias rows; 0: columns are strided
  int32_t aligned_mask;        // every four keys of every mask row are an aligned word
  int32_t key_mask;            // the mask is the same for all queries
  float bias_factor;           // from natural units to those of the scores
  uint32_t units, units_rest;  // units per CTA; `units_rest` CTAs have one more
};

// The place of the first member of a unit.
struct BiasMaskPlace {
  uint32_t batch0, batch1, head, count, tile;

  __device__ __forceinline__ BiasMaskPlace(uint32_t unit, int of_unit,
                                           const FlashsciForwardParams& p, const ForwardPlan& plan,
                                           const BiasMaskPlan& bias_mask) {
    const uint32_t rest = unit / plan.tiles;
    tile = unit - rest * plan.tiles;
    if (p.window_right >= 0) tile = plan.tiles - 1 - tile;  // the longest first
    const uint32_t outer = rest / bias_mask.groups;
    const uint32_t member = (rest - outer * bias_mask.groups) * of_unit;
    count = bias_mask.members - member;  // at least 1; more than of_unit: all exist
    const auto heads = static_cast<uint32_t>(p.heads_q), second = static_cast<uint32_t>(p.batch1);
    const uint32_t inner = bias_mask.shared_dim == 2 ? second : heads;
    const uint32_t a = outer / inner, b = outer - a * inner;
    batch0 = bias_mask.shared_dim == 0 ? member : a;
    batch1 = bias_mask.shared_dim == 0 ? a : bias_mask.shared_dim == 1 ? member : b;
    head = bias_mask.shared_dim == 2 ? member : b;
  }
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

// The sequence of a packed call that a unit works on. Dense calls have one, and the tile of a unit is
// that of its place.
struct BiasMaskSequence {
  int tile, first_q, seq_q, first_k, seq_k;
  int64_t first_bias;  // elements from the bias of a head to its first one

  __device__ __forceinline__ explicit BiasMaskSequence(const FlashsciForwardParams& p)
      : tile(0), first_q(0), seq_q(p.seq_q), first_k(0), seq_k(p.seq_k), first_bias(0) {}

  // Of slot `slot` of a head. Returns whether there is a tile.
  template <class C>
  __device__ __forceinline__ bool find(int slot, const FlashsciForwardParams& p) {
    const TileOfSequence found =
        find_tile<C::kBlockQ>(slot, p.cu_seqlens_q, p.cu_seqlens_k, p.num_seqs, p.seq_q, p.seq_k);
    tile = found.tile, first_q = found.first_q, seq_q = found.seq_q;
    first_k = found.first_k, seq_k = found.seq_k;
    first_bias = ragged_start(p.bias_mask, found.segment - 1, first_k, seq_q, seq_k);
    if (first_bias < 0) seq_k = 0;
    return tile >= 0 && tile * C::kBlockQ < seq_q;
  }
};

template <class C>
__device__ __forceinline__ uint32_t next_stage(uint32_t stage, BiasMaskStorage<C>& shared) {
  const uint32_t first = ptx::shared_address(shared.stage);
  stage += sizeof(BiasMaskStage<C>);
  return stage == first + C::kSlots * static_cast<uint32_t>(sizeof(BiasMaskStage<C>)) ? first
                                                                                      : stage;
}

// The pointers of a thread into the stage whose copies start next, if nothing is special.
template <class C, bool kPlain = C::kBias != 0>
struct BiasMaskCopies {
  using Keys = TileCopy<C::kBlockK, C::kHeadDim, C::kThreads, true>;
  Keys k, v;
  TileCopy<C::kBlockQ, C::kBlockK * C::kBias / 2, C::kThreads, false> bias;
};
template <class C>
struct BiasMaskCopies<C, false> {};

// The stage whose copies start next. kPacks: the call may be packed.
template <class C, bool kVector, bool kPacks>
struct BiasMaskFetch {
  const BiasMaskSequence& sequence;
  uint32_t unit;
  const uint32_t end_unit;
  int tile, first_tile, tile_row;
  uint32_t stage, count;
  const uint16_t *k, *v;      // [seq_k, D], [seq_k, Dv] of the first member
  const unsigned char* bias;  // [rows, seq_k]
  const uint8_t* mask;        // [seq_k]
  BiasMaskCopies<C> copies;

  __device__ __forceinline__ BiasMaskFetch(BiasMaskStorage<C>& shared, const BiasMaskSequence& of,
                                           uint32_t first, uint32_t end)
      : sequence(of), unit(first), end_unit(end), stage(ptx::shared_address(shared.stage)) {}

  // Of packed calls: rows of pairs are as long as the sequence.
  static __device__ __forceinline__ bool is_packed(const FlashsciForwardParams& p) {
    return kPacks && p.cu_seqlens_q != nullptr;
  }
  __device__ __forceinline__ FlashsciScoreStrides
  bias_strides(const FlashsciForwardParams& p) const {
    FlashsciScoreStrides strides = p.bias_mask.bias_strides;
    if (is_packed(p))
      strides.row = row_of_pairs(strides, p.bias_mask.mask_strides.batch0 != 0, sequence.seq_k);
    return strides;
  }

  // Goes to the first unit from `unit` on that has keys, and starts the copies of its Q.
  __device__ __forceinline__ void seek(BiasMaskStorage<C>& shared, const FlashsciForwardParams& p,
                                       const ForwardPlan& plan, const BiasMaskPlan& bias_mask,
                                       const Window& window) {
    for (; unit < end_unit; ++unit) {
      const BiasMaskPlace place(unit, C::kMembers, p, plan, bias_mask);
      tile_row = (is_packed(p) ? sequence.tile : place.tile) * C::kBlockQ;
      const KeyTiles<C> tiles(window, tile_row, sequence.seq_q);
      if (tiles.first >= tiles.end) continue;
      tile = tiles.end - 1, first_tile = tiles.first, count = place.count;
      const auto* q = static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
                      (sequence.first_q + tile_row) * p.q_strides.row;
#pragma unroll
      for (int r = 0; r < C::kMembers; ++r)
        if (r < count)
          load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, kVector, true>(
              ptx::shared_address(shared.q[unit % C::kUnitsQ][r]), q + r * bias_mask.q_step,
              p.q_strides.row, sequence.seq_q - tile_row, p.head_dim, p.copy_bytes);
      const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
      k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k) +
          sequence.first_k * p.k_strides.row;
      v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k) +
          sequence.first_k * p.v_strides.row;
      const FlashsciScoreStrides strides = bias_strides(p);
      bias = static_cast<const unsigned char*>(p.bias_mask.bias) +
             (place.offset(strides, place.head) + sequence.first_bias + tile_row * strides.row) *
                 (p.bias_mask.bias_is_fp32 ? 4 : 2);
      mask = p.bias_mask.mask + place.offset(p.bias_mask.mask_strides, place.head);
      if constexpr (C::kBias != 0) {
        const int key = tile * C::kBlockK;
        copies.k.start(k + key * p.k_strides.row, p.k_strides.row);
        copies.v.start(v + key * p.v_strides.row, p.v_strides.row);
        copies.bias.start(reinterpret_cast<const uint16_t*>(bias) + key * (C::kBias / 2),
                          strides.row * (C::kBias / 2));
      }
      return;
    }
  }

  __device__ __forceinline__ void copy_plainly(uint32_t to, const FlashsciForwardParams& p,
                                               const BiasMaskPlan& bias_mask, int keys) {
    constexpr int kTileBytes = C::kBlockK * C::kHeadDim * 2;
#pragma unroll
    for (int r = 0; r < C::kMembers; ++r) {
      if (r >= count) break;
      copies.k.copy(to + offsetof(BiasMaskStage<C>, k) + r * kTileBytes, p.k_strides.row,
                    r * bias_mask.k_step, keys, p.head_dim);
      copies.v.copy(to + offsetof(BiasMaskStage<C>, v) + r * kTileBytes, p.v_strides.row,
                    r * bias_mask.v_step, keys, p.head_dim_v);
    }
    copies.bias.copy(to + offsetof(BiasMaskStage<C>, bias),
                     p.bias_mask.bias_strides.row * (C::kBias / 2), 0, p.seq_q - tile_row,
                     keys * (C::kBias / 2));
    copies.k.source -= C::kBlockK * p.k_strides.row;
    copies.v.source -= C::kBlockK * p.v_strides.row;
    copies.bias.source -= C::kBlockK * (C::kBias / 2);
  }

  __device__ __forceinline__ void copy_anything(uint32_t to, const FlashsciForwardParams& p,
                                                const BiasMaskPlan& bias_mask, int key, int keys) {
    constexpr int kTileBytes = C::kBlockK * C::kHeadDim * 2;
#pragma unroll
    for (int r = 0; r < C::kMembers; ++r) {
      if (r >= count) break;
      load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, true, true>(
          to + offsetof(BiasMaskStage<C>, k) + r * kTileBytes,
          k + r * bias_mask.k_step + key * p.k_strides.row, p.k_strides.row, keys, p.head_dim,
          p.copy_bytes);
      load_tile<C::kBlockK, C::kHeadDim, C::kThreads, kVector, true, true>(
          to + offsetof(BiasMaskStage<C>, v) + r * kTileBytes,
          v + r * bias_mask.v_step + key * p.v_strides.row, p.v_strides.row, keys, p.head_dim_v,
          p.copy_bytes);
    }
    if (p.bias_mask.bias != nullptr && !has_slopes(p.bias_mask))
      load_bias<C>(
          to + offsetof(BiasMaskStage<C>, bias),
          bias + key * p.bias_mask.bias_strides.column * (p.bias_mask.bias_is_fp32 ? 4 : 2),
          bias_strides(p), p.bias_mask.bias_is_fp32 != 0, sequence.seq_q - tile_row, keys,
          bias_mask.bias_copy);
  }

  // Starts the copies of a stage and goes to the next one.
  __device__ __forceinline__ void issue(BiasMaskStorage<C>& shared, const FlashsciForwardParams& p,
                                        const ForwardPlan& plan, const BiasMaskPlan& bias_mask,
                                        const Window& window) {
    if (unit >= end_unit) return;
    const int key = tile * C::kBlockK, keys = sequence.seq_k - key;
    if constexpr (C::kBias != 0)
      copy_plainly(stage, p, bias_mask, keys);
    else
      copy_anything(stage, p, bias_mask, key, keys);
    if (bias_mask.key_mask) {
#pragma unroll
      for (int r = 0; r < C::kMembers; ++r)
        if (r < count)
          load_key_mask<C::kBlockK>(
              stage + offsetof(BiasMaskStage<C>, shown) + r * C::kBlockK,
              mask + r * bias_mask.mask_step + key * p.bias_mask.mask_strides.column,
              p.bias_mask.mask_strides.column, bias_mask.aligned_mask != 0, keys);
    }
    stage = next_stage<C>(stage, shared);
    if (--tile < first_tile) {
      ++unit;
      seek(shared, p, plan, bias_mask, window);
    }
  }
};

}  // namespace flashsci::sm80::fwd
