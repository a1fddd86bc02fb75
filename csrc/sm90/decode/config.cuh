// The common part of the decoding kernels: tile shapes, shared memory, arguments, and the division
// of the work.
#pragma once
#include <cstdint>

#include "../../core/score_mod.cuh"
#include "../../include/flashsci.h"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::decode {

inline constexpr int kDecodeRows = 64;

template <int kHeadDim_>
struct DecodeTiling {
  static constexpr int kHeadDim = kHeadDim_, kColumnBlocks = kHeadDim / 64;
  static constexpr int kBlockK = kHeadDim == 256 ? 64 : 128;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 3;
  static constexpr int kThreads = 160;
  static constexpr int kQBytes = kDecodeRows * kHeadDim * 2;
  static constexpr int kKVBytes = kBlockK * kHeadDim * 2;
  // For a CTA that has one sequence: enough loads to keep DRAM busy. With more, the SMs that are
  // served first would take more from the others.
  static constexpr int kFewStages = 32768 / kKVBytes;
  using KVBox = Box<kBlockK>;
  static_assert(kKVBytes == kColumnBlocks * KVBox::kBytes, "a barrier expects what is loaded");
};

template <class C>
struct DecodeStorage {
  unsigned char q[C::kQBytes];
  unsigned char k[C::kStages][C::kKVBytes];
  unsigned char v[C::kStages][C::kKVBytes];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
};

// The division of the work. All sequences have the same blocks.
struct DecodePlan {
  int sequences;            // B0 * B1 * Hk
  int group, rows;          // query heads per head of K; rows = group * seq_q
  int first_block, blocks;  // of every sequence
  int run;                  // blocks of a CTA
  int segments;             // largest number per sequence
  bool one_sequence;        // each run lies in one sequence
  float* partial_out;       // [sequence][segment][row][kHeadDim], normalised
  float* partial_lse;       // [sequence][segment][row], log2
};

struct alignas(128) DecodeArgs {
  CUtensorMap k, v;
  FlashsciForwardParams p;
  DecodePlan plan;
  ScorePlan scores;
};

// The sequence of a CTA's blocks: the next one's stage in the ring.
struct DecodeTurn {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void next(uint32_t stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// A CTA's part of one sequence.
struct DecodeSegment {
  int sequence, first, end;  // blocks
  int index;                 // among the segments of the sequence
  bool alone;
};

__device__ __forceinline__ DecodeSegment decode_segment(const DecodePlan& plan, int at, int end) {
  DecodeSegment s;
  s.sequence = at / plan.blocks;
  const int begin = s.sequence * plan.blocks;
  s.first = at - begin;
  s.end = min(end - begin, plan.blocks);
  s.index = at / plan.run - begin / plan.run;
  s.alone = s.first == 0 && s.end == plan.blocks;
  return s;
}

// Row r of a tile is query r / group of head r % group of the heads that share K and V.
struct DecodeRow {
  int batch0, batch1, head, query;
  __device__ __forceinline__ DecodeRow(const DecodeArgs& a, int sequence, int row) {
    const int heads_k = a.p.heads_k, batch = sequence / heads_k;
    batch0 = batch / static_cast<int>(a.p.batch1);
    batch1 = batch - batch0 * static_cast<int>(a.p.batch1);
    query = row / a.plan.group;
    head = (sequence - batch * heads_k) * a.plan.group + row - query * a.plan.group;
  }
  __device__ __forceinline__ int64_t offset(const FlashsciStrides& s) const {
    return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head + query * s.row;
  }
  __device__ __forceinline__ int64_t lse_offset(const FlashsciForwardParams& p) const {
    return ((batch0 * p.batch1 + batch1) * p.heads_q + head) * p.seq_q + query;
  }
};

}  // namespace flashsci::sm90::decode
