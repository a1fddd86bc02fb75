// Launching a kernel from the host: the multiprocessors of a device, a kernel's shared memory, and
// grid sizes of zero or beyond the limit, for which nothing is launched.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "rehearsal.h"

namespace flashsci {

// Streaming multiprocessors of a device. Queried once per device; a lost race only repeats the
// query.
inline int processors_of(int device) {
  if (const Rehearsal* described = rehearsal()) return described->processors;
  static std::atomic<int> known[64];
  std::atomic<int>& mine = known[device & 63];
  int count = device < 64 ? mine.load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
      return 1;
    if (device < 64) mine.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Bytes of shared memory that a kernel may ask for.
inline cudaError_t shared_per_block_of(int device, int& bytes) {
  if (const Rehearsal* described = rehearsal())
    return bytes = described->shared_per_block, cudaSuccess;
  return cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// Allows a kernel more than 48 KiB of shared memory, once per device; a lost race only repeats the
// call.
template <auto kKernel>
cudaError_t allow_shared(int bytes, int device) {
  static std::atomic<uint64_t> configured{0};
  if (bytes <= 48 * 1024 || rehearsing()) return cudaSuccess;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (configured.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) configured.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

// Starts a kernel whose shared memory is already allowed. Every launch of the library goes through
// this function or launch_configured.
template <auto kKernel, class... Arguments>
cudaError_t start(unsigned blocks, int threads, int shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  if (Rehearsal* of = rehearsal()) return note_kernel<kKernel>(*of), cudaSuccess;
  kKernel<<<blocks, threads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

// The same with launch attributes.
template <auto kKernel, class... Arguments>
cudaError_t launch_configured(const cudaLaunchConfig_t& config, const Arguments&... arguments) {
  if (Rehearsal* of = rehearsal()) return note_kernel<kKernel>(*of), cudaSuccess;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

// Fills memory with zeros, in order with the launches.
inline cudaError_t clear_memory(void* memory, size_t bytes, cudaStream_t stream) {
  return rehearsing() ? cudaSuccess : cudaMemsetAsync(memory, 0, bytes, stream);
}

template <auto kKernel, class... Arguments>
cudaError_t launch(int64_t blocks, int threads, int64_t shared, int device, cudaStream_t stream,
                   const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error = allow_shared<kKernel>(static_cast<int>(shared), device);
  if (error != cudaSuccess) return error;
  return start<kKernel>(static_cast<unsigned>(blocks), threads, static_cast<int>(shared), stream,
                        arguments...);
}

}  // namespace flashsci
