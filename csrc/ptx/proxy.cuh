// PTX ISA "fence.proxy.async" (sm_90) on global memory.
#pragma once

namespace flashsci::ptx {

// What ordinary writes are known to this thread come before what the copy engine reads for it
// afterwards.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace flashsci::ptx
