// PTX ISA "cp.reduce.async.bulk.tensor" (sm_90): one thread adds a box in shared memory to a tensor
// in global memory, in the element of the map (fp32), each element atomically and in any order.
// What leaves the tensor is dropped as by tma_store_5d (tma.cuh), whose groups and waits serve here
// too.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void tma_add_5d(const void* map, uint32_t shared, int c0, int c1, int c2,
                                           int c3, int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

}  // namespace flashsci::ptx
