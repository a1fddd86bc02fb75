// PTX ISA "cp.async.bulk.tensor" (sm_90): one thread moves a box of a tensor map. Into shared
// memory: zeros where the box leaves the tensor, and its bytes are reported to an mbarrier. Out of
// it: elements outside the tensor are not written (of the innermost dimension in units of 16
// bytes). Coordinates are innermost first. Groups of stores and their waits are in bulk.cuh.
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

__device__ __forceinline__ void tma_store_5d(const void* map, uint32_t shared, int c0, int c1,
                                             int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// "cp.reduce.async.bulk.tensor": one thread adds a box in shared memory to a tensor in global
// memory, in the element type of the map (fp32), each element atomically and in any order. Elements
// outside the tensor are dropped as by tma_store_5d, with the same groups and waits.
__device__ __forceinline__ void tma_add_5d(const void* map, uint32_t shared, int c0, int c1, int c2,
                                           int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace flashsci::ptx
