// The runtime calls of a launcher, and the launch itself, on the host: see emulation.h.
#include KERNEL

namespace flashsci::sm90::fp8 {
alignas(16) unsigned char shared_memory[emulation::kSharedBytes];
}

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = reinterpret_cast<void*>(&emulation::encode);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;  // multiprocessors: each has several tiles
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

// As flashsci_forward_sm90_e4m3, with the order of the threads. 999: what went wrong is in `text`.
int emulate(const FlashsciFp8ForwardParams* params, unsigned seed, int early, char* text,
            int size) {
  emulation::shared = flashsci::sm90::fp8::shared_memory;
  emulation::generator.seed(seed);
  emulation::early = early != 0;
  try {
    const int error = flashsci_forward_sm90_e4m3(params, nullptr);
    emulation::maps.clear();
    return error;
  } catch (const emulation::Failure& failure) {
    std::snprintf(text, size, "%s", failure.what.c_str());
    return 999;
  }
}
}
