// PTX ISA "cp.async.bulk" out of shared memory (sm_90): like bulk_add_f32 of bulk.cuh, with the
// same rules, but it overwrites the destination.
#pragma once
#include <cstdint>

namespace flashsci::ptx {

__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

}  // namespace flashsci::ptx
