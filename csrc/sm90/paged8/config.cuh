// Paged attention from a cache of 8-bit floats: tile shapes, shared memory, arguments.
#pragma once
#include <cstdint>

#include "../../ptx/cvt_f16_fp8.cuh"
#include "../paged/config.cuh"

namespace flashsci::sm90::paged8 {

using paged::kRows, paged::kWarpRows, paged::Cursor, paged::Runs, paged::Slot, paged::Tile;

inline constexpr int kWarps = 8;   // that compute
inline constexpr int kChunk = 16;  // keys that a warp multiplies at a time
inline constexpr int kComputingThreads = kWarps * 32;

// What a cache holds; four of its bytes as fp16.
struct E4m3 {
  static __device__ __forceinline__ uint2 widen(uint32_t word) { return ptx::cvt_f16x4_e4m3(word); }
};
struct E5m2 {
  static __device__ __forceinline__ uint2 widen(uint32_t word) { return ptx::cvt_f16x4_e5m2(word); }
};

template <int kHeadDim_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockK = 128;
  static constexpr int kColumns = kHeadDim < 128 ? kHeadDim : 128;  // of a box
  using CacheBox = Box<kBlockK, kColumns, 1>;
  static constexpr int kBoxes = kHeadDim / kColumns;
  static constexpr int kStages = kHeadDim == 64 ? 8 : kHeadDim == 128 ? 4 : 2;
  static constexpr int kQStages = kHeadDim == 256 ? 1 : 2;  // tiles whose Q is there
  static constexpr bool kKeepsQ = kHeadDim <= 128;          // in registers
  static constexpr int kThreads = kComputingThreads + 128;  // registers move by warpgroups
  static constexpr int kComputingRegisters = 224, kLoadingRegisters = 56;
  static constexpr int kQBytes = kRows * kHeadDim * 2;
  static constexpr int kKVBytes = kBlockK * kHeadDim;
  static constexpr int kCopies = kBlockK / paged::kSmallPage * kBoxes;  // of a block, at most
  static constexpr int kAhead = 3;    // blocks whose pages are looked up before they are copied
  static constexpr int kLoaders = 2;  // warps that load K and V
  static_assert(kCopies <= 32, "a lane of the loading warps for each copy");
  static_assert(kKVBytes == kBoxes * CacheBox::kBytes, "a barrier expects what is loaded");
};

template <class C>
struct Storage {
  unsigned char q[C::kQStages][C::kQBytes];  // fp16: query_place
  unsigned char k[C::kStages][C::kKVBytes];  // [stage][kColumns][kBlockK rows]
  unsigned char v[C::kStages][C::kKVBytes];
  float sums[kWarps][kWarpRows][C::kColumns];  // P V of each warp's keys, some columns at a time
  float2 statistics[kWarps][kWarpRows];        // of their softmax: offset, sum
  float q_units[C::kQStages][kRows];           // what Q is a multiple of
  float k_scale[C::kQStages], v_scale[C::kQStages];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  uint64_t q_full[C::kQStages], q_empty[C::kQStages];
  Tile tiles[C::kQStages];
  int32_t pages[C::kLoaders][C::kAhead][C::kCopies];  // of the blocks to come
};

// [sequence, head of K and V], or none: 1.
struct Scale {
  const float* values;
  int64_t sequence, head;  // strides
  __device__ __forceinline__ float at(int n, int h) const {
    return values == nullptr ? 1.f : __ldg(values + n * sequence + h * head);
  }
};

struct alignas(128) Args {
  paged::Args call;
  Scale k, v;
};

}  // namespace flashsci::sm90::paged8
