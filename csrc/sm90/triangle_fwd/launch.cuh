// The host side of the sm90 triangle attention: the calls it takes, tensor maps, units.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdint>

#include "../../core/launch.cuh"
#include "../../core/softmax.cuh"
#include "../../include/flashsci.h"
#include "../launch_dependent.cuh"
#include "../tma_map.h"
#include "config.cuh"
#include "copy_bias.cuh"
#include "kernel.cuh"

namespace flashsci::sm90::triangle_fwd {

// With fewer members, sharing does not pay.
inline constexpr int kFewestMembers = 8;

// Members whose units share a 16-bit bias, 2 or 4: units of 128 query rows, so that K and V are read
// half as often, or of 64, with the bias prepared.
inline constexpr int kMembersOf16Bits = 2;

// The batch dimension with the most members that share the bias, or -1: too few do.
inline int member_dim_of(const FlashsciForwardParams& p) {
  const FlashsciScoreStrides& bias = p.bias_mask.bias_strides;
  const int64_t first = bias.batch0 == 0 ? p.batch0 : 1, second = bias.batch1 == 0 ? p.batch1 : 1;
  return std::max(first, second) < kFewestMembers ? -1 : first > second ? 0 : 1;
}

// Calls that pass this may still have strides that TMA refuses.
inline bool suits(const FlashsciForwardParams& p) {
  const FlashsciBiasMask& given = p.bias_mask;
  return p.cu_seqlens_q == nullptr && std::max(p.head_dim, p.head_dim_v) <= 32 &&
         given.bias != nullptr && given.bias_strides.column >= 1 &&
         (given.mask == nullptr || given.mask_strides.row == 0) && p.softcap == 0.f &&
         p.window_left < 0 && p.window_right < 0 && member_dim_of(p) >= 0 &&
         // The bias is divided by it, and scores are multiplied: no finite number may overflow.
         p.scale > 1e-4f && p.scale * kLog2e <= 1.f;
}

template <class C>
int64_t units_of(const FlashsciForwardParams& p) {
  const int64_t members = member_dim_of(p) == 0 ? p.batch0 : p.batch1;
  const int64_t groups = (members + C::kMembers - 1) / C::kMembers;
  const int64_t row_tiles = (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  return p.batch0 * p.batch1 / members * p.heads_q * row_tiles * groups;
}

using TilingOfFp32 = Tiling<4, 4>;
using TilingOf16Bits = Tiling<2, kMembersOf16Bits>;

// Bytes of workspace: a copy of the bias if its keys are not neighbours; 0 also if such a call is
// left to others.
inline int64_t workspace(const FlashsciForwardParams& p) {
  const bool whole = p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0;
  if (!suits(p) || !whole || p.bias_mask.bias_strides.column == 1) return 0;
  const int64_t units =
      p.bias_mask.bias_is_fp32 ? units_of<TilingOfFp32>(p) : units_of<TilingOf16Bits>(p);
  const BiasCopy copy = plan_bias_copy(p);
  const int64_t processors = processors_of(p.device);
  const bool counted = copy.items(p.bias_mask.bias_is_fp32 ? 4 : 2) <= INT32_MAX / 2;
  return counted && units >= processors ? copy.bytes : 0;
}

// cudaErrorNotSupported: there are too few units for the device.
template <class C>
cudaError_t plan_units(Args& a, uint32_t& grid) {
  const FlashsciForwardParams& p = a.p;
  Plan& plan = a.plan;
  plan = {};
  plan.member_dim = member_dim_of(p);
  const int64_t members = plan.member_dim == 0 ? p.batch0 : p.batch1;
  const int64_t groups = (members + C::kMembers - 1) / C::kMembers;
  const int64_t row_tiles = (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  const int64_t units = units_of<C>(p);
  const int processors = processors_of(p.device);
  if (processors <= 0) return cudaErrorInvalidDevice;
  if (units < processors || units > INT32_MAX / 2) return cudaErrorNotSupported;
  grid = static_cast<uint32_t>(processors);
  plan.units = static_cast<uint32_t>(units) / grid;
  plan.rest = static_cast<uint32_t>(units) % grid;
  plan.members = static_cast<uint32_t>(members);
  plan.groups = static_cast<uint32_t>(groups);
  plan.row_tiles = static_cast<uint32_t>(row_tiles);
  plan.blocks = (p.seq_k + C::kBlockK - 1) / C::kBlockK;
  plan.resident = plan.blocks <= C::kBiasStages;
  plan.bias_factor = 1.f / p.scale;
  plan.exp_scale = p.scale * kLog2e;
  plan.bias_copied = p.bias_mask.bias_strides.column != 1;
  return cudaSuccess;
}

// An SM must be empty to change its split between shared memory and cache: for the next kernel to
// start during this one, this one must have the most shared memory, too.
template <int kBytes, int kWidth>
cudaError_t launch_copy(const FlashsciForwardParams& p, const BiasCopy& copy, uint32_t blocks,
                        cudaStream_t stream) {
  constexpr auto kernel = triangle_forward_copy_bias_kernel<kBytes, kWidth>;
  if (!rehearsing()) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  return start<kernel>(blocks, kCopyThreads, 0, stream, p.bias_mask.bias, p.workspace, copy);
}

template <class Op, class C>
cudaError_t launch_tiling(const FlashsciForwardParams& p, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<C>) + 1024;  // the base is aligned by hand
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  Args a;
  a.p = p;
  uint32_t grid;
  cudaError_t error = plan_units<C>(a, grid);
  constexpr MapElement k16Bit = Op::kIsBf16 ? kBfloat16 : kFloat16;
  const auto encode = [&](CUtensorMap* map, const void* base, const FlashsciStrides& strides,
                          int64_t rows, int64_t heads, int head_dim, int box_rows) {
    if (error == cudaSuccess)
      error = encode_map(map, base, k16Bit, head_dim,
                         dense_dims(strides, rows, heads, p.batch1, p.batch0), C::Rows::kColumns,
                         box_rows);
  };
  encode(&a.q, p.q, p.q_strides, p.seq_q, p.heads_q, p.head_dim, C::Rows::kRows);
  encode(&a.k, p.k, p.k_strides, p.seq_k, p.heads_k, p.head_dim, C::Rows::kRows);
  encode(&a.v, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v, C::Rows::kRows);
  encode(&a.out, p.out, p.out_strides, p.seq_q, p.heads_q, p.head_dim_v, C::OutRows::kRows);
  const BiasCopy copy = a.plan.bias_copied ? plan_bias_copy(p) : BiasCopy{};
  const void* bias = a.plan.bias_copied ? p.workspace : p.bias_mask.bias;
  const FlashsciScoreStrides& s = a.plan.bias_copied ? copy.to : p.bias_mask.bias_strides;
  const MapDims dims = {{p.seq_q, p.heads_q, p.batch1, p.batch0},
                        {s.row, s.head, s.batch1, s.batch0}};
  if (error == cudaSuccess)
    error = encode_map(&a.bias, bias, C::kBiasBytes == 4 ? kFloat32 : k16Bit, p.seq_k, dims,
                       C::BiasBox::kColumns, C::BiasBox::kRows);
  constexpr auto kernel = triangle_forward_kernel<Op, C>;
  if (error == cudaSuccess) error = allow_shared<kernel>(kSharedBytes, p.device);
  if (error != cudaSuccess) return error;
  if (a.plan.bias_copied) {
    const auto blocks = static_cast<uint32_t>(std::min<int64_t>(copy.items(C::kBiasBytes), grid));
    error = copy.width == 16  ? launch_copy<C::kBiasBytes, 16>(p, copy, blocks, stream)
            : copy.width == 8 ? launch_copy<C::kBiasBytes, 8>(p, copy, blocks, stream)
                              : launch_copy<C::kBiasBytes, C::kBiasBytes>(p, copy, blocks, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_dependent<kernel>(grid, C::kThreads, kSharedBytes, stream, a);
}

// cudaErrorNotSupported: another kernel must serve this call; nothing was launched.
template <class Op>
cudaError_t launch(const FlashsciForwardParams& p, cudaStream_t stream) {
  const bool copies = p.bias_mask.bias_strides.column != 1;
  if (!suits(p) || (copies && (p.workspace == nullptr || workspace(p) == 0)))
    return cudaErrorNotSupported;
  return p.bias_mask.bias_is_fp32 ? launch_tiling<Op, TilingOfFp32>(p, stream)
                                  : launch_tiling<Op, TilingOf16Bits>(p, stream);
}

}  // namespace flashsci::sm90::triangle_fwd
