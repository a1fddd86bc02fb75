// A debug build, -DFLASHSCI_POISON: shared memory holds NaN (0xff in every byte, in every dtype)
// from the moment it is free until it is written again, so that a read that is too early or too
// late shows in the results. Ordinary builds compile none of it. Workspaces and outputs:
// bindings/tensor.h.
//
// The owner of a stage fills it: a producer after it has waited for the stage to be free, a thread
// before it stores. Each filling thread fences between its ordinary writes and the later accesses
// of the copy engine or wgmma. A short sleep afterwards widens the time in which a late reader
// meets the NaN.
#pragma once
#include <cstdint>

#if defined(FLASHSCI_POISON)
#include "../ptx/fence.cuh"
#include "../ptx/shared.cuh"
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#endif

namespace flashsci {

__device__ __forceinline__ void poison_fill(uint32_t shared, int bytes, int thread, int threads) {
  for (int i = thread * 16; i + 16 <= bytes; i += threads * 16)
    ptx::st_shared(shared + i, make_uint4(~0u, ~0u, ~0u, ~0u));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::fence_proxy_async();
#endif
}

__device__ __forceinline__ void poison_linger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
  __nanosleep(200);
#endif
}

// Fills all of a CTA's shared memory when the kernel begins; all threads call it.
__device__ __forceinline__ void poison_block(const void* shared, int bytes) {
  poison_fill(static_cast<uint32_t>(__cvta_generic_to_shared(shared)), bytes, threadIdx.x,
              blockDim.x);
  __syncthreads();
}

// Fills a stage before the calling thread has the copy engine refill it.
__device__ __forceinline__ void poison_stage(uint32_t shared, int bytes) {
  poison_fill(shared, bytes, 0, 1);
  poison_linger();
}

// Fills memory that the calling warp is about to write.
__device__ __forceinline__ void poison_warp(uint32_t shared, int bytes) {
  poison_fill(shared, bytes, threadIdx.x % 32, 32);
  poison_linger();
  __syncwarp();
}

// Fills the pieces of 16 bytes, `step` bytes apart, that the calling thread, or with stmatrix its
// warp, is about to write; whole warps call it.
__device__ __forceinline__ void poison_pieces(uint32_t shared, int pieces, int step) {
  for (int i = 0; i < pieces; ++i) poison_fill(shared + i * step, 16, 0, 1);
  poison_linger();
  __syncwarp();
}

// Fills the 16 bytes that the calling thread is about to copy into.
__device__ __forceinline__ void poison_chunk(uint32_t shared) { poison_fill(shared, 16, 0, 1); }

}  // namespace flashsci
#else

namespace flashsci {

__device__ __forceinline__ void poison_block(const void*, int) {}
__device__ __forceinline__ void poison_stage(uint32_t, int) {}
__device__ __forceinline__ void poison_warp(uint32_t, int) {}
__device__ __forceinline__ void poison_pieces(uint32_t, int, int) {}
__device__ __forceinline__ void poison_chunk(uint32_t) {}

}  // namespace flashsci
#endif
