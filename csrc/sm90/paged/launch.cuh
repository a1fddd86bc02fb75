// The host side of paged attention: workspace and launches, from sizes alone, so that a CUDA graph
// of a call serves any lengths and pages.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "../../core/launch.cuh"
#include "../launch_beside.cuh"
#include "../tma_map.h"
#include "combine.cuh"
#include "config.cuh"
#include "kernel.cuh"
#include "plan.cuh"

namespace flashsci::sm90::paged {

inline int padded_dim(const FlashsciPagedParams& p) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

inline int64_t slots_of(const FlashsciPagedParams& p) {
  return int64_t{p.tokens} * (p.heads_q / p.heads_k) / kRows + p.sequences + 2;
}

// Bytes of the parts of the workspace.
struct Parts {
  int64_t slots, first, cuts, out, lse;
  explicit Parts(const FlashsciPagedParams& p) {
    const auto whole = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    const int64_t ctas = processors_of(p.device), rows = ctas * 2 * kRows;
    slots = whole(slots_of(p) * static_cast<int64_t>(sizeof(Slot)));
    first = whole((slots_of(p) + 1) * 4);
    cuts = whole(ctas * static_cast<int64_t>(sizeof(Cut)));
    out = whole(rows * padded_dim(p) * 4);
    lse = whole(rows * 4);
  }
  int64_t all() const { return slots + first + cuts + out + lse; }
};

// Whether the kernels count that far. No product here overflows, whatever the sizes are.
// bytes: of an element of the caches.
inline bool takes_sizes(const FlashsciPagedParams& p, int bytes) {
  const int64_t keys = int64_t{p.columns} * p.page;
  if (p.head_dim > 256 || p.head_dim_v > 256 || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0 ||
      p.page % kSmallPage != 0 || keys > FLASHSCI_MAX_SEQ ||
      int64_t{p.tokens} * p.heads_q > FLASHSCI_MAX_SEQ)
    return false;
  // Units of all slots and heads at the longest lengths: the device's sums of them are of 32 bits.
  const int64_t block = block_of(padded_dim(p), bytes);
  const int64_t units = p.heads_k * ((keys + block - 1) / block + 1);
  return slots_of(p) <= INT32_MAX / 2 / units;
}

inline int64_t workspace_of(const FlashsciPagedParams& p, int bytes) {
  return takes_sizes(p, bytes) ? Parts(p).all() : 0;
}

// Whether q and out lie as the kernels take them.
inline bool takes_rows(const FlashsciPagedParams& p) {
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  const auto at_16_bytes = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  return at_16_bytes(p.q) && at_16_bytes(p.out) && aligned(p.tokens, p.q_row) &&
         aligned(p.heads_q, p.q_head) && aligned(p.tokens, p.out_row) &&
         aligned(p.heads_q, p.out_head);
}

// element: of the caches.
template <class C>
cudaError_t fill_args(Args& a, const FlashsciPagedParams& p, const MapElement& element) {
  a.p = p;
  a.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f);
  a.group = p.heads_q / p.heads_k;
  a.box_rows = std::gcd(p.page, C::kBlockK);
  const Parts parts(p);
  auto* workspace = static_cast<unsigned char*>(p.workspace);
  const auto take = [&](auto*& part, int64_t bytes) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(workspace);
    workspace += bytes;
  };
  take(a.plan.slots, parts.slots);
  take(a.plan.first, parts.first);
  take(a.plan.cuts, parts.cuts);
  take(a.plan.partial_out, parts.out);
  take(a.plan.partial_lse, parts.lse);
  a.plan.count = static_cast<int>(slots_of(p));
  // Equally many for each head, if that leaves few idle: heads then read the same rows of pages
  // at the same time.
  const int all = processors_of(p.device), rest = all % p.heads_k;
  a.plan.ctas = rest * 16 <= all ? all - rest : all;
  const auto map = [&](CUtensorMap* to, const void* cache, int columns, int64_t row, int64_t head,
                       int64_t page) {
    return encode_map(to, cache, element, columns,
                      {{p.page, p.heads_k, p.pages, 1}, {row, head, page, 0}},
                      C::CacheBox::kColumns, a.box_rows);
  };
  cudaError_t error = map(&a.k, p.k_cache, p.head_dim, p.k_row, p.k_head, p.k_page);
  if (error == cudaSuccess) error = map(&a.v, p.v_cache, p.head_dim_v, p.v_row, p.v_head, p.v_page);
  return error;
}

template <class Op, class Format, int kHeadDim>
cudaError_t launch_padded(const FlashsciPaged8Params& p, cudaStream_t stream) {
  using C = Tiling<kHeadDim, Format::kBytes>;
  constexpr int kSharedBytes = sizeof(Storage<C>) + 1024;
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  constexpr auto plan = plan_kernel<Op, C::kBlockK>;
  constexpr auto kernel = paged_kernel<Op, Format, C>;
  Args a;
  cudaError_t error = fill_args<C>(a, p.call,
                                   C::kBytes == 1 ? kByte
                                   : Op::kIsBf16  ? kBfloat16
                                                  : kFloat16);
  if (error == cudaSuccess) error = allow_shared<kernel>(kSharedBytes, p.call.device);
  if (error != cudaSuccess) return error;
  a.k_scale = {p.k_scale, p.k_scale_sequence, p.k_scale_head};
  a.v_scale = {p.v_scale, p.v_scale_sequence, p.v_scale_head};
  if (a.plan.count > kPlannedByEach) {
    plan<<<1, kPlanThreads, 0, stream>>>(a.p, a.plan, a.group);
    error = cudaGetLastError();
    if (error == cudaSuccess)
      error = launch_beside(kernel, a.plan.ctas, C::kThreads, kSharedBytes, stream, a);
  } else {
    kernel<<<a.plan.ctas, C::kThreads, kSharedBytes, stream>>>(a);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return error;
  // 16 rows of a tile for a CTA of each.
  const int64_t rows = std::min<int64_t>(int64_t{a.p.tokens} * a.group, kRows);
  const int64_t ctas = (rows + kWarpRows - 1) / kWarpRows * a.plan.ctas;
  return launch_beside(combine_kernel<Op, C>, ctas, kCombiningWarps * 32, 0, stream, a);
}

template <class Op, class Format>
cudaError_t launch_format(const FlashsciPaged8Params& p, cudaStream_t stream) {
  if (!takes_sizes(p.call, Format::kBytes) || !takes_rows(p.call)) return cudaErrorNotSupported;
  switch (padded_dim(p.call)) {
    case 64:
      return launch_padded<Op, Format, 64>(p, stream);
    case 128:
      return launch_padded<Op, Format, 128>(p, stream);
    default:
      return launch_padded<Op, Format, 256>(p, stream);
  }
}

// A cache of the dtype of the queries.
template <class Op>
cudaError_t launch(const FlashsciPagedParams& p, cudaStream_t stream) {
  FlashsciPaged8Params call{};
  call.call = p;
  return launch_format<Op, Same>(call, stream);
}

// One of 8-bit floats.
template <class Op>
cudaError_t launch8(const FlashsciPaged8Params& p, cudaStream_t stream) {
  return p.e5m2 ? launch_format<Op, E5m2>(p, stream) : launch_format<Op, E4m3>(p, stream);
}

}  // namespace flashsci::sm90::paged
