// Statistics of a head's rows for the backward: one lane computes each, and all lanes read them.
#pragma once
#include "scores.cuh"
#include "staging.cuh"

namespace flashsci::sm80::small {

// Units whose loads may be early: with all of them, fp32 has too few registers.
template <class P, class S>
inline constexpr int kUnroll = sizeof(typename P::Row) == 16 ? 1 : S::kUnits;

// The row whose statistics a lane computes, which may be past the last: 8 t + g.
__device__ __forceinline__ int row_of_lane() { return threadIdx.x % 4 * 8 + threadIdx.x % 32 / 4; }

// Sums over the lanes of a quad: lane t gets the sum of x[t].
template <int kBlocks>
__device__ __forceinline__ float scattered_quad_sum(const float (&x)[kBlocks]) {
  const auto at = [&](int i) { return i < kBlocks ? x[i] : 0.f; };
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float low = (odd ? at(1) : at(0)) + __shfl_xor_sync(0xffffffffu, odd ? at(0) : at(1), 1);
  const float high = (odd ? at(3) : at(2)) + __shfl_xor_sync(0xffffffffu, odd ? at(2) : at(3), 1);
  return (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 2);
}

// lse, in powers of two, and delta of a lane's row; lse of a row without probabilities is +inf.
// Before `put`, `given` returns the lse of the forward.
struct RowStatistics {
  static constexpr bool kLate = false;
  float lse, delta;

  __device__ __forceinline__ RowStatistics(const FlashsciBackwardParams& p, const Head& place) {
    ptx::ld_row(
        lse, p.lse + static_cast<int64_t>(place.index) * p.seq_q + min(row_of_lane(), p.seq_q - 1));
  }
  __device__ __forceinline__ float given() const { return lse; }
  __device__ __forceinline__ void put(float lse_, float delta_) { lse = lse_, delta = delta_; }
  __device__ __forceinline__ void wait() const {}
  // lse and delta of rows 8 n + 2 t and 8 n + 2 t + 1.
  __device__ __forceinline__ float4 of_rows(int n) const {
    const int from = threadIdx.x % 4 * 8 + n;
    return {__shfl_sync(0xffffffffu, lse, from), __shfl_sync(0xffffffffu, delta, from),
            __shfl_sync(0xffffffffu, lse, from + 4), __shfl_sync(0xffffffffu, delta, from + 4)};
  }
};

// The same in shared memory. lse is copied with the rows: the compiler would place a load into a
// register after the wait for the rows, where nothing hides it.
template <class P, class S>
struct StagedStatistics {
  // Whether products come first, while out and lse are copied: fp32 with fewer rows would spill.
  static constexpr bool kLate = sizeof(typename P::Element) == 2 || S::kBlocks == 4;
  float2* rows;  // lse, delta

  __device__ __forceinline__ StagedStatistics(const FlashsciBackwardParams& p, const Head& place,
                                              float2* shared)
      : rows(shared) {
    const int row = threadIdx.x % 32;
    if (row < p.seq_q)
      ptx::cp_async_small<4>(ptx::shared_address(rows + row),
                             p.lse + static_cast<int64_t>(place.index) * p.seq_q + row, 4);
  }
  // For a row past the last the value is arbitrary.
  __device__ __forceinline__ float given() const { return rows[row_of_lane()].x; }
  __device__ __forceinline__ void put(float lse, float delta) {
    rows[row_of_lane()] = make_float2(lse, delta);
  }
  // Waits until other lanes have put theirs.
  __device__ __forceinline__ void wait() const { __syncwarp(); }
  __device__ __forceinline__ float4 of_rows(int n) const {
    return *reinterpret_cast<const float4*>(rows + n * 8 + threadIdx.x % 4 * 2);
  }
};

template <class P, class S, class Statistics, class Rows>
__device__ __forceinline__ void find_statistics(Statistics& of, const FlashsciBackwardParams& p,
                                                const Head& place, const Rows& dout,
                                                const Rows& out) {
  float sums[S::kBlocks] = {};  // of row g of each block
#pragma unroll(kUnroll<P, S>)
  for (int u = 0; u < S::kUnits; ++u) {
    typename P::Row x[S::kBlocks], y[S::kBlocks];
    dout.load(x, u);
    out.load(y, u);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) sums[i] += P::dot(x[i], y[i]);
  }
  float delta = scattered_quad_sum(sums);
  const int row = row_of_lane();
  if (p.dlse != nullptr)
    delta -= __ldg(p.dlse + place.offset(p.dlse_strides, place.head) +
                   min(row, p.seq_q - 1) * p.dlse_strides.row);
  const float lse = of.given();
  of.put(lse == -INFINITY || row >= p.seq_q ? INFINITY : lse_of_backward(lse), delta);
}

}  // namespace flashsci::sm80::small
