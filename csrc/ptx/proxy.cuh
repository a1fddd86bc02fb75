// PTX ISA "fence.proxy.async" (sm_90) on global memory.
#pragma once

namespace flashsci::ptx {

// Orders the ordinary writes that this thread knows of before its later reads by the copy engine.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace flashsci::ptx
