// The sm90 backward at head dims above 128: tiles, shared memory, and the owners of dQ additions.
#pragma once
#include <cstdint>

#include "config.cuh"

namespace flashsci::sm90::bwd {

// 64 keys by 64 queries: consumer 0 computes S^T and dV, consumer 1 dP^T and dK; each computes half
// of the columns of dQ.
template <int kHeadDim_, int kHeadDimV_>
struct D256BackwardTiling {
  static constexpr bool kD256 = true, kHasBiasMask = false, kBiasStaged = false, kManyTiles = false;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockQ = 64, kBlockK = 64;
  static constexpr int kConsumers = 2, kStages = 2;
  static constexpr int kDoutStages = kHeadDim + kHeadDimV <= 384 ? 2 : 1;  // the number that fits
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBoxes = kHeadDim / 64, kBoxesV = kHeadDimV / 64;
  static constexpr int kQBytes = kBlockQ * kHeadDim * 2, kDoutBytes = kBlockQ * kHeadDimV * 2;
  static constexpr int kKBytes = kBlockK * kHeadDim * 2, kVBytes = kBlockK * kHeadDimV * 2;
  using QBox = Box<kBlockQ>;  // Q and dO
  using KBox = Box<kBlockK>;
  using StoreBox = Box<64>;  // dK and dV
  static constexpr bool kSplitRows = false;
  static constexpr int kDqColumns = kHeadDim / 2;
  static constexpr int kDqFloats = 64 * kDqColumns;  // per consumer
  static constexpr int kSlices = 2;                  // of dQ, one after the other
  static constexpr int kDqStages = 1, kCounters = kConsumers * kSlices;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kHeadDim == 128 || kHeadDim == 192 || kHeadDim == 256);
  static_assert(kHeadDimV == 128 || kHeadDimV == 192 || kHeadDimV == 256);

  static constexpr __host__ __device__ int dq_columns(int) { return kDqColumns; }
  // The number of columns of a slice of consumer w (within one box of 64), and its first column.
  static constexpr __host__ __device__ int slice_columns(int w, int slice) {
    return kHeadDim == 256 || (kHeadDim == 192 && w == slice) ? 64 : 32;
  }
  static constexpr __host__ __device__ int slice_begin(int w, int slice) {
    return w * kDqColumns + slice * slice_columns(w, 0);
  }
};

template <int kHeadDim, int kHeadDimV>
struct BackwardStorage<D256BackwardTiling<kHeadDim, kHeadDimV>> {
  using C = D256BackwardTiling<kHeadDim, kHeadDimV>;
  unsigned char k[C::kKBytes];                        // [box][64 keys][64]
  unsigned char v[C::kVBytes];                        // the same
  unsigned char q[C::kStages][C::kQBytes];            // [stage][box][64 rows][64]
  unsigned char dout[C::kDoutStages][C::kDoutBytes];  // the same
  unsigned char ds[2][64 * 64 * 2];                   // dS of two blocks: [64 queries][64 keys]
  uint4 p[4][128];                                    // P^T: [16 queries][thread], as operand
  float dq[C::kDqStages][C::kConsumers][64 * C::slice_columns(0, 0)];  // in register order
  float lse[C::kStages][C::kBlockQ];                                   // per row, in powers of two
  float delta[C::kDoutStages][C::kBlockQ];                             // negative
  KeyTile tile[1];
  uint64_t kv_full;
  uint64_t q_full[C::kStages], q_empty[C::kStages];                // Q and lse
  uint64_t dout_full[C::kDoutStages], dout_empty[C::kDoutStages];  // dO and delta
  uint64_t p_full, p_empty, ds_full, ds_empty;
  uint64_t met;  // both consumers have arrived: at the beginning, at the end
  uint64_t dq_full[C::kDqStages][C::kConsumers], dq_empty[C::kDqStages][C::kConsumers];
};

}  // namespace flashsci::sm90::bwd
