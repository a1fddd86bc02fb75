// Paged attention on Hopper: its ring, its registers, and its waiting instructions.
#pragma once
#include <cstdint>

#include "../../core/paged/config.cuh"
#include "../../core/paged/format.cuh"
#include "../../ptx/convert.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::paged {

using namespace flashsci::paged;

struct Isa {
  static __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  }
  static __device__ __forceinline__ void sleep(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_sleep(ptx::shared_address(&barrier), parity);
  }
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
  static __device__ __forceinline__ void launch_dependents() { ptx::launch_dependents(); }
  static __device__ __forceinline__ void wait_for_prerequisites() { ptx::wait_for_prerequisites(); }
};

struct E4m3 : Narrow<ptx::cvt_f16x4_e4m3> {};
struct E5m2 : Narrow<ptx::cvt_f16x4_e5m2> {};

// Keys per block. bytes: of an element of the caches.
constexpr int block_of(int head_dim, int bytes) { return bytes == 1 ? 128 : 8192 / head_dim; }

// kJoined: a copy takes both boxes of its rows, so that their 256 bytes are requested together;
// with other head dims it would read beyond the head.
template <int kHeadDim, int kBytes, bool kJoined = false>
struct Tiling : Shape<kHeadDim, kBytes, block_of(kHeadDim, kBytes), kJoined> {
  using Base = Shape<kHeadDim, kBytes, block_of(kHeadDim, kBytes), kJoined>;
  using Isa = paged::Isa;
  using CacheBox = Box<Base::kBlockK, Base::kColumns, kBytes>;
  static constexpr int kStages = kBytes == 2 ? 5 : kHeadDim == 64 ? 8 : kHeadDim == 128 ? 4 : 2;
  static constexpr bool kKeepsQ = kHeadDim <= 128;
  static constexpr bool kSharesLast = kHeadDim <= 128;
  static constexpr int kSlices = 1, kSumColumns = Base::kColumns;
  static constexpr int kAlignment = 1024;  // the period of TMA's swizzles
  // Up to head dim 128, the registers that these threads leave are enough for a CTA of
  // combine_kernel, which then waits on the same SM.
  static constexpr bool kLeavesRoom = kHeadDim <= 128;
  // Registers of a thread at the start: the most that this number of threads can have, as the
  // launch bounds say.
  static constexpr int kRegisters = kLeavesRoom ? 128 : 168;
  static constexpr int kBound = 65536 / kRegisters / 128 * 128;
  // Registers move by warpgroups.
  static constexpr int kComputingRegisters = kLeavesRoom ? 160 : 216;
  static constexpr int kLoadingRegisters = kLeavesRoom ? 64 : 72;
  static_assert(kComputingThreads * kComputingRegisters + 128 * kLoadingRegisters <=
                    kThreads * kRegisters,
                "a warp that asks for more waits for ever");
  static constexpr int kRowCopies = kJoined ? 1 : Base::kBoxes;
  static constexpr int kCopies = Base::kBlockK / kSmallPage * kRowCopies;  // per block, at most
  static constexpr int kAhead = kBytes == 1 ? 3 : 8;  // blocks whose pages are looked up in advance
  static_assert(kCopies <= 32, "a lane of the loading warps for each copy");
  static_assert(Base::kBoxBytes == CacheBox::kBytes, "a barrier expects what is loaded");
};

struct alignas(128) MappedArgs : Args {
  CUtensorMap k, v;  // boxes of box_rows rows
  int box_rows;      // rows of a page per copy
};

}  // namespace flashsci::sm90::paged
