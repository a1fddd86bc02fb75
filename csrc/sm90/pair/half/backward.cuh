// The gradients of attention in 16 bits with a bias whose heads are neighbours in memory.
//
// Maths     P = exp(scale Q K^T + bias - lse), dP = dO V^T, dS = P (dP - delta): dbias = dS,
//           dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
// Roles     Two kinds of clusters in one launch, each with kRows rows of some heads. Those of
//           queries go through blocks of keys as in forward.cuh, for dQ and dbias; those of keys
//           through blocks of queries, for dK and dV. So S and dP are computed twice, and no sums
//           are made in global memory: results are the same from run to run.
// Shared    Q and dO, or K and V; stages of the others, bias and statistics; partial sums of
//           gradients: `Storage` (config.cuh).
// Pipeline  As in forward.cuh; dS overwrites its bias, and TMA stores it from there before the next
//           block arrives.
// Limits    As in forward.cuh. D 32 leaves room for one stage.
#pragma once
#include <cuda_runtime.h>
#include <cstddef>

#include "../../../ptx/bulk.cuh"
#include "../../../ptx/cluster.cuh"
#include "../../../ptx/fence.cuh"
#include "../../../ptx/math.cuh"
#include "../../../ptx/mbarrier.cuh"
#include "../../../ptx/shared.cuh"
#include "../../../ptx/tma.cuh"
#include "../../../ptx/warpgroup.cuh"
#include "../combine.cuh"
#include "combine.cuh"
#include "pipeline.cuh"
#include "products.cuh"

namespace flashsci::sm90::pair::half {

template <class C>
struct BackwardBlock {
  static constexpr int kDim = C::kDim;
  static constexpr uint32_t kFirst = offsetof(Stage<kDim>, first);
  static constexpr uint32_t kSecond = offsetof(Stage<kDim>, second);
  static constexpr uint32_t kCells = offsetof(Stage<kDim>, cells);
  static constexpr uint32_t kStatistics = offsetof(Stage<kDim>, statistics);
  using Op = typename C::Op;
  using Scores = float[2][4];
  static constexpr int kDqPieces = kDim / 8;

  const FlashsciBackwardParams& p;
  const Plan& plan;
  const Maps& maps;
  Storage<C>& shared;
  const Place place;
  const Warp w;
  const Exchange<C> exchange{shared};
  const int first_row = place.tile * kRows;
  const ShownKeys keys{p.bias_mask, place, p.seq_k};
  const uint32_t own = ptx::shared_address(&shared.own[0]);
  const uint32_t other_own = ptx::shared_address(&shared.own[C::kOwn - 1]);
  const uint32_t own_copied = ptx::shared_address(&shared.own_copied);
  const float2* const statistics =
      plan.statistics + (int64_t{place.batch} * p.heads_q + place.head) * plan.statistics_rows;

  __device__ __forceinline__ BackwardBlock(const FlashsciBackwardParams& p, const Plan& plan,
                                           const Maps& maps, Storage<C>& shared, uint32_t cluster,
                                           uint32_t tiles)
      : p(p), plan(plan), maps(maps), shared(shared), place(cluster, tiles, p.heads_q, p.batch1) {}

  // Products of a head: the CTA's own rows with those of a stage.
  __device__ __forceinline__ void multiply_rows(Scores& c, uint32_t kept, uint32_t block,
                                                int head) const {
    Operand<kDim> rows;
    load_operand<kDim>(rows, w.own_rows(kept), w.quad, head);
    multiply_transposed<Op, kDim>(c, rows, w.block_rows(block), w.quad, head);
  }
  static __device__ __forceinline__ float probability(float s, float scale, float bias,
                                                      float negated_lse, bool shown) {
    return shown ? ptx::ex2_approx(fmaf(fmaf(s, scale, bias), kLog2e, negated_lse)) : 0.f;
  }

  // Loads the CTA's own data; called by the copying thread.
  __device__ __forceinline__ void copy_own(const CUtensorMap& first,
                                           const CUtensorMap& second) const {
    ptx::mbarrier_arrive_expect(own_copied, sizeof(shared.own));
    copy_rows<kDim>(own, first, place, first_row, own_copied);
    copy_rows<kDim>(other_own, second, place, first_row, own_copied);
  }
  // The copying thread for a tile of queries.
  __device__ __forceinline__ void copy_queries(const Blocks<C>& blocks) const {
    const auto issue = [&](uint32_t stage, uint32_t barrier, int key) {
      copy_block<kDim>(stage, barrier, place, maps.k, maps.v, maps.bias, key, first_row, 0);
    };
    copy_own(maps.q, maps.dout);
    blocks.start(issue);
    blocks.refill(
        [&](uint32_t stage, int key) {
          if (p.dbias == nullptr) return;
#pragma unroll
          for (int i = 0; i < kRows / kBoxPairs; ++i)
            ptx::tma_store_5d(&maps.dbias, stage + kCells + i * kRows * kBoxPairs * kCellBytes,
                              place.head, key + i * kBoxPairs, first_row, place.batch1,
                              place.batch0);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        },
        issue);
  }
  // dQ and dbias of a tile of queries.
  __device__ __forceinline__ void run_queries(const Blocks<C>& blocks) const {
    float2 of_row[kQuad][2];
    bool large = false;
#pragma unroll
    for (int i = 0; i < kQuad * 2; ++i) {
      const int row = first_row + w.row + i % 2 * 8 + w.group;
      of_row[i / 2][i % 2] = row < p.seq_q
                                 ? statistics[(w.quad + i / 2) * plan.statistics_rows + row]
                                 : make_float2(-INFINITY, 0.f);
      large |= is_large(of_row[i / 2][i % 2].x);
    }
    large = __any_sync(0xffffffffu, large);
    Sums<kDim> dq = {};
    ShownColumns shown(keys, blocks.first, w);
    ptx::mbarrier_wait(own_copied, 0);
    blocks.consume([&](uint32_t stage, int key) {
      const ShownColumns next(keys, key + blocks.stride, w);
      float s[kQuad][2][4];  // the bias first, then P, then dS
      read_cells(s, stage + kCells, w);
#pragma unroll
      for (int head = 0; head < kQuad; ++head) {
        Scores product = {};
        multiply_rows(product, own, stage + kFirst, head);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int n = i / 4, e = i % 4;
          s[head][n][e] = probability(product[n][e], p.scale, s[head][n][e], of_row[head][e / 2].x,
                                      shown(n, e));
        }
      }
      if (large) limit_probabilities(s);
#pragma unroll
      for (int head = 0; head < kQuad; ++head) {
        Scores dp = {};
        multiply_rows(dp, other_own, stage + kSecond, head);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          s[head][i / 4][i % 4] *= dp[i / 4][i % 4] + of_row[head][i % 4 / 2].y;
        multiply<Op, kDim>(dq[head], s[head], w.block_rows(stage + kFirst), w.quad, head);
      }
      if (p.dbias != nullptr) {  // from the place of the bias
        write_cells(s, stage + kCells, w);
        ptx::fence_proxy_async();
      }
      shown = next;
    });
    if (p.dq == nullptr) return;
    Pieces<kQuad, kDqPieces> x;
    put(x, dq, 0);
    add_up(blocks.stage + kFirst, x);  // in memory that dS does not use
    exchange.template for_rows<kDqPieces>(w, [&](int head, int row, auto&& load) {
      write(p.dq, p.dq_strides, p.seq_q, p.scale, head, row, 0, load);
    });
  }

  // The copying thread for a tile of keys.
  __device__ __forceinline__ void copy_keys(const Blocks<C>& blocks) const {
    const auto issue = [&](uint32_t stage, uint32_t barrier, int query) {
      copy_block<kDim>(stage, barrier, place, maps.q, maps.dout, maps.bias_of_keys, query,
                       first_row, sizeof(Stage<kDim>::statistics));
#pragma unroll
      for (int head = 0; head < kHeads; ++head)
        ptx::bulk_load(stage + kStatistics + head * kRows * 8,
                       statistics + head * plan.statistics_rows + query, kRows * 8, barrier);
    };
    ptx::fence_proxy_async_global();  // statistics are read by copies
    copy_own(maps.k, maps.v);
    blocks.start(issue);
    blocks.refill([](uint32_t, int) {}, issue);
  }
  // dK and dV of a tile of keys.
  __device__ __forceinline__ void run_keys(const Blocks<C>& blocks) const {
    const uint8_t shown[2] = {keys(first_row + w.row + w.group),
                              keys(first_row + w.row + w.group + 8)};
    Sums<kDim> dk = {}, dv = {};
    ptx::mbarrier_wait(own_copied, 0);
    blocks.consume([&](uint32_t stage, int) {
      float s[kQuad][2][4], negated_delta[kQuad][2][2];  // the bias first, then P, then dS
      read_cells(s, stage + kCells, w);
      const uint32_t dout = stage + kSecond;
      bool large = false;
#pragma unroll
      for (int head = 0; head < kQuad; ++head) {
        Scores product = {};
        multiply_rows(product, own, stage + kFirst, head);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = i / 2, column = (w.quad + head) * kRows + w.column(n, i % 2);
          const float2 x = ptx::ld_shared_f2(stage + kStatistics +
                                             column * static_cast<uint32_t>(sizeof(float2)));
          negated_delta[head][n][i % 2] = x.y;
          large |= is_large(x.x);
#pragma unroll
          for (int e = i % 2; e < 4; e += 2)
            s[head][n][e] =
                probability(product[n][e], p.scale, s[head][n][e], x.x, shown[e / 2] != 0);
        }
      }
      if (__any_sync(0xffffffffu, large)) limit_probabilities(s);
#pragma unroll
      for (int head = 0; head < kQuad; ++head) {
        multiply<Op, kDim>(dv[head], s[head], w.block_rows(dout), w.quad, head);
        Scores dp = {};
        multiply_rows(dp, other_own, dout, head);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          s[head][i / 4][i % 4] *= dp[i / 4][i % 4] + negated_delta[head][i / 4][i % 2];
        multiply<Op, kDim>(dk[head], s[head], w.block_rows(stage + kFirst), w.quad, head);
      }
    });
    Pieces<kQuad, C::kPieces> x;
    put(x, dk, 0);
    put(x, dv, kDqPieces);
    add_up(blocks.stage, x);
    exchange.template for_rows<C::kPieces>(w, [&](int head, int row, auto&& load) {
      write(p.dk, p.dk_strides, p.seq_k, p.scale, head, row, 0, load);
      write(p.dv, p.dv_strides, p.seq_k, 1.f, head, row, kDqPieces, load);
    });
  }

 private:
  template <int kPieces>
  static __device__ __forceinline__ void put(Pieces<kQuad, kPieces>& x, const Sums<kDim>& sums,
                                             int first) {
#pragma unroll
    for (int head = 0; head < kQuad; ++head)
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) x[head][first + i / 4][i % 4] = sums[head][i / 4][i % 4];
  }
  // Through the memory of stages.
  template <int kPieces>
  __device__ __forceinline__ void add_up(uint32_t memory, const Pieces<kQuad, kPieces>& x) const {
    Pieces<kQuad / 2, kPieces> ours, theirs;
    exchange_halves(ours, theirs, x, memory, w);
#pragma unroll
    for (int i = 0; i < kQuad / 2 * kPieces * 4; ++i) {
      const int head = i / (4 * kPieces), piece = i / 4 % kPieces;
      ours[head][piece][i % 4] += theirs[head][piece][i % 4];
    }
    exchange.push(ours, w);
  }
  // Writes a row of a gradient: factor times the sums of pieces from `first` on.
  template <class Load>
  __device__ __forceinline__ void write(void* data, const FlashsciStrides& strides, int end,
                                        float factor, int head, int row, int first,
                                        Load&& load) const {
    if (data == nullptr || first_row + row >= end) return;
    auto* target = static_cast<uint16_t*>(data) + place.batch0 * strides.batch0 +
                   place.batch1 * strides.batch1 + (place.head + head) * strides.head +
                   (first_row + row) * strides.row + w.lane * 2;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int r = 0; r < kMostCtas; ++r) {
        const float2 y = load(r, first + d);
        if (r < exchange.size) sum.x += y.x, sum.y += y.y;
      }
      *reinterpret_cast<uint32_t*>(target + d * 8) = Op::pack2(sum.x * factor, sum.y * factor);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(kLaunched, 1)
    backward_kernel(const __grid_constant__ FlashsciBackwardParams p,
                    const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
  extern __shared__ unsigned char shared_memory[];
  const uint32_t cluster = blockIdx.x / ptx::cluster_size();
  const bool queries = cluster < plan.query_clusters;
  auto& shared = start_storage<C>(shared_memory, queries ? C::kPartBytes / 2 : C::kPartBytes);
  const BackwardBlock<C> work(p, plan, maps, shared,
                              queries ? cluster : cluster - plan.query_clusters,
                              queries ? plan.query_tiles : plan.key_tiles);
  const Blocks<C> blocks(shared, queries ? p.seq_k : p.seq_q);
  ptx::cluster_wait();
  ptx::wait_for_prerequisites();
  if (threadIdx.x >= kThreads) {
    ptx::setmaxnreg_dec<kCopyRegisters>();
    if (!copies()) return;
    if (queries)
      work.copy_queries(blocks);
    else
      work.copy_keys(blocks);
    return;
  }
  ptx::setmaxnreg_inc<kRegisters>();
  if (queries)
    work.run_queries(blocks);
  else
    work.run_keys(blocks);
}

}  // namespace flashsci::sm90::pair::half
