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
#include "../common/ptx/redux.cuh"
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
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kColumnBlocks = kHeadDim / 64;           // boxes side by side
  static constexpr int kQBytes = 64 * kHeadDim * 2;             // of one consumer
  static constexpr int kKVBytes = kBlockK * kHeadDim * 2;       // of one stage of K or V
  // The registers of the launch bounds (168 at 384 threads, 128 at 512) redistributed.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static_assert(kHeadDim % 64 == 0 && kBlockK % 16 == 0 && (kStages & (kStages - 1)) == 0);
};

// What the Q producer tells the consumers about a tile.
struct PostedTile {
  int row;             // first query row in its sequence; < 0: no more tiles
  int seq_q, seq_k;    // of the sequence
  int64_t out_offset;  // elements, of the tile's first row and head
  int64_t lse_offset;
};
// A slot is reused when all consumers have released the Q of the tile kQStages before; by then they may still owe
// the output of the tile before that one.
inline constexpr int kPosted = 4;

template <class C>
struct SharedStorage {
  unsigned char q[C::kQStages][C::kConsumers][C::kQBytes];  // [..][column block][64 rows][64]
  unsigned char k[C::kStages][C::kKVBytes];    // [stage][column block][kBlockK rows][64]
  unsigned char v[C::kStages][C::kKVBytes];    // the same
  uint64_t q_full[C::kQStages][C::kConsumers], q_empty[C::kQStages][C::kConsumers];
  uint64_t k_full[C::kStages], k_empty[C::kStages];
  uint64_t v_full[C::kStages], v_empty[C::kStages];
  PostedTile posted[kPosted];
};

enum ScoreMode { kScaled = 0, kLinear = 1, kSoftcap = 2 };

struct alignas(128) ForwardArgs {
  CUtensorMap q, k, v;
  FlashsciForwardParams p;
  SchedulePlan schedule;
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

__device__ __forceinline__ Window window_of(const FlashsciForwardParams& p, int seq_q, int seq_k) {
  return Window(p.window_left, p.window_right, p.lower_right != 0, seq_q, seq_k);
}

// The producers are one warp each, of which one elected lane issues. This one also posts every tile, and the end.
template <class C, bool kPacked>
__device__ __forceinline__ void produce_q(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kQStages, lap = turn / kQStages
  for (Walk walk;; walk.advance(a.schedule)) {
    const bool more = walk.unit < a.schedule.units;
    WorkTile work;
    if (more) work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (more && work.row < 0) continue;
    const uint32_t stage = turn % C::kQStages, parity = (turn / C::kQStages & 1) ^ 1;
    if (ptx::elect()) {
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w)
        ptx::mbarrier_wait(ptx::shared_address(&shared.q_empty[stage][w]), parity);
      PostedTile& post = shared.posted[turn % kPosted];
      if (more) {
        const HeadIndex at(a.p, work.batch_head);
        post.row = work.row;
        post.seq_q = work.seq_q;
        post.seq_k = work.seq_k;
        post.out_offset = at.batch0 * a.p.out_strides.batch0 + at.batch1 * a.p.out_strides.batch1 +
                          at.head * a.p.out_strides.head +
                          (work.first_q + work.row) * a.p.out_strides.row;
        post.lse_offset =
            static_cast<int64_t>(work.batch_head) * a.p.seq_q + work.first_q + work.row;
        const Blocks<C> blocks(window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ, work.seq_q);
        const bool load = blocks.first < blocks.end;
#pragma unroll
        for (int w = 0; w < C::kConsumers; ++w) {
          const uint32_t full = ptx::shared_address(&shared.q_full[stage][w]);
          if (load) {
            ptx::mbarrier_arrive_expect(full, C::kQBytes);
            load_boxes<C, 64, kPacked>(ptx::shared_address(shared.q[stage][w]), a.q, full,
                                       work.row + w * 64, work.first_q, work.seq_q, at);
          } else {
            ptx::mbarrier_arrive(full);
          }
        }
      } else {
        post.row = -1;
#pragma unroll
        for (int w = 0; w < C::kConsumers; ++w)
          ptx::mbarrier_arrive(ptx::shared_address(&shared.q_full[stage][w]));
      }
    }
    __syncwarp();
    if (!more) break;
    ++turn;
  }
}

template <class C, bool kPacked>
__device__ __forceinline__ void produce_kv(SharedStorage<C>& shared, const ForwardArgs& a) {
  uint32_t turn = 0;  // stage = turn % kStages, lap = turn / kStages
  for (Walk walk; walk.unit < a.schedule.units; walk.advance(a.schedule)) {
    const WorkTile work = find_work<C::kBlockQ, kPacked>(a.schedule, a.p, walk.unit, walk.half);
    if (work.row < 0) continue;
    const Blocks<C> blocks(window_of(a.p, work.seq_q, work.seq_k), work.row, C::kBlockQ, work.seq_q);
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
    grew = __any_sync(0xffffffffu,
                      (tile_max[0] - rows.maximum[0]) * exp_scale > kRescaleThreshold ||
                          (tile_max[1] - rows.maximum[1]) * exp_scale > kRescaleThreshold);
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
    if (e & 1)
      odd[half] += s[e];
    else
      rows.sum[half] += s[e];
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
__device__ __forceinline__ void write_output(const float (&o)[C::kHeadDim / 2],
                                             const RowStatistics<C>& rows, const ForwardArgs& a,
                                             const PostedTile& tile, int row) {  // row: in the tile
  const int quad = threadIdx.x % 4;
  auto* out = static_cast<uint16_t*>(a.p.out) + tile.out_offset + row * a.p.out_strides.row + quad * 8;
  float* lse = a.p.lse + tile.lse_offset + row;
  const int rows_left = tile.seq_q - tile.row - row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;
    const bool valid = 8 * half < rows_left;
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

template <class Op, class C, bool kWindowed, bool kPlainScores>
__device__ __forceinline__ void consume(SharedStorage<C>& shared, const ForwardArgs& a, int w) {
  constexpr int kBlockK = C::kBlockK, kStages = C::kStages, kHeadDim = C::kHeadDim;
  using MmaQK = typename Op::template Wgmma<kBlockK>;
  using MmaQKHalf = typename Op::template Wgmma<kBlockK / 2>;
  using MmaPV = typename Op::template Wgmma<kHeadDim>;
  constexpr int kTurnThreads = 256;  // one warpgroup waits, one arrives
  const int lane = threadIdx.x % 32;
  const int row_in_tile = w * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first

  float s[kBlockK / 2];         // scores, then P
  float o[kHeadDim / 2];        // output, unnormalised
  uint32_t p[kBlockK / 16][4];  // P as operand, per 16 keys
  RowStatistics<C> rows;
  float alpha[2];
  uint32_t head = 0;        // K blocks behind us: they tell stage and phase of the next
  uint32_t tiles = 0;       // tiles behind us
  bool pending = false;     // P of block head - 1 waits for its product, the output of a tile for its end

  const uint64_t q_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.q[0][w]), 16, 1024);
  const uint64_t k_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.k), 16, 1024);
  const uint64_t v_desc = ptx::wgmma_descriptor(ptx::shared_address(shared.v), kBlockK * 128, 1024);
  const auto issue_qk = [&](auto mma, auto& scores) {
    const uint64_t q_tile = q_desc + tiles % C::kQStages * (C::kConsumers * C::kQBytes / 16);
    const uint64_t k_tile = k_desc + head % kStages * (C::kKVBytes / 16);
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d)
      decltype(mma)::template ss<0>(scores, q_tile + (d / 4 * 8192 + d % 4 * 32) / 16,
                                    k_tile + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  };
  const auto issue_pv = [&](uint32_t at) {  // O += P V
    const uint64_t v_tile = v_desc + at % kStages * (C::kKVBytes / 16);
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaPV::template rs<1>(o, p[n], v_tile + n * (2048 / 16), 1);
    ptx::wgmma_commit();
  };
  // The scores of the block whose first `kCount` elements these are become P; the rest of P is 0.
  const auto pack = [&](auto& scores) {
    constexpr int kCount = sizeof(scores) / 4;
#pragma unroll
    for (int e = 0; e < kBlockK / 2; e += 2)
      p[e / 8][e / 2 % 4] = e < kCount ? Op::pack2(scores[e % kCount], scores[e % kCount + 1]) : 0;
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  };
  const auto wait = [&](uint64_t& barrier, uint32_t parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  };
  const auto wait_k = [&] { wait(shared.k_full[head % kStages], head / kStages); };
  const auto wait_v = [&](uint32_t at) { wait(shared.v_full[at % kStages], at / kStages); };
  const auto my_turn = [&] { ptx::barrier_sync(1 + w, kTurnThreads); };
  const auto next_turn = [&] { ptx::barrier_arrive(1 + (w + 1) % C::kConsumers, kTurnThreads); };
  // Hands on blocks that this warpgroup's rows do not see.
  const auto skip = [&](int count) {
#pragma unroll 1
    for (; count > 0; --count, ++head) {
      wait_k();
      my_turn();
      next_turn();
      release(shared.k_empty[head % kStages]);
      wait_v(head);
      release(shared.v_empty[head % kStages]);
    }
  };
  // The last product of the tile that is pending, and its output.
  const auto finish = [&](uint32_t tile) {
    const uint32_t at = head - 1;
    wait_v(at);
    ptx::wgmma_fence();
    issue_pv(at);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(o);
    release(shared.v_empty[at % kStages]);
    write_output<Op, C>(o, rows, a, shared.posted[tile % kPosted], row_in_tile);
    pending = false;
  };

  const auto clear = [&] {
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) o[e] = 0.f;
  };

  clear();
#pragma unroll
  for (int n = 0; n < kBlockK / 16; ++n) p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
  rows.maximum[0] = rows.maximum[1] = rows.sum[0] = rows.sum[1] = 0.f;
  if (w == C::kConsumers - 1) next_turn();
#pragma unroll 1
  for (;; ++tiles) {
    const uint32_t q_stage = tiles % C::kQStages;
    wait(shared.q_full[q_stage][w], tiles / C::kQStages);
    const PostedTile& tile = shared.posted[tiles % kPosted];
    // The same in all lanes, which only redux tells the compiler: wgmma wants uniform control flow.
    const int tile_row = ptx::redux_max(tile.row);
    if (tile_row < 0) break;
    const int seq_q = ptx::redux_max(tile.seq_q), seq_k = ptx::redux_max(tile.seq_k);
    const Window window = window_of(a.p, seq_q, seq_k);
    const int first_row = tile_row + w * 64;
    const Blocks<C> blocks(window, tile_row, C::kBlockQ, seq_q);
    Blocks<C> own(window, first_row, 64, seq_q);
    const bool nothing = own.first >= own.end;
    if (nothing) own.first = own.end = blocks.first;
    // One skipped block may overtake a pending product, more would wait for the stage it holds.
    const int ahead = blocks.end - own.end;
    if (pending && (nothing || ahead >= kStages)) finish(tiles - 1);
    const uint32_t pending_v = head - 1;
    skip(ahead);
    if (nothing) {
      release(shared.q_empty[q_stage][w]);
      clear();
      rows.sum[0] = rows.sum[1] = 0.f;
      write_output<Op, C>(o, rows, a, tile, row_in_tile);
      continue;
    }
    // All rows of this warpgroup see the keys [full_begin, full_end).
    const int full_begin = window.begin(first_row + 63), full_end = max(window.end(first_row), 0);
    const auto mask_half = [&](auto& scores, int block) {
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);  // again: registers are scarce
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      const int row = tile.row + row_in_tile;
      if (first_key + kBlockK / 2 > full_end)
        mask_scores<0, kBlockK / 4, false>(scores, window, row, column);
      if (kWindowed && first_key < full_begin)
        mask_scores<0, kBlockK / 4, true>(scores, window, row, column);
    };
    const auto mask = [&](int block) {
      mask_half(s, block);
      const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
      const int first_key = block * kBlockK, column = first_key + lane % 4 * 2;
      const int row = tile.row + row_in_tile;
      if (first_key + kBlockK > full_end)
        mask_scores<kBlockK / 4, kBlockK / 2, false>(s, window, row, column);
      if (kWindowed && first_key + kBlockK / 2 < full_begin)
        mask_scores<kBlockK / 4, kBlockK / 2, true>(s, window, row, column);
    };

    // The first block of a tile beside the last product of the tile before.
    int block = own.end - 1;
    const RowStatistics<C> rows_before = rows;
    const auto issue_pending = [&] {
      if (pending) wait_v(pending_v);
      issue_pv(pending_v);  // of nobody's interest if nothing is pending, but wgmma allows no branch here
      next_turn();
      ptx::wgmma_wait<1>();
    };
    const auto after_qk = [&] {
      release(shared.k_empty[head % kStages]);
      if (block == own.first) release(shared.q_empty[q_stage][w]);
    };
    const auto after_pv = [&] {
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      if (pending) release(shared.v_empty[pending_v % kStages]);
    };
    wait_k();
    my_turn();
    ptx::wgmma_fence();
    // The diagonal or the end often cuts it: half a block costs half.
    if (own.end_key <= block * kBlockK + kBlockK / 2) {
      float half[kBlockK / 4];
      issue_qk(MmaQKHalf{}, half);
      issue_pending();
      ptx::wgmma_tie(half);
      after_qk();
      if constexpr (!kPlainScores) scale_scores(half, a);
      mask_half(half, block);
      softmax_step<C, true>(half, rows, alpha, a.exp_scale);
      after_pv();
      pack(half);
    } else {
      issue_qk(MmaQK{}, s);
      issue_pending();
      ptx::wgmma_tie(s);
      after_qk();
      if constexpr (!kPlainScores) scale_scores(s, a);
      mask(block);
      softmax_step<C, true>(s, rows, alpha, a.exp_scale);
      after_pv();
      pack(s);
    }
    if (pending)
      write_output<Op, C>(o, rows_before, a, shared.posted[(tiles - 1) % kPosted], row_in_tile);
    clear();
    pending = true;
    ++head;

    const auto step = [&](auto masked) {
      wait_k();
      my_turn();
      ptx::wgmma_fence();
      issue_qk(MmaQK{}, s);
      const uint32_t at = head - 1;
      wait_v(at);
      issue_pv(at);
      next_turn();
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(s);
      after_qk();
      if constexpr (!kPlainScores) scale_scores(s, a);
      if constexpr (decltype(masked)::value) mask(block);
      const bool grew = softmax_step<C, false>(s, rows, alpha, a.exp_scale);
      ptx::wgmma_wait<0>();
      ptx::wgmma_tie(o);
      release(shared.v_empty[at % kStages]);
      if (grew) {
#pragma unroll
        for (int e = 0; e < kHeadDim / 2; ++e) o[e] *= alpha[e >> 1 & 1];
      }
      pack(s);
      ++head;
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
      if (own.first > blocks.first) {
        finish(tiles);
        skip(own.first - blocks.first);
      }
    } else {
#pragma unroll 1
      for (; block >= own.first; --block) step(std::false_type{});
    }
  }
  if (pending) finish(tiles - 1);
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
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<C::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) produce_kv<C, kPacked>(shared, a);
    if (warp == 1) produce_q<C, kPacked>(shared, a);
  } else {
    ptx::setmaxnreg_inc<C::kConsumerRegisters>();
    consume<Op, C, kWindowed, kPlainScores>(shared, a, warpgroup - 1);
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
  using Full = Tiling<64, 128, 3, 2>;
  using Windowed = Tiling<64, 128, 3, 2>;
};
template <>
struct Tiles<128> {
  using Full = Tiling<128, 128, 2, 2>;
  using Windowed = Tiling<128, 128, 2, 2>;
};
template <>
struct Tiles<256> {
  using Full = Tiling<256, 64, 2, 2>;
  using Windowed = Tiling<256, 64, 2, 2>;
};

template <class Op, int kHeadDim>
cudaError_t launch_padded(ForwardArgs& a, cudaStream_t stream) {
  using T = Tiles<kHeadDim>;
  using Windowed = typename T::Windowed;
  const bool windowed = a.p.window_left >= 0 || a.p.window_right >= 0;
  const bool plain = a.score_mode == kScaled;
  if (!plain) return launch_tiling<Op, Windowed, true, false, false>(a, stream);
  if (windowed) return launch_tiling<Op, Windowed, true, true, false>(a, stream);
  return launch_tiling<Op, typename T::Full, false, true, false>(a, stream);
}

// cudaErrorNotSupported: another kernel must serve this call, nothing was launched.
template <class Op>
cudaError_t launch_forward(const FlashsciForwardParams& p, cudaStream_t stream) {
  const auto aligned = [](int64_t size, int64_t stride) { return size <= 1 || stride % 8 == 0; };
  // Packed: the ragged map's base lies before the tensor, and TMA faults where nothing is mapped there.
  if (p.cu_seqlens_q != nullptr || p.seq_k == 0 || p.head_dim_v % 8 != 0 ||
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
