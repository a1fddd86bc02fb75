// Host side: what the launchers share.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashsci::sm90 {

// Multiprocessors of a device; asked once.
inline int multiprocessors(int device) {
  static std::atomic<int> known[64];
  int count = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0 &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      device < 64)
    known[device].store(count, std::memory_order_relaxed);
  return count;
}

// Lets a kernel have more than 48 KiB of shared memory. configured: one bit for each device where
// that is done; a lost race only repeats it.
template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, int bytes, int device, std::atomic<uint64_t>& configured) {
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (device < 64 && (configured.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) configured.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace flashsci::sm90
