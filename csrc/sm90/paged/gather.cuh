// The end of a tile: what warps have of other keys is added up, and written.
#pragma once
#include <cstdint>

#include "../../core/softmax.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/warpgroup.cuh"
#include "part.cuh"

namespace flashsci::sm90::paged {

enum NamedBarrier { kComputing = 1 };  // 0 is __syncthreads

// lse in powers of two of a row and one more logit, and what the output is multiplied by.
__device__ __forceinline__ float2 with_logit(float lse, float logit) {
  const float top = fmaxf(lse, logit);
  if (top == -INFINITY) return make_float2(-INFINITY, 0.f);
  const float own = ptx::ex2_approx(lse - top), sum = own + ptx::ex2_approx(logit - top);
  return make_float2(top + ptx::lg2_approx(sum), own / sum);
}

// Where 4 columns of a row of the sums are: lanes that store, or load, together meet no bank twice.
template <class C>
__device__ __forceinline__ float4* sums_place(Storage<C>& shared, int warp, int row, int four) {
  return reinterpret_cast<float4*>(shared.sums[warp][row]) +
         (four ^ (four / 8 | row % 2 * (C::kColumns / 32)));
}

// A warp's sums of one box's columns.
template <class Op, class Format, class C>
__device__ __forceinline__ void leave_sums(const Part<Op, Format, C>& part, int box) {
  constexpr int kEighth = C::kColumns / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = part.g + half * 8;
    if (part.tier * kWarpRows + row >= part.rows.rows) continue;
#pragma unroll
    for (int i = 0; i < 2 * kEighth; i += 4) {
      const auto sum = [&](int j) {
        return part.o[box * kEighth + (i + j) % kEighth][half * 2 + i / kEighth];
      };
      *sums_place(part.shared, part.warp, row, (part.t * 2 * kEighth + i) / 4) =
          make_float4(sum(0), sum(1), sum(2), sum(3));
    }
  }
}

// Rows of a whole tile to out and lse, of another to the workspace.
template <class Op, class C>
__device__ __forceinline__ void write_rows(Storage<C>& shared, const Args& a, const Rows& rows,
                                           float v_scale, int box, bool whole, int64_t piece) {
  constexpr int kFours = C::kColumns / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.rows * kFours; i += kComputingThreads) {
    const int r = i / kFours, four = i % kFours, row = r % kWarpRows;
    const int column = box * C::kColumns + four * 4;
    // Others' are read, too, and do not count: no load waits for a branch.
    const auto has_row = [&](int warp) { return (warp & (rows.tiers - 1)) == r / kWarpRows; };
    float2 statistics[kWarps];
    float4 parts[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      statistics[warp] = shared.statistics[warp][row];
      parts[warp] = *sums_place(shared, warp, row, four);
    }
    float offset = kUninitializedMax, sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      if (has_row(warp)) offset = fmaxf(offset, statistics[warp].x);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (!has_row(warp)) continue;
      const float weight = ptx::ex2_approx(statistics[warp].x - offset);
      const float4 part = parts[warp];
      sum = fmaf(weight, statistics[warp].y, sum);
      x.x = fmaf(weight, part.x, x.x), x.y = fmaf(weight, part.y, x.y);
      x.z = fmaf(weight, part.z, x.z), x.w = fmaf(weight, part.w, x.w);
    }
    float factor = sum == 0.f ? 0.f : ptx::rcp_approx(sum) * v_scale;
    float lse = sum == 0.f ? -INFINITY : offset + ptx::lg2_approx(sum);
    if (whole) {
      const int token = rows.token_of(r), head = rows.head_of(r);
      if (a.p.sink != nullptr) {
        const float2 both = with_logit(lse, __ldg(a.p.sink + head) * kLog2e);
        lse = both.x, factor *= both.y;
      }
      auto* out = static_cast<uint16_t*>(a.p.out) + token * a.p.out_row + head * a.p.out_head;
      if (column < a.p.head_dim_v)
        *reinterpret_cast<uint2*>(out + column) = make_uint2(Op::pack2(x.x * factor, x.y * factor),
                                                             Op::pack2(x.z * factor, x.w * factor));
      if (column == 0 && a.p.lse != nullptr)
        a.p.lse[int64_t{head} * a.p.tokens + token] = lse * kLn2;
    } else {
      const int64_t place = piece * kRows + r;
      *reinterpret_cast<float4*>(a.plan.partial_out + place * C::kHeadDim + column) =
          make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
      if (column == 0) a.plan.partial_lse[place] = lse;
    }
  }
}

template <class Op, class Format, class C>
__device__ __forceinline__ void gather(const Part<Op, Format, C>& part, float v_scale, bool whole,
                                       int64_t piece) {
#pragma unroll
  for (int box = 0; box < C::kBoxes; ++box) {
    ptx::barrier_sync(kComputing, kComputingThreads);  // what was there has been read
    leave_sums(part, box);
    if (box == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(part.statistics.sum[half]);
        if (part.t == 0)
          part.shared.statistics[part.warp][part.g + half * 8] =
              make_float2(part.statistics.row_max_log2[half], sum);
      }
    }
    ptx::barrier_sync(kComputing, kComputingThreads);
    write_rows<Op>(part.shared, part.args, part.rows, v_scale, box, whole, piece);
  }
}

}  // namespace flashsci::sm90::paged
