// The sm90 backward at head dims above 128: tiles, shared memory, and the owners of dQ additions.
#pragma once
#include <cstdint>

#include "config.cuh"

namespace flashsci::sm90::bwd {

// 128 keys by 64 queries, for a cluster of two CTAs with 64 keys each. In a CTA consumer 0 computes
// S^T and dV, consumer 1 dP^T and dK. The CTAs exchange dS, and each computes half of the columns
// of dQ for the keys of both: so an addition to dQ in global memory is of 128 keys.
template <int kHeadDim_, int kHeadDimV_>
struct D256BackwardTiling {
  static constexpr bool kD256 = true, kHasBiasMask = false, kBiasStaged = false, kManyTiles = false;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockQ = 64;
  static constexpr int kCtas = 2, kKeys = 64, kBlockK = kCtas * kKeys;  // kKeys: of a CTA
  static constexpr int kConsumers = 2, kStages = 2;
  // The numbers of stages that fit.
  static constexpr int kDoutStages = kHeadDim + kHeadDimV <= 384 ? 2 : 1;
  static constexpr int kDsStages = kHeadDim == 256 && kHeadDimV > 128 ? 1 : 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBoxes = kHeadDim / 64, kBoxesV = kHeadDimV / 64;
  static constexpr int kQBytes = kBlockQ * kHeadDim * 2, kDoutBytes = kBlockQ * kHeadDimV * 2;
  static constexpr int kKBytes = kKeys * kHeadDim * 2, kVBytes = kKeys * kHeadDimV * 2;
  static constexpr int kDsBytes = kBlockQ * kKeys * 2;
  using QBox = Box<kBlockQ>;  // Q and dO
  using KBox = Box<kKeys>;
  using StoreBox = Box<64>;  // dK and dV
  static constexpr bool kSplitRows = false;
  static constexpr int kDqColumns = kHeadDim / 2;  // of half an accumulator
  static constexpr int kDqFloats = 64 * kDqColumns;
  // Consumer w of the CTA of rank r computes columns of dQ from dq_begin(r, w) on, within one box of
  // 64, and writes them in pieces.
  static constexpr int kPieceColumns = 32, kCounters = kHeadDim / kPieceColumns;
  static constexpr int kPeerBoxes =
      kHeadDim == 128 ? 1 : 2;  // of the peer's keys, for those columns
  static constexpr int kDqStages = 1;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kHeadDim == 128 || kHeadDim == 192 || kHeadDim == 256);
  static_assert(kHeadDimV == 128 || kHeadDimV == 192 || kHeadDimV == 256);

  static constexpr __host__ __device__ int dq_columns(int) { return kDqColumns; }
  static constexpr __host__ __device__ int owned_columns(int w) {
    return kHeadDim == 256 || (kHeadDim == 192 && w == 0) ? 64 : 32;
  }
  static constexpr __host__ __device__ int dq_begin(int rank, int w) {
    return kHeadDim == 256   ? rank * 128 + w * 64
           : kHeadDim == 192 ? (w == 0 ? rank * 128 : 64 + rank * 32)
                             : rank * 64 + w * 32;
  }
};

template <int kHeadDim, int kHeadDimV>
struct BackwardStorage<D256BackwardTiling<kHeadDim, kHeadDimV>> {
  using C = D256BackwardTiling<kHeadDim, kHeadDimV>;
  unsigned char k[C::kKBytes];                        // [box][64 keys][64]
  unsigned char v[C::kVBytes];                        // the same
  unsigned char peer_k[C::kPeerBoxes * 64 * 128];     // of the peer's keys, for dQ
  unsigned char q[C::kStages][C::kQBytes];            // [stage][box][64 rows][64]
  unsigned char dout[C::kDoutStages][C::kDoutBytes];  // the same
  unsigned char ds[C::kDsStages][2][C::kDsBytes];     // own, the peer's: [64 queries][64 keys]
  uint4 p[4][128];                                    // P^T: [16 queries][thread], as operand
  float dq[C::kDqStages][C::kConsumers][64 * C::kPieceColumns];  // in register order
  float lse[C::kStages][C::kBlockQ];                             // per row, in powers of two
  float delta[C::kDoutStages][C::kBlockQ];                       // negative
  KeyTile tile[1];
  uint64_t kv_full;
  uint64_t q_full[C::kStages], q_empty[C::kStages];                // Q and lse
  uint64_t dout_full[C::kDoutStages], dout_empty[C::kDoutStages];  // dO and delta
  uint64_t p_full, p_empty;
  // dS of the block before the first is zero and has index 0; that of the i-th block has index i + 1.
  uint64_t ds_full[C::kDsStages], peer_ds_full[C::kDsStages];
  uint64_t ds_empty[C::kDsStages];  // both CTAs have read what this one computed
  uint64_t met;                     // both consumers have arrived at the end
  uint64_t dq_full[C::kDqStages][C::kConsumers], dq_empty[C::kDqStages][C::kConsumers];
};

}  // namespace flashsci::sm90::bwd
