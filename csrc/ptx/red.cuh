// Additions to global memory that return nothing: red.global.
#pragma once

namespace flashsci::ptx {

// red instead of atomicAdd: on a pointer that the compiler does not know to be global, atomicAdd
// tests the address space at run time, and waits for the sum.
__device__ __forceinline__ void red_add(float* global, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

}  // namespace flashsci::ptx
