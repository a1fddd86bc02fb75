// The sources that this library was built from, and whether the machine can run it: for the
// registry and the env report, callable without torch.
#include <cuda_runtime_api.h>

#include "../include/flashsci.h"

extern "C" const char* flashsci_build_info(void) {
  return
#include "build_info.inc"  // written by flashsci/digest.py
      ;
}

extern "C" const char* flashsci_driver_problem(void) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  return devices == 0 ? "no CUDA device" : nullptr;
}
