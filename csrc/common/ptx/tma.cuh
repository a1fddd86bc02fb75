// PTX ISA "cp.async.bulk.tensor" (sm_90): one thread moves a box of a tensor map into shared
// memory, zeros where the box leaves the tensor, and reports its bytes to an mbarrier. Coordinates
// are innermost first.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

// map: address of a CUtensorMap in parameter (__grid_constant__) or global memory.
__device__ __forceinline__ void tma_load_5d(uint32_t shared, const void* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace flashsci::ptx
