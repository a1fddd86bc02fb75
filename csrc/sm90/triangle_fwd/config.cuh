// The common part of the roles of the sm90 triangle attention: tile shapes, shared memory,
// arguments.
#pragma once
#include <cstdint>

#include "../../include/flashsci.h"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::triangle_fwd {

// Four consumer warpgroups share the blocks of a bias: kMembers members times kRowTiles tiles of 64
// query rows. An fp32 bias of 64 rows and a 16-bit one of 128 rows take the same shared memory.
template <int kBiasBytes_, int kMembers_>
struct Tiling {
  static constexpr int kBiasBytes = kBiasBytes_;  // per element
  static constexpr int kHeadDim = 32, kBlockK = 64, kConsumers = 4;
  static constexpr int kMembers = kMembers_, kRowTiles = kConsumers / kMembers;
  static constexpr int kBlockQ = 64 * kRowTiles;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kStages = 12 / kMembers;  // of K and V of a member
  static constexpr int kBiasStages = 6;
  using Rows = Box<64, kHeadDim>;     // of Q, K and V
  using OutRows = Box<16, kHeadDim>;  // per warp
  // In boxes of 32 bytes four rows are neighbours, so that pairs of fp32 are read without bank
  // conflicts.
  using BiasBox = Box<64, kBiasBytes == 4 ? 8 : kBlockK, kBiasBytes>;
  static constexpr int kBiasTileBytes = 64 * kBlockK * kBiasBytes;  // per tile of rows
  // The 96 registers of the launch bounds redistributed.
  static constexpr int kProducerRegisters = 64, kConsumerRegisters = 104;
  // A resident bias is prepared in place, as fp32; until then a 16-bit one is in the second half.
  static constexpr bool kPrepares = kRowTiles == 1;
  static constexpr int kBiasStageBytes = 64 * kBlockK * 4;
  static constexpr int kBiasStart = kBiasStageBytes - kRowTiles * kBiasTileBytes;
  static_assert(kBiasBytes * kRowTiles <= 4 && kBiasStart >= 0);
};

// A block of keys that a member sees some of.
struct alignas(16) BlockInfo {
  uint32_t shown[2];  // a bit for each key
  int block_last;     // 2 block + whether it is the last one of its unit
  int member;         // index among the members that share the bias
};

template <class C>
struct SharedStorage {
  unsigned char bias[C::kBiasStages][C::kBiasStageBytes];     // from kBiasStart on: BiasBoxes
  unsigned char k[C::kMembers][C::kStages][C::Rows::kBytes];  // [64 keys][32], swizzled
  unsigned char v[C::kMembers][C::kStages][C::Rows::kBytes];
  unsigned char q[C::kConsumers][C::Rows::kBytes];
  unsigned char staging[C::kConsumers * 4][C::OutRows::kBytes];  // output of a warp
  BlockInfo info[C::kMembers][C::kStages];
  uint64_t kv_full[C::kMembers][C::kStages], kv_empty[C::kMembers][C::kStages];
  uint64_t bias_full[C::kBiasStages], bias_prepared[C::kBiasStages], bias_empty[C::kBiasStages];
  uint64_t q_full[C::kConsumers], q_empty[C::kConsumers];
};

// A unit of work: a tile of rows of a head, for kMembers members. Units are numbered tile by tile;
// a CTA takes a run of them.
struct Plan {
  uint32_t units, rest;      // units per CTA; `rest` CTAs have one more
  uint32_t members, groups;  // along the batch dimension that shares the bias
  uint32_t row_tiles;        // of a head
  int32_t member_dim;        // batch dimension 0 or 1
  int32_t blocks;            // of keys
  int32_t resident;          // the bias of all blocks stays for the whole tile
  int32_t bias_copied;       // by the preceding kernel
  float bias_factor;         // from natural units to those of q.k
  float exp_scale;           // from those of q.k to powers of two
};

struct alignas(128) Args {
  CUtensorMap q, k, v, out, bias;
  FlashsciForwardParams p;
  Plan plan;
};

// A role's position in the ring of the bias. A resident bias of a tile of rows takes the whole
// ring, for any number of blocks.
template <class C>
struct BiasRing {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == C::kBiasStages) stage = 0, phase ^= 1;
  }
  // Called after a unit with a resident bias. stays: it serves the next unit, too.
  __device__ __forceinline__ void restart(const Plan& plan, bool stays) {
    const bool wrapped = plan.blocks == C::kBiasStages;  // by next()
    stage = 0;
    phase ^= stays == wrapped;
  }
};

}  // namespace flashsci::sm90::triangle_fwd
