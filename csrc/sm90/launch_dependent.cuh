// Launching a kernel of Hopper before its predecessor ends.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../core/launch.cuh"

namespace flashsci::sm90 {

// Launches blocks in clusters. dependent: they start before the predecessor in the stream ends, which
// hides the launch time, and the kernel waits for that end (ptx::wait_for_prerequisites) before it
// reads or writes memory.
template <auto kKernel, int kCluster, class... Arguments>
cudaError_t launch_in_clusters(bool dependent, int64_t blocks, int threads, int shared,
                               cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = kCluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (kCluster > 1) + dependent;
  return launch_configured<kKernel>(config, arguments...);
}

template <auto kKernel, class... Arguments>
cudaError_t launch_dependent(int64_t blocks, int threads, int shared, cudaStream_t stream,
                             const Arguments&... arguments) {
  return launch_in_clusters<kKernel, 1>(true, blocks, threads, shared, stream, arguments...);
}

}  // namespace flashsci::sm90
