// The common part of the roles of the triangle backward: shapes, shared memory, arguments, and the
// division of the work.
#pragma once
#include <cstdint>

#include "../../include/flashsci.h"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::triangle_bwd {

inline constexpr int kHeadDim = 32;   // columns of all operands, padded by TMA with zeros
inline constexpr int kBlock = 64;     // queries per step, keys per CTA
inline constexpr int kConsumers = 2;  // computing warpgroups
inline constexpr int kStages = 2;     // of Q, dO and their statistics, per consumer
inline constexpr int kThreads = 128 * (1 + kConsumers);
inline constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

using RowBox = Box<kBlock, kHeadDim>;                 // Q, dO, K, V, dK, dV: rows of 64 bytes
inline constexpr int kSumFloats = kBlock * kHeadDim;  // dQ, dK or dV, in register order
inline constexpr int kSumBytes = kSumFloats * 4;

// For a block of queries: lse in powers of two (3.4e38 for rows that see no key and rows past the
// last), then -delta, then whether some lse is large (kLargeExponent).
struct Statistics {
  float lse[kBlock], delta[kBlock];
  uint32_t large, unused[3];
};
static_assert(sizeof(Statistics) % 16 == 0, "bulk copies");

// The loader's description of a member: its place in the tensors, and the keys of the CTA that it
// sees (bits). hidden: it sees none and there is no work (except for the first keys, which write
// dQ).
struct Member {
  uint32_t batch0, batch1, head, batch_head;
  uint32_t keys[2];
  uint32_t hidden;
};

// kSteps: blocks of queries that a consumer goes through for each member.
template <int kSteps_>
struct TriangleTiling {
  static constexpr int kSteps = kSteps_;
  static constexpr int kPanelBlocks = kSteps * kConsumers;  // blocks of queries per CTA
  static constexpr int kPanel = kPanelBlocks * kBlock;
};

template <class C>
struct TriangleStorage {
  unsigned char ds[kConsumers][kBlock * kBlock * 2];             // [consumer][queries][keys]
  unsigned char k[2][RowBox::kBytes], v[2][RowBox::kBytes];      // [member % 2]
  unsigned char q[kConsumers][kStages][RowBox::kBytes];          // [consumer][stage]
  unsigned char dout[kConsumers][kStages][RowBox::kBytes];       // the same
  unsigned char rows[2][RowBox::kBytes];                         // dK and dV before they are stored
  float bias[kConsumers][C::kSteps][kBlock / 8][128][4];         // log2(e) bias, in register order
  float dq[kConsumers][kSumFloats];                              // in register order
  float dk[kConsumers][kSumFloats], dv[kConsumers][kSumFloats];  // each consumer's part
  Statistics statistics[kConsumers][kStages];
  Member member[2];                          // [member % 2]
  uint64_t member_full[2], member_empty[2];  // K, V and member
  uint64_t q_full[kConsumers][kStages], q_empty[kConsumers][kStages];
  uint64_t ds_empty[kConsumers];  // all warps' dQ have read dS
  uint64_t dq_full[kConsumers], dq_empty[kConsumers];
  uint64_t sums_full, sums_empty;  // dk and dv
};

struct alignas(128) TriangleArgs {
  CUtensorMap q, dout, k, v, dk, dv;  // boxes of 64 rows
  FlashsciBackwardParams p;
  Statistics* statistics;  // [batch and head][block of queries]
  float* dq_sums;          // [batch and head][block of queries][kSumFloats]
  float* dk_sums;          // [batch and head][block of keys][kSumFloats], if there are panels
  float* dv_sums;          // the same
  float* dbias_sums;       // [group + owner][query][key]: the sums of a group's members
  int* turns;              // [batch and head][block of queries]: key tiles added to dq_sums; in
                           // any order only the first is counted
  int64_t cleared;         // number of float4 from dk_sums on that are cleared first
  uint32_t q_blocks;       // per head, in whole panels
  uint32_t k_blocks, panels;
  uint32_t heads;             // B0 * B1 * H
  uint32_t owners, members;   // (batch, head) with a separate bias, and members that share each
  uint32_t own0, own1;        // of the owners' batches
  uint32_t member0, member1;  // of the members' batches
  uint32_t groups;            // of CTAs: each takes an equal part of all (owner, member)
  float exp_scale;            // P = exp2(exp_scale s + log2(e) bias - lse)
};

// The place of an owner's member in the tensors.
struct Place {
  uint32_t batch0, batch1, head;

  __device__ __forceinline__ Place(const TriangleArgs& a, uint32_t owner, uint32_t member) {
    const uint32_t heads = static_cast<uint32_t>(a.p.heads_q), batch = owner / heads;
    head = owner - batch * heads;
    batch0 = batch / a.own1 + member / a.member1;
    batch1 = batch % a.own1 + member % a.member1;
  }
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& s) const {
    return batch0 * s.batch0 + batch1 * s.batch1 + head * s.head;
  }
};

// Pairs (owner, member) are counted members first. A group has [first_pair(g), first_pair(g + 1)),
// of which each CTA of the group has 64 keys and a panel of queries.
__host__ __device__ inline uint32_t first_pair(uint64_t group, uint64_t pairs, uint64_t groups) {
  return static_cast<uint32_t>(group * pairs / groups);
}
__host__ __device__ inline uint32_t group_of(uint64_t pair, uint64_t pairs, uint64_t groups) {
  return static_cast<uint32_t>(((pair + 1) * groups - 1) / pairs);
}

// The part of a CTA: a number of members, from a member of an owner on.
struct Work {
  uint32_t group, panel, key_block, owner, member, count;

  __device__ __forceinline__ Work(const TriangleArgs& a, uint32_t cta) {
    const uint32_t tiles = a.k_blocks * a.panels;
    group = cta / tiles;
    const uint32_t tile = cta - group * tiles;
    panel = tile / a.k_blocks;
    key_block = tile - panel * a.k_blocks;
    const uint64_t pairs = uint64_t{a.owners} * a.members;
    const uint32_t first = first_pair(group, pairs, a.groups);
    count = first_pair(group + 1, pairs, a.groups) - first;
    owner = first / a.members;
    member = first - owner * a.members;
  }
};

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
}
__device__ __forceinline__ void sleep_for(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_sleep(ptx::shared_address(&barrier), parity & 1);
}
__device__ __forceinline__ void arrive_at(const uint64_t& barrier) {
  ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

}  // namespace flashsci::sm90::triangle_bwd
