// Gradients of attention of short sequences: each warp has a whole head, and computes it in one
// pass.
//
// Maths     S^T = scale K Q^T (+ bias, masked), P = exp(S - lse), delta = sum_d dO O - dlse,
//           dS = P (dO V^T - delta), dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K; dbias = dS;
//           with key weights P = w exp(S - lse), dw = sum exp(S - lse) (dO V^T - delta)
// Roles     The warps of a block have neighbouring heads; if heads share a bias of keys, a block
//           has all heads of a batch member, and its warps' sums are added up in their order
// Shared    Those sums; kStaged: all operands and statistics, and gradients of rows of 32 bytes
//           (staging.cuh)
// Pipeline  None: other warps compute while one waits for its rows
// Limits    Memory; in fp32 three products of parts take half as long
#pragma once
#include <type_traits>

#include "statistics.cuh"

namespace flashsci::sm80::small {

// The destination of dS; with key weights, of the terms of their gradient.
enum DbiasForm {
  kNoDbias,
  kDbiasOfPairs,  // an element for each pair
  kDbiasOfKeys,   // sums over queries
  kDbiasOfHeads,  // sums over queries, and over the heads of a batch member
};

// The weights of a lane's keys, 8 i + g, and bounds of e^(S - lse): 1 / w. For a weight of zero the
// bound is kLargest, and 1 in a row whose lse is too large to bound it. Without weights, e^(S -
// lse) has no bound and the struct is unused.
template <class P, int kBlocks>
struct KeyWeights {
  static constexpr float kLargest = 1e38f, kHuge = 16777216.f;
  float weight[P::kWeighted ? kBlocks : 1], most[P::kWeighted ? kBlocks : 1];

  __device__ __forceinline__ KeyWeights(const FlashsciBackwardParams& p, const Head& place,
                                        const LaneRows& keys) {
    if constexpr (P::kWeighted) {
      const FlashsciScoreStrides& strides = p.bias_mask.bias_strides;
      const float* head =
          static_cast<const float*>(p.bias_mask.bias) + place.offset(strides, place.head);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        weight[i] = keys.has(i) ? counted(__ldg(head + keys.clamped(i) * strides.column)) : 0.f;
        most[i] = fminf(1.f / weight[i], kLargest);
      }
    }
  }
  __device__ __forceinline__ float limit(float x, int i, float lse) const {
    return fminf(x, weight[i] == 0.f && fabsf(lse) >= kHuge ? 1.f : most[i]);
  }
};

template <class P>
__device__ __forceinline__ void store_dbias(const FlashsciBackwardParams& p, const Head& place,
                                            uint32_t head, int query, int key, float x) {
  const FlashsciScoreStrides& strides = p.dbias_strides;
  const int64_t at = place.offset(strides, head) + query * strides.row + key * strides.column;
  if (sizeof(typename P::Element) == 4 || p.bias_mask.bias_is_fp32)
    static_cast<float*>(p.dbias)[at] = x;
  else
    static_cast<uint16_t*>(p.dbias)[at] = static_cast<uint16_t>(P::Op::pack2(x, 0.f));
}

// Whether operands stay in registers from the first product to the last, if they are few. Others
// are read once more, from the first-level cache or shared memory.
template <class P, class S, bool kStaged>
inline constexpr bool kKeeps = [] {
  constexpr int kBytes = sizeof(typename P::Row) * S::kBlocks * S::kUnits;  // per matrix and lane
  return sizeof(typename P::Element) == 2 ? kBytes <= 64 && (!kStaged || kBytes == 64)
                                          : kBytes <= 48 && !kStaged;
}();

template <class P, class S, bool kStaged, class Rows>
__device__ __forceinline__ auto kept(const Rows& rows) {
  if constexpr (kKeeps<P, S, kStaged>)
    return HeldRows<P, S>(rows);
  else
    return rows;
}

// All gradients of a head. `sums`: this lane's part of the gradients of the bias or weight of keys
// 8 i + g.
// rows_of(matrix, tensor, rows, columns): HeadRows, StagedRows or HeldRows.
// results()(matrix, tensor, rows, columns): HeadRows or StagedRows.
// wait(kBehind): waits for all operands up to the kBehind last in this order: k, q; v, dout; out, lse.
template <class P, class S, class Statistics, class RowsOf, class Results, class Wait>
__device__ __forceinline__ void differentiate(const FlashsciBackwardParams& p, int dbias,
                                              const HeadPlan& plan, const Head& place,
                                              Statistics& statistics, float (&sums)[S::kBlocks],
                                              RowsOf&& rows_of, Results&& results, Wait&& wait) {
  constexpr int kBlocks = S::kBlocks;
  const LaneRows queries(p.seq_q), keys(p.seq_k);
  const auto q = rows_of(kQ, p.q, queries, p.head_dim);
  const auto k = rows_of(kK, p.k, keys, p.head_dim);
  const auto v = rows_of(kV, p.v, keys, p.head_dim_v);
  const auto dout = rows_of(kDout, p.dout, queries, p.head_dim_v);

  Scores<kBlocks> s, ds;
  {
    const auto nothing = [] {};
    const auto find = [&] {
      find_statistics<P, S>(statistics, p, place, dout,
                            rows_of(kOut, p.out, queries, p.head_dim_v));
    };
    if constexpr (!Statistics::kLate) find();
    wait(std::integral_constant<int, 2>{});
    multiply_heads<P, S, kUnroll<P, S>>(s, k, q, nothing);
    wait(std::integral_constant<int, 1>{});
    multiply_heads<P, S, kUnroll<P, S>>(ds, v, dout, nothing);
    wait(std::integral_constant<int, 0>{});
    if constexpr (Statistics::kLate) find();
    statistics.wait();
    const float unit = finish_scores<P, true>(s, p, place, plan.plain) * kLog2e;
    const KeyWeights<P, kBlocks> weights(p, place, keys);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) sums[i] = 0.f;
    // Computes P and dS for one block of keys and one of queries; `of` has lse and delta of two
    // queries.
    const auto finish = [&](int block, int n, const float4& of) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float &x = s[block / 2][n][block % 2 * 2 + e], &y = ds[block / 2][n][block % 2 * 2 + e];
        const float lse = e == 0 ? of.x : of.z, dp = y - (e == 0 ? of.y : of.w);
        const auto times = [dp](float z) {
          return z == 0.f ? 0.f : z * dp;
        };  // hidden keys may hold anything
        x = ptx::ex2_approx(fmaf(x, unit, -lse));
        if constexpr (P::kWeighted) {
          x = weights.limit(x, block, lse);
          sums[block] += times(x);
          x *= weights.weight[block];
        } else {
          x = fminf(x, 1.f);
        }
        y = times(x);
      }
    };
    // The compiler keeps this order; fewer registers spill than with the opposite one.
    if constexpr (sizeof(typename P::Element) == 2) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const float4 of = statistics.of_rows(n);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) finish(block, n, of);
      }
    } else {
      float4 of[kBlocks];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) of[n] = statistics.of_rows(n);
#pragma unroll
      for (int i = 0; i < kBlocks * kBlocks; ++i) finish(i / kBlocks, i % kBlocks, of[i % kBlocks]);
    }
  }
  if (dbias == kDbiasOfPairs)
    visit<true>(ds, [&](float x, int query, int key) {
      if (key < p.seq_k && query < p.seq_q) store_dbias<P>(p, place, place.head, query, key, x);
    });
  if (!P::kWeighted && (dbias == kDbiasOfKeys || dbias == kDbiasOfHeads))
#pragma unroll
    for (int i = 0; i < kBlocks * kBlocks * 2; ++i) {
      const int block = i / (kBlocks * 2);
      sums[block] += ds[block / 2][i / 2 % kBlocks][block % 2 * 2 + i % 2];
    }

  const auto result_of = results();
  // C = A B, times a factor, if it is wanted.
  const auto multiply = [&](const auto& left, const auto& b, Matrix matrix, void* data,
                            const LaneRows& rows, int columns, float factor) {
    if (data == nullptr) return;
    const auto result = result_of(matrix, data, rows, columns);
#pragma unroll(kUnroll<P, S>)
    for (int u = 0; u < S::kUnits; ++u) {
      typename P::Row x[kBlocks];
      b.load(x, u);
      typename P::Sum sum[S::kTiles][2];
      P::template multiply<kBlocks>(sum, left, x);
      result.store(sum, u, [&](int) { return factor; });
    }
  };
  using Left = typename P::template Left<kBlocks>;
  Left left(ds);
  multiply(Left(s), dout, kDv, p.dv, keys, p.head_dim_v, 1.f);
  multiply(left, q, kDk, p.dk, keys, p.head_dim, p.scale);
  left.transpose();
  multiply(left, k, kDq, p.dq, queries, p.head_dim, p.scale);
}

// kRoom: for tensors with equal strides, the number of heads that fit a block's shared memory
// (staging.cuh).
template <class P, class S, bool kStaged, int kRoom>
__global__ void __launch_bounds__(P::backward_threads(S::kBlocks, S::kUnits, kStaged).of_block,
                                  P::backward_threads(S::kBlocks, S::kUnits, kStaged).blocks)
    small_backward_kernel(const __grid_constant__ FlashsciBackwardParams p,
                          const __grid_constant__ HeadPlan plan, int dbias) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t first = blockIdx.x * warps;
  if (!kStaged && first + warp >= plan.count)
    return;  // blocks whose warps meet have whole batch members and never return here
  const Head first_head(plan, kStaged ? first : first + warp);
  const Head place = kStaged ? first_head.next(warp) : first_head;
  float sums[S::kBlocks];
  if constexpr (kStaged) {
    constexpr bool kSameStrides = kRoom > 0;
    // Whether products begin as soon as their operands arrive: for many rows, which are read from
    // shared memory during the products.
    constexpr bool kInParts = S::kBlocks == 4 && S::kUnits == 1;
    const Stage<P, S, kOfBackward, kRoom> stage(plan, first_head);
    auto at = stage.offsets(kK);
    stage.fetch(at, kK, p.k, p.seq_k);
    stage.template fetch_next<kSameStrides>(at, kQ, p.q, p.seq_q);
    if constexpr (kInParts) ptx::cp_async_commit();
    stage.template fetch_next<kSameStrides>(at, kV, p.v, p.seq_k);
    at = stage.offsets(kDout);
    stage.fetch(at, kDout, p.dout, p.seq_q);
    if constexpr (kInParts) ptx::cp_async_commit();
    stage.template fetch_next<kSameStrides>(at, kOut, p.out, p.seq_q);
    StagedStatistics<P, S> statistics(p, place, stage.statistics());
    ptx::cp_async_commit();
    if constexpr (!kInParts) stage.template wait<0>();
    differentiate<P, S>(
        p, dbias, plan, place, statistics, sums,
        [&](Matrix matrix, const void*, const LaneRows& rows, int) {
          return kept<P, S, kStaged>(stage.rows_of(matrix, rows));
        },
        [&] {
          // Computed once for gradients with equal strides.
          const int64_t shared = kSameStrides && !kStagesResults<P, S, kOfBackward>
                                     ? place.offset(plan.of[kDv], place.head)
                                     : 0;
          return [&, shared](Matrix matrix, void* tensor, const LaneRows& rows, int columns) {
            if constexpr (kStagesResults<P, S, kOfBackward>) {
              return stage.rows_of(place_of(matrix), rows);
            } else {
              const Steps& steps = plan.of[matrix];
              const int64_t offset = kSameStrides ? shared : place.offset(steps, place.head);
              return HeadRows<P, S>(tensor, offset, steps, rows, columns);
            }
          };
        },
        [&](auto behind) {
          if constexpr (kInParts) stage.template wait<decltype(behind)::value>();
        });
    if constexpr (kStagesResults<P, S, kOfBackward>) {
      __syncthreads();
      at = stage.offsets(kDv);
      stage.release(at, kDv, p.dv, p.seq_k);
      stage.template release_next<kSameStrides>(at, kDk, p.dk, p.seq_k);
      stage.template release_next<kSameStrides>(at, kDq, p.dq, p.seq_q);
    }
  } else {
    const auto head_rows = [&](Matrix matrix, const void* tensor, const LaneRows& rows,
                               int columns) {
      return HeadRows<P, S>(tensor, plan.of[matrix], place, place.head, rows, columns);
    };
    RowStatistics statistics(p, place);
    differentiate<P, S>(
        p, dbias, plan, place, statistics, sums,
        [&](Matrix matrix, const void* tensor, const LaneRows& rows, int columns) {
          return kept<P, S, kStaged>(head_rows(matrix, tensor, rows, columns));
        },
        [&] { return head_rows; }, [](auto) {});
  }
  if (dbias != kDbiasOfKeys && dbias != kDbiasOfHeads) return;
  __shared__ float sums_of_warps[kMostWarps][kMostRows];
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
    const int key = i * 8 + threadIdx.x % 32 / 4;
    const float x = quad_sum(sums[i]);
    if (threadIdx.x % 4 != 0) continue;
    if (dbias == kDbiasOfHeads)
      sums_of_warps[warp][key] = x;
    else if (key < p.seq_k)
      store_dbias<P>(p, place, place.head, 0, key, x);
  }
  if (dbias != kDbiasOfHeads) return;
  __syncthreads();
  const int key = threadIdx.x;
  if (key >= p.seq_k) return;
  float x = 0.f;
  for (int w = 0; w < warps; ++w) x += sums_of_warps[w][key];
  store_dbias<P>(p, place, 0, 0, key, x);
}

}  // namespace flashsci::sm80::small
