// The host side of paged attention by cp.async: the number of stages, and the launches.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "../../core/paged/combine.cuh"
#include "../../core/paged/host.cuh"
#include "../../core/paged/plan.cuh"
#include "config.cuh"
#include "format.cuh"
#include "kernel.cuh"

namespace flashsci::sm80::paged {

inline constexpr int kLeastShared = 99 * 1024;  // per CTA, on sm_86, sm_89 and sm_120

// Whether copies of 16 bytes can read K and V. bytes: of an element.
inline bool takes_caches(const FlashsciPagedParams& p, int bytes) {
  const auto aligned = [&](int64_t size, int64_t stride) {
    return size <= 1 || stride * bytes % 16 == 0;
  };
  const auto takes = [&](const void* cache, int64_t page, int64_t row, int64_t head) {
    return reinterpret_cast<uintptr_t>(cache) % 16 == 0 && aligned(p.pages, page) &&
           aligned(p.page, row) && aligned(p.heads_k, head);
  };
  return takes(p.k_cache, p.k_page, p.k_row, p.k_head) &&
         takes(p.v_cache, p.v_page, p.v_row, p.v_head);
}

// The number of stages that there is room for.
template <class C>
cudaError_t find_stages(int& stages, int device) {
  int room;
  const cudaError_t error = shared_per_block_of(device, room);
  stages = 1;
  while (stages < C::kStages && shared_bytes<C>(stages + 1) <= room) ++stages;
  return error;
}

// The interface that core/paged/host.cuh requires of a generation.
struct Generation {
  using E4m3 = paged::E4m3;
  using E5m2 = paged::E5m2;
  static constexpr auto block_of = paged::block_of;
  static constexpr auto takes_caches = paged::takes_caches;

  template <class Op, class Format, int kHeadDim>
  static cudaError_t launch(const FlashsciPaged8Params& p, cudaStream_t stream) {
    using C = Tiling<kHeadDim, Format::kBytes>;
    static_assert(shared_bytes<C>(3) <= kLeastShared,
                  "copies under way while blocks are multiplied");
    int stages;
    cudaError_t error = find_stages<C>(stages, p.call.device);
    if (error != cudaSuccess) return error;
    Args a;
    fill_args(a, p, Format::kUnit, stages);
    if (a.plan.count > kPlannedByEach)
      error = flashsci::launch<plan_kernel<Op, C>>(1, kPlanThreads, 0, p.call.device, stream, a.p,
                                                   a.plan, a.group);
    if (error == cudaSuccess)
      error = flashsci::launch<paged_kernel<Op, Format, C>>(
          a.plan.ctas, kThreads, shared_bytes<C>(stages), p.call.device, stream, a);
    if (error == cudaSuccess)
      error = flashsci::launch<combine_kernel<Op, C>>(combining_ctas(a), kCombiningWarps * 32, 0,
                                                      p.call.device, stream, a);
    return error;
  }
};

}  // namespace flashsci::sm80::paged
