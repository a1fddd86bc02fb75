// Paged attention by cp.async: its ring, and its waiting instructions.
#pragma once
#include <cstdint>

#include "../../core/paged/config.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"

namespace flashsci::sm80::paged {

using namespace flashsci::paged;

struct Isa {
  static __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_poll(ptx::shared_address(&barrier), parity);
  }
  static __device__ __forceinline__ void sleep(uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_poll(ptx::shared_address(&barrier), parity, 64);
  }
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
  // Kernels run one after another.
  static __device__ __forceinline__ void launch_dependents() {}
  static __device__ __forceinline__ void wait_for_prerequisites() {}
};

inline constexpr int kKVBytes = 8192;  // bytes of K, and of V, per block

// Keys per block. bytes: of an element of the caches.
constexpr int block_of(int head_dim, int bytes) { return kKVBytes / bytes / head_dim; }

template <int kHeadDim, int kBytes>
struct Tiling : Shape<kHeadDim, kBytes, block_of(kHeadDim, kBytes)> {
  using Isa = paged::Isa;
  static constexpr int kStages = 8;  // at most: the number that the device has room for
  // A thread has 168 registers.
  static constexpr bool kKeepsQ = kHeadDim == 64;
  static constexpr bool kSharesLast = true;
  static constexpr int kSlices = kHeadDim == 256 ? 2 : 1;
  static constexpr int kSumColumns = 32;
  static constexpr int kAlignment = 16;
  static constexpr int kCopies = block_of(kHeadDim, kBytes) / kSmallPage;  // pages per block
  // Blocks whose pages are looked up in advance. A warp waits for their entries in the order of all
  // its copies: it has waited for those of this many blocks before when their stages were free.
  static constexpr int kAhead = kStages;
};

// Bytes of a CTA with a ring of this number of stages.
template <class C>
__host__ __device__ constexpr int shared_bytes(int stages) {
  return static_cast<int>(sizeof(Storage<C>) - (C::kStages - stages) * sizeof(Block<C>));
}

}  // namespace flashsci::sm80::paged
