// PTX ISA "red" and "redux": sums into global memory, and the maximum of a warp.
#pragma once

namespace flashsci::ptx {

// red instead of atomicAdd: on a pointer that the compiler does not know to be global, atomicAdd
// tests the address space at run time, and waits for the sum.
__device__ __forceinline__ void red_add(float* global, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

// redux.sync (sm_80 and newer): the largest x of the warp. For a value that all lanes share it is
// that value, and the result is in a uniform register: values that are warp-uniform but were loaded
// or shuffled no longer take vector registers. (On Turing: five shuffles, and an ordinary register.)
__device__ __forceinline__ int redux_max(int x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  for (int lanes = 16; lanes > 0; lanes /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
#else
  int y;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;\n" : "=r"(y) : "r"(x));
  return y;
#endif
}

}  // namespace flashsci::ptx
