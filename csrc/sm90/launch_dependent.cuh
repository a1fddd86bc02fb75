// Launching a kernel of Hopper before its predecessor ends.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../core/launch.cuh"

namespace flashsci::sm90 {

// Starts before its predecessor in the stream ends, which hides the launch time. The kernel waits
// for that end (ptx::wait_for_prerequisites) before it reads or writes memory.
template <auto kKernel, class... Arguments>
cudaError_t launch_dependent(int64_t blocks, int threads, int shared, cudaStream_t stream,
                             const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return launch_configured<kKernel>(config, arguments...);
}

}  // namespace flashsci::sm90
