// The runtime calls of a launcher, and the launch itself, on the host: see emulation.h.
#include "core/dtype_bf16.cuh"
#include "core/dtype_f16.cuh"
#include "sm90/triangle/launch.cuh"

namespace flashsci::sm90::triangle {
alignas(16) unsigned char shared_memory[emulation::kSharedBytes];
}

namespace {

struct Bf16 : flashsci::BFloat16 {
  static constexpr bool kIsBf16 = true;
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaBf16<kN>;
};
struct Fp16 : flashsci::Float16 {
  static constexpr bool kIsBf16 = false;
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaF16<kN>;
};

}  // namespace

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = reinterpret_cast<void*>(&emulation::encode);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;  // multiprocessors: each has several units
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }

// A launch, with the order of the threads. 999: what went wrong is in `text`.
int emulate(const FlashsciForwardParams* params, int bf16, unsigned seed, int early, char* text,
            int size) {
  emulation::shared = flashsci::sm90::triangle::shared_memory;
  emulation::generator.seed(seed);
  emulation::early = early != 0;
  try {
    using flashsci::sm90::triangle::launch_triangle;
    const int error =
        bf16 ? launch_triangle<Bf16>(*params, nullptr) : launch_triangle<Fp16>(*params, nullptr);
    emulation::maps.clear();
    return error;
  } catch (const emulation::Failure& failure) {
    std::snprintf(text, size, "%s", failure.what.c_str());
    return 999;
  }
}
}
