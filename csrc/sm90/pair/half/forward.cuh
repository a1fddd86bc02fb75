// Forward attention in 16 bits with a bias whose heads are neighbours in memory.
//
// Maths     S = scale Q K^T + bias, P = exp(S - max), O = P V / sum P, lse = max + log sum P.
// Roles     A cluster has kRows queries of kHeads heads; CTA r of n takes blocks of keys r, r + n,
//           ... A warp has half of the queries, of the heads and of the keys of a block; one more
//           thread copies. At the end halves add up their results, and push them to the CTA that
//           has the head.
// Shared    Q; stages of K, V and bias; partial outputs: `Storage` (config.cuh).
// Pipeline  TMA runs ahead by the number of stages (pipeline.cuh).
// Limits    No single one: at 384 tokens launch, copies, arithmetic and sums take 2 us each.
#pragma once
#include <cuda_runtime.h>

#include "../../../ptx/cluster.cuh"
#include "../../../ptx/mbarrier.cuh"
#include "../../../ptx/shared.cuh"
#include "../../../ptx/warpgroup.cuh"
#include "../combine.cuh"
#include "combine.cuh"
#include "pipeline.cuh"
#include "products.cuh"

namespace flashsci::sm90::pair::half {

template <class C>
struct ForwardRows {
  static constexpr int kDim = C::kDim;
  static constexpr uint32_t kFirst = offsetof(Stage<kDim>, first);
  static constexpr uint32_t kSecond = offsetof(Stage<kDim>, second);
  static constexpr uint32_t kCells = offsetof(Stage<kDim>, cells);
  using Op = typename C::Op;
  Operand<kDim> q[kQuad];
  Sums<kDim> o = {};
  float row_max[kQuad][2], row_sum[kQuad][2] = {};

  __device__ __forceinline__ ForwardRows() {
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) row_max[i / 2][i % 2] = -INFINITY;
  }
  __device__ __forceinline__ void load(uint32_t own, const Warp& w) {
#pragma unroll
    for (int head = 0; head < kQuad; ++head)
      load_operand<kDim>(q[head], w.own_rows(own), w.quad, head);
  }
  // A block of keys.
  __device__ __forceinline__ void step(uint32_t stage, const Warp& w, const ShownColumns& shown,
                                       float scale) {
    float s[kQuad][2][4];  // the bias first, then scores, then P
    read_cells(s, stage + kCells, w);
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
      float product[2][4] = {};
      multiply_transposed<Op, kDim>(product, q[head], w.block_rows(stage + kFirst), w.quad, head);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = i / 4, e = i % 4;
        const float score = fmaf(product[n][e], scale, s[head][n][e]);
        s[head][n][e] = shown(n, e) ? score : -INFINITY;
      }
    }
    // All heads at a time: the compiler moves nothing across its branches.
    online_softmax_lazily(s, o, row_max, row_sum, kLog2e);
#pragma unroll
    for (int head = 0; head < kQuad; ++head)
      multiply<Op, kDim>(o[head], s[head], w.block_rows(stage + kSecond), w.quad, head);
  }
  // For rows g and g + 8 the largest score and this lane's sum, then o.
  __device__ __forceinline__ void pieces(Pieces<kQuad, C::kPieces>& x) const {
#pragma unroll
    for (int head = 0; head < kQuad; ++head) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[head][0][half * 2] = row_max[head][half];
        x[head][0][half * 2 + 1] = row_sum[head][half];
      }
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) x[head][1 + i / 4][i % 4] = o[head][i / 4][i % 4];
    }
  }
};

// x becomes the sum with the other half of the keys.
template <int kCount, int kPieces>
__device__ __forceinline__ void add_keys(Pieces<kCount, kPieces>& x,
                                         const Pieces<kCount, kPieces>& theirs) {
#pragma unroll
  for (int i = 0; i < kCount * 2; ++i) {
    const int head = i / 2, half = i % 2 * 2;  // half: of a piece
    float &maximum = x[head][0][half], &sum = x[head][0][half + 1];
    const float next = fmaxf(maximum, theirs[head][0][half]);
    const float own = weight_of(maximum, next), other = weight_of(theirs[head][0][half], next);
    maximum = next;
    sum = fmaf(theirs[head][0][half + 1], other, sum * own);
#pragma unroll
    for (int piece = 1; piece < kPieces; ++piece)
#pragma unroll
      for (int e = half; e < half + 2; ++e)
        x[head][piece][e] = fmaf(theirs[head][piece][e], other, x[head][piece][e] * own);
  }
}

// The factors of each CTA's output for a row, from the largest score and the sum of a lane that
// each CTA has. Returns lse.
template <class Load>
__device__ __forceinline__ float weigh(float (&weight)[kMostCtas], int size, Load&& load) {
  float2 part[kMostCtas];
#pragma unroll
  for (int r = 0; r < kMostCtas; ++r) part[r] = load(r, 0);
  float maximum = part[0].x, sum = 0.f;
#pragma unroll
  for (int r = 1; r < kMostCtas; ++r) maximum = fmaxf(maximum, part[r].x);
#pragma unroll
  for (int r = 0; r < kMostCtas; ++r) {
    weight[r] = r < size ? weight_of(part[r].x, maximum) : 0.f;
    sum = fmaf(weight[r], part[r].y, sum);
  }
  sum = quad_sum(sum);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
  for (float& x : weight) x *= inverse;
  return sum == 0.f ? -INFINITY : maximum + logf(sum);
}

template <class C>
__global__ void __launch_bounds__(kLaunched, 1)
    forward_kernel(const __grid_constant__ FlashsciForwardParams p,
                   const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  constexpr int kDim = C::kDim;
  extern __shared__ unsigned char shared_memory[];
  auto& shared = start_storage<C>(shared_memory, C::kPartBytes);
  const Exchange<C> exchange{shared};
  const Place place(blockIdx.x / exchange.size, plan.query_tiles, p.heads_q, p.batch1);
  const Blocks<C> blocks(shared, p.seq_k);
  const int first_query = place.tile * kRows;
  const uint32_t own = ptx::shared_address(&shared.own[0]);
  const uint32_t own_copied = ptx::shared_address(&shared.own_copied);
  ptx::wait_for_prerequisites();
  if (threadIdx.x >= kThreads) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    const auto issue = [&](uint32_t stage, uint32_t barrier, int key) {
      copy_block<kDim>(stage, barrier, place, maps.k, maps.v, maps.bias, key, first_query, 0);
    };
    if (copies()) {
      ptx::mbarrier_arrive_expect(own_copied, sizeof(shared.own));
      copy_rows<kDim>(own, maps.q, place, first_query, own_copied);
      blocks.start(issue);
    }
    __syncwarp();
    ptx::cluster_wait();
    if (copies()) blocks.refill([](uint32_t, int) {}, issue);
    return;
  }
  ptx::setmaxnreg_inc<kRegisters>();
  const Warp w;
  ForwardRows<C> rows;
  const ShownKeys keys(p.bias_mask, place, p.seq_k);
  ShownColumns shown(keys, blocks.first, w);
  ptx::cluster_wait();
  ptx::mbarrier_wait(own_copied, 0);
  rows.load(own, w);
  blocks.consume([&](uint32_t stage, int key) {
    const ShownColumns next(keys, key + blocks.stride, w);
    rows.step(stage, w, shown, p.scale);
    shown = next;
  });

  Pieces<kQuad, C::kPieces> x;
  Pieces<kQuad / 2, C::kPieces> ours, theirs;
  rows.pieces(x);
  exchange_halves(ours, theirs, x, blocks.stage, w);
  add_keys(ours, theirs);
  exchange.push(ours, w);
  auto* out = static_cast<uint16_t*>(p.out) + place.batch0 * p.out_strides.batch0 +
              place.batch1 * p.out_strides.batch1 + place.head * p.out_strides.head + w.lane * 2;
  float* lse = p.lse + (int64_t{place.batch} * p.heads_q + place.head) * p.seq_q + first_query;
  exchange.template for_rows<C::kPieces>(w, [&](int head, int row, auto&& load) {
    float weight[kMostCtas];
    const float of_row = weigh(weight, exchange.size, load);
    if (first_query + row >= p.seq_q) return;
    uint16_t* target = out + head * p.out_strides.head + (first_query + row) * p.out_strides.row;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int r = 0; r < kMostCtas; ++r) {
        const float2 y = load(r, 1 + d);
        if (r < exchange.size)
          sum.x = fmaf(y.x, weight[r], sum.x), sum.y = fmaf(y.y, weight[r], sum.y);
      }
      *reinterpret_cast<uint32_t*>(target + d * 8) = C::Op::pack2(sum.x, sum.y);
    }
    if (w.lane == 0) lse[head * int64_t{p.seq_q} + row] = of_row;
  });
}

}  // namespace flashsci::sm90::pair::half
