// Forward attention for Hopper: TMA, WGMMA, warp specialisation.
//
// Maths     o_i = sum_j p_ij v_j / l_i, p_ij = exp(s_ij - m_i), l_i = sum_j p_ij, lse_i = m_i + log l_i,
//           s = scale q k^T or softcap tanh(scale q k^T / softcap), over the keys the window shows.
// Roles     Persistent CTAs, one per SM, walk a static list of query tiles (schedule.cuh). Warpgroup 0 loads: its
//           warp 0 K and V, warp 1 Q. Warpgroups 1 .. kConsumers own 64 query rows each, from S to the stores.
// Shared    Q [consumer][64 columns][64 rows], K and V [stage][64 columns][kBlockK rows], 128-byte swizzled boxes,
//           and their barriers: `SharedStorage`. The output needs none: quads transpose it with shuffles.
// Pipeline  Of consumer w, right to left: S_n = Q K_n^T and O += P_n+1 V_n+1 are issued together; softmax of S_n
//           runs while the second flies; the consumers take turns at issuing (named barriers), so that one's
//           softmax hides behind the products of the others. The producers run ahead across tiles.
// Limits    Tensor cores and power at D 256 and 128, instruction issue beside them at D 64:
//           docs/kernels/sm90_forward.md.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "../common/ptx/cp_async.cuh"
#include "../common/ptx/math.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/shared.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/warpgroup.cuh"
#include "../common/ptx/wgmma.cuh"
#include "../common/sequence.cuh"
#include "../common/softmax.cuh"
#include "../common/window.cuh"
#include "../include/flashsci.h"
#include "schedule.cuh"
#include "tensor_map.h"

namespace flashsci::sm90 {

template <int kHeadDim_, int kBlockK_, int kConsumers_, int kStages_>
struct Tiling {
  static constexpr int kHeadDim = kHeadDim_, kBlockK = kBlockK_, kConsumers = kConsumers_;
  static constexpr int kStages = kStages_;
  static constexpr int kQStages = kHeadDim <= 128 ? 2 : 1;      // shared memory of an SM
  static constexpr int kBlockQ = 64 * kConsumers;
#ifdef X_SUMMMA
  static constexpr bool kSumByMma = kHeadDim == X_SUMMMA;
#else
  static constexpr bool kSumByMma = false;
#endif
  static constexpr int kOutColumns = kHeadDim + (kSumByMma ? 8 : 0);
  static constexpr int kOnesBytes = kSumByMma ? kBlockK * 128 : 0;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kColumnBlocks = kHeadDim / 64;           // boxes side by side
  static constexpr int kQBytes = 64 * kHeadDim * 2;             // of one consumer
  static constexpr int kKVBytes = kBlockK * kHeadDim * 2;       // of one stage of K or V
  // The registers of the launch bounds (168 at 384 threads, 128 at 512) redistributed.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kHeadDim % 64 == 0 && kBlockK % 16 == 0 && (kStages & (kStages - 1)) == 0);
};

template <class C>
struct SharedStorage {
  unsigned char q[C::kQStages][C::kConsumers][C::kQBytes];  // [..][column block][64 rows][64]
  unsigned char k[C::kStages][C::kKVBytes];    // [stage][column block][kBlockK rows][64]
  unsigned char v[C::kStages][C::kKVBytes];    // the same
  unsigned char ones[C::kOnesBytes];           // [kBlockK rows][64] of 1.0
  uint64_t q_full[C::kQStages][C::kConsumers], q_empty[C::kQStages][C::kConsumers];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
};

enum ScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

struct alignas(128) ForwardArgs {
  CUtensorMap q, k, v;
  FlashsciForwardParams p;
  SchedulePlan schedule;
  int take_turns;      // consumers issue their products in turn
  int score_mode;      // how raw q.k becomes what is exponentiated: ScoreMode
  float score_inner;   // kLinear: s *= inner; kSoftcap: s = outer * tanh(inner * s)
  float score_outer;
  float exp_scale;     // log2(e) times what is left to multiply by
  float lse_scale;     // from the units of the running maximum to natural log
};

// Rescale the accumulators only when the maximum grew by more than 2^8: exact, since numerator and
// denominator share the stale maximum; P stays below 2^8, far inside fp16.
inline constexpr float kRescaleThreshold = 8.f;

// Walks the CTA's list: `for (Walk walk(plan); walk.next(); )`.
struct Walk {
  uint32_t unit, half;
  __device__ __forceinline__ Walk() : unit(blockIdx.x), half(0) {}
  __device__ __forceinline__ void advance(const SchedulePlan& plan) {
    if (plan.pairs != 0 && half == 0) {
      half = 1;
    } else {
      half = 0;
      unit += gridDim.x;
    }
  }
};

// Key blocks [first, end) that some of the rows [row, row + count) see.
template <class C>
struct Blocks {
  int first, end;
  int end_key;  // the first key that none of the rows sees
  __device__ __forceinline__ Blocks(const Window& window, int row, int count, int seq_q) {
    const int last_row = min(row + count, seq_q) - 1;
    const int begin_key = window.begin(row);
    end_key = window.end(last_row);
    first = begin_key / C::kBlockK;
    end = begin_key < end_key && row <= last_row ? (end_key + C::kBlockK - 1) / C::kBlockK : first;
  }
};

// ---- producers -----------------------------------------------------------------------------------------------

// Index of a (batch, head) along the dims of a dense tensor.
struct HeadIndex {
  int head, batch1, batch0;
  __device__ __forceinline__ HeadIndex(const FlashsciForwardParams& p, uint32_t batch_head) {
    const uint32_t batch = batch_head / static_cast<uint32_t>(p.heads_q);
    head = batch_head - batch * p.heads_q;
    batch0 = batch / static_cast<uint32_t>(p.batch1);
    batch1 = batch - batch0 * static_cast<uint32_t>(p.batch1);
  }
};

// Loads rows [row, row + kRows) of a sequence that starts at first and has `length` rows; zeros beyond.
template <class C, int kRows, bool kPacked>
__device__ __forceinline__ void load_boxes(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                           int row, int first, int length, const HeadIndex& at) {
  const int rows = min(max(length - row, 0), kRows);
  const int c1 = kPacked ? kRows - rows : row, c2 = kPacked ? first + row + rows : at.head;
  const int c3 = kPacked ? at.head : at.batch1, c4 = kPacked ? 0 : at.batch0;
#pragma unroll
  for (int block = 0; block < C::kColumnBlocks; ++block)
    ptx::tma_load_5d(shared + block * kRows * 128, &map, barrier, block * 64, c1, c2, c3, c4);
}

template <bool kPacked>
__device__ __forceinline__ Window window_of(const FlashsciForwardParams& p, const WorkTile& work) {
  return Window(p.window_left, p.window_right, p.lower_right != 0, work.seq_q, work.seq_k);
}

// One warp each; one elected lane of it issues.
template <class C, bool kPacked>
__device__ __forceinline__ void produce_q(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kQStages, lap = turn / kQStages
  for (Walk walk; walk.unit < a.schedule.units; walk.advance(a.schedule)) {
    const WorkTile work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (work.row < 0) continue;
    const Blocks<C> blocks(window_of<kPacked>(a.p, work), work.row, C::kBlockQ, work.seq_q);
    if (blocks.first >= blocks.end) continue;
    if (ptx::elect()) {
      const HeadIndex at(a.p, work.batch_head);
      const uint32_t stage = turn % C::kQStages, parity = (turn / C::kQStages & 1) ^ 1;
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w) {
        const uint32_t full = ptx::shared_address(&shared.q_full[stage][w]);
        ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[stage][w]), parity);
        ptx::mbarrier_arrive_expect(full, C::kQBytes);
        load_boxes<C, 64, kPacked>(ptx::shared_address(shared.q[stage][w]), a.q, full, work.row + w * 64,
                                   work.first_q, work.seq_q, at);
      }
    }
    __syncwarp();
    ++turn;
  }
}

template <class C, bool kPacked>
__device__ __forceinline__ void produce_kv(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kStages, lap = turn / kStages
  for (Walk walk; walk.unit < a.schedule.units; walk.advance(a.schedule)) {
    const WorkTile work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (work.row < 0) continue;
    const Blocks<C> blocks(window_of<kPacked>(a.p, work), work.row, C::kBlockQ, work.seq_q);
    if (blocks.first >= blocks.end) continue;
    const uint32_t next_turn = turn + (blocks.end - blocks.first);
    if (ptx::elect()) {
      HeadIndex at(a.p, work.batch_head);
      at.head /= static_cast<uint32_t>(a.p.heads_q / a.p.heads_k);
#pragma unroll 1
      for (int block = blocks.end - 1; block >= blocks.first; --block, ++turn) {
        const uint32_t stage = turn % C::kStages, parity = (turn / C::kStages & 1) ^ 1;
        const uint32_t k_full = ptx::shared_address(&shared.k_full[stage]);
        const uint32_t v_full = ptx::shared_address(&shared.v_full[stage]);
        ptx::mbarrier_wait(ptx::shared_address(&shared.k_empty[stage]), parity);
        ptx::mbarrier_arrive_expect(k_full, C::kKVBytes);
        load_boxes<C, C::kBlockK, kPacked>(ptx::shared_address(shared.k[stage]), a.k, k_full,
                                           block * C::kBlockK, work.first_k, work.seq_k, at);
        ptx::mbarrier_wait(ptx::shared_address(&shared.v_empty[stage]), parity);
        ptx::mbarrier_arrive_expect(v_full, C::kKVBytes);
        load_boxes<C, C::kBlockK, kPacked>(ptx::shared_address(shared.v[stage]), a.v, v_full,
                                           block * C::kBlockK, work.first_k, work.seq_k, at);
      }
    }
    __syncwarp();
    turn = next_turn;
  }
}

// ---- consumers -----------------------------------------------------------------------------------------------

// Accumulator element e of a lane is row 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's 64 and column
// 8 (e >> 2) + 2 (lane % 4) + (e & 1).

template <int kCount>
__device__ __forceinline__ void scale_scores(float (&s)[kCount], const ForwardArgs& a) {
  if (a.score_mode == kSoftcap) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = a.score_outer * tanh_accurate(a.score_inner * s[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= a.score_inner;
  }
}

// Scores of keys outside [begin(i), end(i)) become -inf. row: this lane's first query row; column: the key of
// its first score. Accumulator elements [kBegin, kEnd).
template <int kBegin, int kEnd, bool kLeft, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const Window& window, int row,
                                            int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int limit = (kLeft ? window.begin(row + 8 * half) : window.end(row + 8 * half)) - column;
#pragma unroll
    for (int e = kBegin + 2 * half; e < kEnd; e += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = e / 4 * 8 + i;
        if (kLeft ? j < limit : j >= limit) s[e + i] = -INFINITY;
      }
    }
  }
}

template <class C>
struct RowStatistics {
  float maximum[2];  // of rows g and g + 8, in units of 1 / exp_scale; stale by at most 2^8
  float sum[2];      // this lane's part
};

// S becomes exp2(exp_scale (S - maximum)); returns whether O must be multiplied by alpha.
template <class C, bool kFirst, int kCount>
__device__ __forceinline__ bool softmax_step(float (&s)[kCount], RowStatistics<C>& rows,
                                             float (&alpha)[2], float exp_scale) {
  float tile_max[2] = {s[0], s[2]};
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    tile_max[0] = fmaxf(tile_max[0], fmaxf(s[e], s[e + 1]));
    tile_max[1] = fmaxf(tile_max[1], fmaxf(s[e + 2], s[e + 3]));
  }
  tile_max[0] = quad_max(tile_max[0]);
  tile_max[1] = quad_max(tile_max[1]);
  bool grew = false;
  if constexpr (kFirst) {
    rows.maximum[0] = tile_max[0];
    rows.maximum[1] = tile_max[1];
    rows.sum[0] = rows.sum[1] = 0.f;
  } else {
    // -inf before and now: NaN, not greater.
#ifdef X_RESCALE
    grew = true;
#else
    grew = __any_sync(0xffffffffu,
                      (tile_max[0] - rows.maximum[0]) * exp_scale > kRescaleThreshold ||
                          (tile_max[1] - rows.maximum[1]) * exp_scale > kRescaleThreshold);
#endif
    alpha[0] = alpha[1] = 1.f;
    if (grew) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(rows.maximum[half], tile_max[half]);
        alpha[half] =
            next == -INFINITY ? 1.f : ptx::ex2_approx((rows.maximum[half] - next) * exp_scale);
        rows.maximum[half] = next;
        rows.sum[half] *= alpha[half];
      }
    }
  }
  const float offset[2] = {rows.maximum[0] == -INFINITY ? 0.f : rows.maximum[0] * exp_scale,
                           rows.maximum[1] == -INFINITY ? 0.f : rows.maximum[1] * exp_scale};
  float odd[2] = {0.f, 0.f};  // a second chain of additions
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int half = e >> 1 & 1;
    s[e] = ptx::ex2_approx(fmaf(s[e], exp_scale, -offset[half]));
    if constexpr (!C::kSumByMma) {
      if (e & 1)
        odd[half] += s[e];
      else
        rows.sum[half] += s[e];
    }
  }
  rows.sum[0] += odd[0];
  rows.sum[1] += odd[1];
  return grew;
}

// 4x4 transposition among the lanes of a quad: word b of lane t becomes word t of lane b.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? got : w[i];
    w[i + 1] = odd ? w[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
    w[i] = high ? got : w[i];
    w[i + 2] = high ? w[i + 2] : got;
  }
}

// Normalises, writes lse and the output: every quad stores 64 contiguous bytes of a row at a time.
template <class Op, class C>
__device__ __forceinline__ void write_output(const float (&o)[C::kOutColumns / 2],
                                             const RowStatistics<C>& rows, const ForwardArgs& a,
                                             const WorkTile& work, int row) {
  const HeadIndex at(a.p, work.batch_head);
  const int quad = threadIdx.x % 4;
  auto* out = static_cast<uint16_t*>(a.p.out) + at.batch0 * a.p.out_strides.batch0 +
              at.batch1 * a.p.out_strides.batch1 + at.head * a.p.out_strides.head +
              (work.first_q + row) * a.p.out_strides.row + quad * 8;
  float* lse = a.p.lse + static_cast<int64_t>(work.batch_head) * a.p.seq_q + work.first_q + row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum =
        C::kSumByMma ? o[C::kOutColumns / 2 - 4 + 2 * half] : quad_sum(rows.sum[half]);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const bool valid = row + 8 * half < work.seq_q;
    if (quad == 0 && valid)
      lse[8 * half] =
          sum == 0.f ? -INFINITY : fmaf(rows.maximum[half], a.lse_scale, logf(sum));
    uint16_t* target = out + 8 * half * a.p.out_strides.row;
#pragma unroll
    for (int block = 0; block < C::kHeadDim / 32; ++block) {  // 32 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int e = block * 16 + i * 4 + half * 2;
        words[i] = Op::pack2(o[e] * inverse, o[e + 1] * inverse);
      }
      quad_transpose(words);
      if (valid && block * 32 + quad * 8 < a.p.head_dim_v)
        *reinterpret_cast<uint4*>(target + block * 32) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kPacked>
__device__ __forceinline__ void consume(SharedStorage<C>& shared, const ForwardArgs& a, int w) {
  constexpr int kBlockK = C::kBlockK, kStages = C::kStages, kHeadDim = C::kHeadDim;
  using MmaQK = typename Op::template Wgmma<kBlockK>;
  using MmaQKHalf = typename Op::template Wgmma<kBlockK / 2>;
  using MmaPV = typename Op::template Wgmma<C::kOutColumns>;
  constexpr int kTurnThreads = 256;  // one warpgroup waits, one arrives
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

  float s[kBlockK / 2];      // scores, then P
  float o[C::kOutColumns / 2];  // output, unnormalised
  uint32_t p[kBlockK / 16][4];  // P as operand, per 16 keys
  RowStatistics<C> rows;
  float alpha[2];
  uint32_t turn = 0, q_turn = 0;  // blocks and tiles behind us: they tell stages and phases

  const uint64_t q_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.q[0][w]), 16, 1024);
  const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024);
  const uint64_t v_desc = ptx::wgmma_descriptor(
      ptx::shared_address(shared.v),
      C::kSumByMma ? ptx::shared_address(shared.ones) - ptx::shared_address(shared.v) : kBlockK * 128,
      1024);
  // With kSumByMma the second block of 64 columns is the tile of ones, at a distance that depends on the stage.
  constexpr uint64_t kVStage = C::kSumByMma ? (C::kKVBytes / 16) - (uint64_t{C::kKVBytes / 16} << 16)
                                            : uint64_t{C::kKVBytes / 16};
  const auto issue_qk = [&](uint32_t stage) {
    const uint64_t q_tile = q_desc + q_turn % C::kQStages * (C::kConsumers * C::kQBytes / 16);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      MmaQK::template ss<0>(s, q_tile + (d / 4 * 8192 + d % 4 * 32) / 16,
                            k_desc + stage * (C::kKVBytes / 16) +
                                (d / 4 * kBlockK * 128 + d % 4 * 32) / 16,
                            d > 0);
    ptx::wgmma_commit();
  };
  // The first half of the block's keys only.
  const auto issue_qk_half = [&](float(&half)[kBlockK / 4], uint32_t stage) {
    const uint64_t q_tile = q_desc + q_turn % C::kQStages * (C::kConsumers * C::kQBytes / 16);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      MmaQKHalf::template ss<0>(half, q_tile + (d / 4 * 8192 + d % 4 * 32) / 16,
                                k_desc + stage * (C::kKVBytes / 16) +
                                    (d / 4 * kBlockK * 128 + d % 4 * 32) / 16,
                                d > 0);
    ptx::wgmma_commit();
  };
  const auto issue_pv = [&](uint32_t stage, bool accumulate) {
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaPV::template rs<1>(o, p[n], v_desc + stage * kVStage + n * (2048 / 16),
                            accumulate || n > 0);
    ptx::wgmma_commit();
  };
  const auto pack = [&] {
#pragma unroll
    for (int e = 0; e < kBlockK / 2; e += 2) p[e / 8][e / 2 % 4] = Op::pack2(s[e], s[e + 1]);
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  };
  const auto wait = [&](uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  };
  const auto my_turn = [&] {
    if (a.take_turns) ptx::barrier_sync(1 + w, kTurnThreads);
  };
  const auto next_turn = [&] {
    if (a.take_turns) ptx::barrier_arrive(1 + (w + 1) % C::kConsumers, kTurnThreads);
  };

  const auto skip = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count, ++turn) {
      wait(shared.k_full[turn % kStages], turn / kStages);
      my_turn();
      next_turn();
      release(shared.k_empty[turn % kStages]);
      wait(shared.v_full[turn % kStages], turn / kStages);
      release(shared.v_empty[turn % kStages]);
    }
  };

  if (w == C::kConsumers - 1) next_turn();
  for (Walk walk; walk.unit < a.schedule.units; walk.advance(a.schedule)) {
    const WorkTile work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (work.row < 0) continue;
    const Window window = window_of<kPacked>(a.p, work);
    const Blocks<C> blocks(window, work.row, C::kBlockQ, work.seq_q);
    const int first_row = work.row + w * 64;
    const int row = first_row + warp * 16 + lane / 4;
    // This warpgroup's own blocks are some of the tile's, or none; of the others it only hands on barriers and turns.
    Blocks<C> own(window, first_row, 64, work.seq_q);
    if (own.first >= own.end) own.first = own.end = blocks.first;
    skip(blocks.end - own.end);
    if (own.first >= own.end) {
      if (blocks.first < blocks.end) {
        wait(shared.q_full[q_turn % C::kQStages][w], q_turn / C::kQStages);
        release(shared.q_empty[q_turn % C::kQStages][w]);
        ++q_turn;
      }
#pragma unroll
      for (int e = 0; e < C::kOutColumns / 2; ++e) o[e] = 0.f;
      rows.sum[0] = rows.sum[1] = 0.f;
      write_output<Op, C>(o, rows, a, work, row);
      continue;
    }
    // All rows of this warpgroup see the keys [full_begin, full_end).
    const int full_begin = window.begin(first_row + 63), full_end = max(window.end(first_row), 0);
    const auto mask_half = [&](auto& s, int block) {
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      if (first_key + kBlockK / 2 > full_end)
        mask_scores<0, kBlockK / 4, false>(s, window, row, column);
      if (kWindowed && first_key < full_begin)
        mask_scores<0, kBlockK / 4, true>(s, window, row, column);
    };
    const auto mask = [&](int block) {
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      mask_half(s, block);
      if (first_key + kBlockK > full_end)
        mask_scores<kBlockK / 4, kBlockK / 2, false>(s, window, row, column);
      if (kWindowed && first_key + kBlockK / 2 < full_begin)
        mask_scores<kBlockK / 4, kBlockK / 2, true>(s, window, row, column);
    };

    int block = own.end - 1;
    const uint32_t q_stage = q_turn % C::kQStages;
    wait(shared.q_full[q_stage][w], q_turn / C::kQStages);
    wait(shared.k_full[turn % kStages], turn / kStages);
    my_turn();
    ptx::wgmma_fence();
    // The first block of a tile is often cut by the diagonal or the end: half a block costs half.
    const bool half = own.end_key <= block * kBlockK + kBlockK / 2;
    if (half) {
      float s_half[kBlockK / 4];
      issue_qk_half(s_half, turn % kStages);
      next_turn();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s_half);
      release(shared.k_empty[turn % kStages]);
      if (block == own.first) release(shared.q_empty[q_stage][w]);
      if constexpr (!kPlainScores) scale_scores(s_half, a);
      mask_half(s_half, block);
      softmax_step<C, true>(s_half, rows, alpha, a.exp_scale);
#pragma unroll
      for (int e = 0; e < kBlockK / 2; e += 2)
        p[e / 8][e / 2 % 4] = e < kBlockK / 4 ? Op::pack2(s_half[e], s_half[e + 1]) : 0;
    } else {
      issue_qk(turn % kStages);
      next_turn();
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(s);
      release(shared.k_empty[turn % kStages]);
      if (block == own.first) release(shared.q_empty[q_stage][w]);
      if constexpr (!kPlainScores) scale_scores(s, a);
      mask(block);
      softmax_step<C, true>(s, rows, alpha, a.exp_scale);
      pack();
    }
    bool accumulate = false;

    const auto step = [&](auto masked) {
      const uint32_t stage = turn % kStages, next = (turn + 1) % kStages;
      wait(shared.k_full[next], (turn + 1) / kStages);
      my_turn();
      ptx::wgmma_fence();
      issue_qk(next);
      wait(shared.v_full[stage], turn / kStages);
      issue_pv(stage, accumulate);
      next_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(s);
      release(shared.k_empty[next]);
      if (block == own.first) release(shared.q_empty[q_stage][w]);
      if constexpr (!kPlainScores) scale_scores(s, a);
      if constexpr (decltype(masked)::value) mask(block);
      const bool grew = softmax_step<C, false>(s, rows, alpha, a.exp_scale);
      // ptxas moves the wait below above the exponentials unless a branch depends on them all.
#ifdef X_ORDER
      ptx::wgmma_tie(s);
      if (C::kSumByMma ? s[0] + s[1] < 0.f : rows.sum[0] + rows.sum[1] < 0.f) asm volatile("nanosleep.u32 1;");
#endif
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      release(shared.v_empty[stage]);
      if (grew) {
#pragma unroll
        for (int e = 0; e < C::kOutColumns / 2; ++e) o[e] *= alpha[e >> 1 & 1];
      }
      pack();
      accumulate = true;
      ++turn;
    };
    --block;
    if constexpr (kWindowed) {
      // Masked blocks on the right, then whole ones, then masked ones on the left.
      int masked_down_to = max(full_end / kBlockK, own.first);
      const int whole_down_to = max((full_begin + kBlockK - 1) / kBlockK, own.first);
      while (block >= own.first) {
#pragma unroll 1
        for (; block >= masked_down_to; --block) step(std::true_type{});
#pragma unroll 1
        for (; block >= whole_down_to; --block) step(std::false_type{});
        masked_down_to = own.first;
      }
    } else {
#pragma unroll 1
      for (; block >= own.first; --block) step(std::false_type{});
    }

    wait(shared.v_full[turn % kStages], turn / kStages);
    ptx::wgmma_fence();
    issue_pv(turn % kStages, accumulate);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    release(shared.v_empty[turn % kStages]);
    ++turn;
    ++q_turn;
    skip(own.first - blocks.first);
    write_output<Op, C>(o, rows, a, work, row);
  }
  if (w == 0) my_turn();  // the last turn handed round, so that the barrier ends balanced
}

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kPacked>
__global__ void __launch_bounds__(C::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<C>*>(
      (reinterpret_cast<uintptr_t>(shared_memory) + 1023) & ~uintptr_t{1023});
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.q);
    ptx::prefetch_tensor_map(&a.k);
    ptx::prefetch_tensor_map(&a.v);
    for (int i = 0; i < C::kQStages * C::kConsumers; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[0][0] + i), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[0][0] + i), 4);
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[stage]), 4 * C::kConsumers);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[stage]), 4 * C::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (C::kSumByMma) {
    for (int i = threadIdx.x; i < C::kOnesBytes / 16; i += C::kThreads) {
      const uint32_t one = Op::pack2(1.f, 1.f);
      reinterpret_cast<uint4*>(shared.ones)[i] = make_uint4(one, one, one, one);
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce_kv<C, kPacked>(shared, a);
    if (warp == 1) produce_q<C, kPacked>(shared, a);
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    consume<Op, C, kWindowed, kPlainScores, kPacked>(shared, a, warpgroup - 1);
  }
}

// ---- host ----------------------------------------------------------------------------------------------------

// Multiprocessors of a device; asked once.
inline int multiprocessors(int device) {
  static std::atomic<int> known[64];
  int count = device < 64 ? known[device].load(std::memory_order_relaxed) : 0;
  if (count == 0 &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
      device < 64)
    known[device].store(count, std::memory_order_relaxed);
  return count;
}

template <class Op, class C, bool kWindowed, bool kPlainScores, bool kPacked>
cudaError_t launch_tiling(ForwardArgs& a, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<C>) + 1024;  // the base is aligned by hand
  static_assert(kSharedBytes <= 227 * 1024, "the shared memory of an SM");
  const FlashsciForwardParams& p = a.p;
  const bool causal = p.window_right >= 0 && p.window_left < 0;
  const int64_t heads = p.batch0 * p.batch1 * p.heads_q;
  const int64_t tiles = kPacked ? num_slots<C::kBlockQ>(p.seq_q, p.num_seqs)
                                : (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  const bool pairs = causal && !kPacked && tiles > 1;
  if (heads == 0 || p.seq_q == 0) return cudaSuccess;
  if (heads * tiles > INT32_MAX) return cudaErrorNotSupported;
  a.schedule.units = static_cast<uint32_t>(pairs ? (heads + 1) / 2 * tiles : heads * tiles);
  a.schedule.tiles_per_head = static_cast<uint32_t>(tiles);
  a.schedule.heads = static_cast<uint32_t>(heads);
  a.schedule.pairs = pairs;
  a.schedule.descending = causal;
#ifdef X_TURNS
  a.take_turns = p.seq_k >= X_TURNS;
#else
  a.take_turns = 1;
#endif

  const auto encode = [&](CUtensorMap* map, const void* base, const FlashsciStrides& strides,
                          int64_t rows, int64_t heads_of, int head_dim, int box_rows) {
    const MapDims dims = kPacked ? ragged_dims(strides, rows, heads_of, box_rows)
                                 : dense_dims(strides, rows, heads_of, p.batch1, p.batch0);
    const auto* start = static_cast<const uint16_t*>(base);
    if (kPacked) start -= box_rows * strides.row;
    return encode_map(map, start, Op::kIsBf16, head_dim, dims, box_rows);
  };
  cudaError_t error = encode(&a.q, p.q, p.q_strides, p.seq_q, p.heads_q, p.head_dim, 64);
  if (error == cudaSuccess)
    error = encode(&a.k, p.k, p.k_strides, p.seq_k, p.heads_k, p.head_dim, C::kBlockK);
  if (error == cudaSuccess)
    error = encode(&a.v, p.v, p.v_strides, p.seq_k, p.heads_k, p.head_dim_v, C::kBlockK);
  if (error != cudaSuccess) return error;

  constexpr auto kernel = forward_kernel<Op, C, kWindowed, kPlainScores, kPacked>;
  static std::atomic<uint64_t> configured{0};  // once per device; a lost race only repeats it
  const uint64_t bit = uint64_t{1} << (p.device & 63);
  if (p.device >= 64 || !(configured.load(std::memory_order_relaxed) & bit)) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    configured.fetch_or(bit, std::memory_order_relaxed);
  }
  const int processors = multiprocessors(p.device);
  if (processors <= 0) return cudaErrorInvalidDevice;
  // Packed: nobody knows the lengths, so the hardware hands out the tiles as SMs become free.
  const unsigned grid = kPacked || a.schedule.units < static_cast<unsigned>(processors)
                            ? a.schedule.units
                            : static_cast<unsigned>(processors);
  kernel<<<grid, C::kThreads, kSharedBytes, stream>>>(a);
  return cudaGetLastError();
}

// The tile shapes, by padded head dimension; why: docs/kernels/sm90_forward.md.
template <int kHeadDim>
struct Tiles;
template <>
struct Tiles<64> {
#ifdef XF64
  using Full = Tiling<64, XF64>;
#else
  using Full = Tiling<64, 128, 3, 2>;
#endif
#ifdef XW64
  using Windowed = Tiling<64, XW64>;
#else
  using Windowed = Tiling<64, 128, 3, 2>;
#endif
};
template <>
struct Tiles<128> {
#ifdef XF128
  using Full = Tiling<128, XF128>;
#else
  using Full = Tiling<128, 128, 2, 2>;
#endif
#ifdef XW128
  using Windowed = Tiling<128, XW128>;
#else
  using Windowed = Tiling<128, 128, 2, 2>;
#endif
};
template <>
struct Tiles<256> {
#ifdef XF256
  using Full = Tiling<256, XF256>;
#else
  using Full = Tiling<256, 80, 2, 2>;
#endif
#ifdef XW256
  using Windowed = Tiling<256, XW256>;
#else
  using Windowed = Tiling<256, 80, 2, 2>;
#endif
};

template <class Op, int kHeadDim>
cudaError_t launch_padded(ForwardArgs& a, cudaStream_t stream) {
  using T = Tiles<kHeadDim>;
  using Windowed = typename T::Windowed;
  const bool windowed = a.p.window_left >= 0 || a.p.window_right >= 0;
  const bool plain = a.score_mode == kScaled;
  if (a.p.cu_seqlens_q != nullptr)
    return plain ? launch_tiling<Op, Windowed, true, true, true>(a, stream)
                 : launch_tiling<Op, Windowed, true, false, true>(a, stream);
  if (!plain) return launch_tiling<Op, Windowed, true, false, false>(a, stream);
  if (windowed) return launch_tiling<Op, Windowed, true, true, false>(a, stream);
  return launch_tiling<Op, typename T::Full, false, true, false>(a, stream);
}

// cudaErrorNotSupported: another kernel must serve this call, nothing was launched.
template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  if (p.seq_k == 0 || p.head_dim_v % 8 != 0 ||
      !aligned(p.batch0, p.out_strides.batch0) || !aligned(p.batch1, p.out_strides.batch1) ||
      !aligned(p.heads_q, p.out_strides.head) || !aligned(p.seq_q, p.out_strides.row) ||
      reinterpret_cast<uintptr_t>(p.out) % 16 != 0)
    return cudaErrorNotSupported;
  ForwardArgs a;
  a.p = p;
  a.score_mode = p.softcap != 0.f ? kSoftcap : p.scale > 0.f ? kScaled : kLinear;
  a.score_inner = p.softcap != 0.f ? p.scale / p.softcap : p.scale;
  a.score_outer = p.softcap;
  a.exp_scale = a.score_mode == kScaled ? p.scale * kLog2e : kLog2e;
  a.lse_scale = a.score_mode == kScaled ? p.scale : 1.f;
  const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
#if defined(FLASHSCI_SM90_ONLY)  // experiments: one head dimension compiles in seconds
  return dim <= FLASHSCI_SM90_ONLY ? launch_padded<Op, FLASHSCI_SM90_ONLY>(a, stream)
                                   : cudaErrorNotSupported;
#else
  if (dim <= 64) return launch_padded<Op, 64>(a, stream);
  if (dim <= 128) return launch_padded<Op, 128>(a, stream);
  if (dim <= 256) return launch_padded<Op, 256>(a, stream);
  return cudaErrorNotSupported;
#endif
}

}  // namespace flashsci::sm90
