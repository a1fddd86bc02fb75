// How many streaming multiprocessors a device has: what grids are cut to.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

namespace flashsci {

// Asked once for each device; a lost race only asks again.
inline int processors_of(int device) {
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

}  // namespace flashsci
