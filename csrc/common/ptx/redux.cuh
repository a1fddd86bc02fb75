// PTX ISA "redux.sync" (sm_80 and newer).
#pragma once

namespace flashsci::ptx {

// The largest x of the warp. Of a value that all lanes share it is that value, and the result lives
// in a uniform register: what is warp-uniform but loaded or shuffled stops costing vector
// registers.
__device__ __forceinline__ int redux_max(int x) {
  int y;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;\n" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace flashsci::ptx
