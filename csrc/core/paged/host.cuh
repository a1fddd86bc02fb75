// The host part of all generations: the workspace, refusals, arguments, and the choice of the
// kernels. It depends on sizes alone, so that a CUDA graph of a call serves any lengths and pages.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../launch.cuh"
#include "config.cuh"
#include "format.cuh"

namespace flashsci::paged {

inline int padded_dim(const FlashsciPagedParams& p) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

inline int64_t slots_of(const FlashsciPagedParams& p) {
  return int64_t{p.tokens} * (p.heads_q / p.heads_k) / kRows + p.sequences + 2;
}

// Bytes of each part of the workspace.
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

// Whether the kernels' integers hold the sizes of the call. No product here overflows, for any
// sizes. block: keys per block.
inline bool takes_sizes(const FlashsciPagedParams& p, int64_t block) {
  const int64_t keys = int64_t{p.columns} * p.page;
  if (p.head_dim > 256 || p.head_dim_v > 256 || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0 ||
      p.page % kSmallPage != 0 || keys > FLASHSCI_MAX_SEQ ||
      int64_t{p.tokens} * p.heads_q > FLASHSCI_MAX_SEQ)
    return false;
  // Units of all slots and heads at the longest lengths: the device sums them in 32 bits.
  const int64_t units = p.heads_k * ((keys + block - 1) / block + 1);
  return slots_of(p) <= INT32_MAX / 2 / units;
}

// Whether q and out have the strides and alignment that the kernels need.
inline bool takes_rows(const FlashsciPagedParams& p) {
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  const auto at_16_bytes = [](const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; };
  return at_16_bytes(p.q) && at_16_bytes(p.out) && aligned(p.tokens, p.q_row) &&
         aligned(p.heads_q, p.q_head) && aligned(p.tokens, p.out_row) &&
         aligned(p.heads_q, p.out_head);
}

// unit: that of Format. stages: number of stages of the ring.
inline void fill_args(Args& a, const FlashsciPaged8Params& given, float unit, int stages) {
  const FlashsciPagedParams& p = given.call;
  a.p = p;
  a.scores = plan_scores(p.scale, p.softcap, p.scale > 0.f);
  a.group = p.heads_q / p.heads_k;
  a.k_scale = {given.k_scale, given.k_scale_sequence, given.k_scale_head, unit};
  a.v_scale = {given.v_scale, given.v_scale_sequence, given.v_scale_head, unit};
  a.stages = stages;
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
  // An equal number of CTAs for each head, if that leaves few idle: heads then read the same rows
  // of pages at the same time.
  const int all = processors_of(p.device), rest = all % p.heads_k;
  a.plan.ctas = rest * 16 <= all ? all - rest : all;
}

// Calls launch(head dim) with the smallest head dim of the kernels that holds those of the call.
template <class Launch>
cudaError_t launch_head_dim(const FlashsciPagedParams& p, const Launch& launch) {
  switch (padded_dim(p)) {
    case 64:
      return launch(std::integral_constant<int, 64>());
    case 128:
      return launch(std::integral_constant<int, 128>());
    default:
      return launch(std::integral_constant<int, 256>());
  }
}

// CTAs of combine_kernel: one for each 16 rows of each CTA's tile.
inline int64_t combining_ctas(const Args& a) {
  const int64_t rows = std::min<int64_t>(int64_t{a.p.tokens} * a.group, kRows);
  return (rows + kWarpRows - 1) / kWarpRows * a.plan.ctas;
}

// The calls of a unit. Generation, in the launch.cuh of its folder, has
//   block_of(head dim, bytes of an element of the caches)    keys per block,
//   takes_caches(params, bytes)                              whether its copies can read K and V,
//   E4m3, E5m2                                               its formats of 8-bit floats,
//   launch<Op, Format, head dim>(params, stream)             the launch itself.
template <class Generation, class Op, class Format>
cudaError_t launch_format(const FlashsciPaged8Params& p, cudaStream_t stream) {
  if (!takes_sizes(p.call, Generation::block_of(padded_dim(p.call), Format::kBytes)) ||
      !takes_rows(p.call) || !Generation::takes_caches(p.call, Format::kBytes))
    return cudaErrorNotSupported;
  return launch_head_dim(p.call, [&](auto dim) {
    return Generation::template launch<Op, Format, decltype(dim)::value>(p, stream);
  });
}

// A cache of the dtype of the queries.
template <class Generation, class Op>
cudaError_t launch(const FlashsciPagedParams& p, cudaStream_t stream) {
  FlashsciPaged8Params call{};
  call.call = p;
  return launch_format<Generation, Op, Same>(call, stream);
}

// One of 8-bit floats.
template <class Generation, class Op>
cudaError_t launch8(const FlashsciPaged8Params& p, cudaStream_t stream) {
  return p.e5m2 ? launch_format<Generation, Op, typename Generation::E5m2>(p, stream)
                : launch_format<Generation, Op, typename Generation::E4m3>(p, stream);
}

// Bytes of the workspace. element: bytes of an element of the caches.
template <class Generation>
int64_t workspace_bytes(const FlashsciPagedParams& p, int element) {
  const int64_t block = Generation::block_of(padded_dim(p), element);
  return takes_sizes(p, block) ? Parts(p).all() : 0;
}

}  // namespace flashsci::paged
