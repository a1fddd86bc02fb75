// The host side of paged attention on Hopper: tensor maps and launches.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <numeric>

#include "../../core/launch.cuh"
#include "../../core/paged/combine.cuh"
#include "../../core/paged/host.cuh"
#include "../../core/paged/plan.cuh"
#include "../launch_dependent.cuh"
#include "../tma_map.h"
#include "config.cuh"
#include "kernel.cuh"

namespace flashsci::sm90::paged {

// element: of the caches.
template <class C>
cudaError_t fill_maps(MappedArgs& a, const MapElement& element) {
  const FlashsciPagedParams& p = a.p;
  a.box_rows = std::gcd(p.page, C::kBlockK);
  const auto map = [&](CUtensorMap* to, const void* cache, int columns, int64_t row, int64_t head,
                       int64_t page) {
    if constexpr (C::kJoined)  // lines of a row take the place of rows
      return encode_map(
          to, cache, element, C::CacheBox::kColumns,
          {{C::kBoxes, p.page, p.heads_k, p.pages}, {C::CacheBox::kColumns, row, head, page}},
          C::CacheBox::kColumns, C::kBoxes, a.box_rows);
    return encode_map(to, cache, element, columns,
                      {{p.page, p.heads_k, p.pages, 1}, {row, head, page, 0}},
                      C::CacheBox::kColumns, a.box_rows);
  };
  cudaError_t error = map(&a.k, p.k_cache, p.head_dim, p.k_row, p.k_head, p.k_page);
  if (error == cudaSuccess) error = map(&a.v, p.v_cache, p.head_dim_v, p.v_row, p.v_head, p.v_page);
  return error;
}

// The interface that core/paged/host.cuh requires of a generation.
struct Generation {
  using E4m3 = paged::E4m3;
  using E5m2 = paged::E5m2;
  static constexpr auto block_of = paged::block_of;
  // Caches that its copies cannot read have no map.
  static bool takes_caches(const FlashsciPagedParams&, int) { return true; }

  template <class Op, class Format, int kHeadDim>
  static cudaError_t launch(const FlashsciPaged8Params& p, cudaStream_t stream) {
    if constexpr (kHeadDim == 128 && Format::kBytes == 2) {
      if (p.call.head_dim == kHeadDim && p.call.head_dim_v == kHeadDim)
        return launch_tiling<Op, Format, Tiling<kHeadDim, Format::kBytes, true>>(p, stream);
    }
    return launch_tiling<Op, Format, Tiling<kHeadDim, Format::kBytes>>(p, stream);
  }
  template <class Op, class Format, class C>
  static cudaError_t launch_tiling(const FlashsciPaged8Params& p, cudaStream_t stream) {
    constexpr int kSharedBytes = sizeof(Storage<C>) + 1024;
    static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
    constexpr auto plan = plan_kernel<Op, C>;
    constexpr auto kernel = paged_kernel<Op, Format, C>;
    MappedArgs a;
    fill_args(a, p, Format::kUnit, C::kStages);
    constexpr MapElement k16Bit = Op::kIsBf16 ? kBfloat16 : kFloat16;
    cudaError_t error = fill_maps<C>(a, C::kBytes == 1 ? kByte : k16Bit);
    if (error == cudaSuccess) error = allow_shared<kernel>(kSharedBytes, p.call.device);
    if (error != cudaSuccess) return error;
    if (a.plan.count > kPlannedByEach) {
      error = start<plan>(1, kPlanThreads, 0, stream, a.p, a.plan, a.group);
      if (error != cudaSuccess) return error;
    }
    error = launch_dependent<kernel>(a.plan.ctas, kThreads, kSharedBytes, stream, a);
    if (error != cudaSuccess) return error;
    return launch_dependent<combine_kernel<Op, C>>(combining_ctas(a), kCombiningWarps * 32, 0,
                                                   stream, static_cast<const Args&>(a));
  }
};

}  // namespace flashsci::sm90::paged
