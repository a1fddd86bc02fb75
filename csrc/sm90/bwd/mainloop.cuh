// A consumer warpgroup of the sm90 backward: 64 keys, from S^T to dK and dV, and its part of dQ.
//
// `Consumer::run` is the loop over blocks of queries; its steps are named by the products they
// issue. dQ comes a block late, after both consumers have shared their dS.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/fence.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "bias_aliased.cuh"
#include "bias_staged.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

// Hardware barriers; 0 belongs to __syncthreads.
enum NamedBarrier {
  kConsumer = 1,      // + w: the warps of consumer w
  kAllConsumers = 3,  // both
};

// Accumulator element e of a lane is key 16 warp + lane / 4 + 8 ((e >> 1) & 1) of the warpgroup's
// 64 and query 8 (e >> 2) + 2 (lane % 4) + (e & 1) of the block.

// Elements outside the window become 0. key, query: of this lane's first element.
template <int kCount>
__device__ __forceinline__ void hide(float (&x)[kCount], const Window& window, int key, int query) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = key + 8 * half;
    const int begin = j < window.seq_k ? j - window.after + 1 - query : 1 << 30;
    const int end = j - window.before + 1 - query;
#pragma unroll
    for (int e = 2 * half; e < kCount; e += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = e / 4 * 8 + i;
        if (column < begin || column >= end) x[e + i] = 0.f;
      }
    }
  }
}

// The same for elements packed in pairs.
template <int kCount>
__device__ __forceinline__ void hide(uint32_t (&x)[kCount][4], const Window& window, int key,
                                     int query) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int j = key + 8 * half;
    const int begin = j < window.seq_k ? j - window.after + 1 - query : 1 << 30;
    const int end = j - window.before + 1 - query;
#pragma unroll
    for (int e = 2 * half; e < kCount * 8; e += 4) {
      const int column = e / 4 * 8;
      if (column < begin || column >= end) x[e / 8][e / 2 % 4] &= 0xffff0000u;
      if (column + 1 < begin || column + 1 >= end) x[e / 8][e / 2 % 4] &= 0x0000ffffu;
    }
  }
}

// Stores this warpgroup's 64 rows of dK or dV in shared memory: boxes of 64 columns, `pitch` bytes
// apart.
template <class Op, int kCount>
__device__ __forceinline__ void stage_rows(const float (&x)[kCount], float scale, uint32_t target,
                                           int pitch) {
  const uint32_t thread = opaque(threadIdx.x), lane = thread % 32, warp = thread / 32 % 4;
  const uint32_t row = target + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j)
    ptx::stmatrix_x4(row + j / 4 * pitch + ((j % 4 * 2 + lane / 16) ^ (lane % 8)) * 16,
                     Op::pack2(x[j * 8] * scale, x[j * 8 + 1] * scale),
                     Op::pack2(x[j * 8 + 2] * scale, x[j * 8 + 3] * scale),
                     Op::pack2(x[j * 8 + 4] * scale, x[j * 8 + 5] * scale),
                     Op::pack2(x[j * 8 + 6] * scale, x[j * 8 + 7] * scale));
}

// Copies them to global memory when all four warps have staged theirs; row: of the sequence.
template <int kBoxes, bool kVarlen>
__device__ __forceinline__ void send_rows(uint32_t source, int pitch, const CUtensorMap& map,
                                          void* base, const FlashsciStrides& strides, int columns,
                                          const KeyTile& tile, int row) {
  const int rows = ptx::redux_max(tile.seq_k - row);
  if (base == nullptr || rows <= 0) return;
  const uint32_t thread = opaque(threadIdx.x) % 128;
  if (!kVarlen || rows >= 64) {
    if (thread / 32 == 0 && ptx::elect()) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        ptx::tma_store_5d(&map, source + box * pitch, box * 64, tile.first_k + row, tile.head,
                          tile.batch1, tile.batch0);
      ptx::bulk_commit();
    }
  } else {  // at the end of a packed sequence
    auto* out = static_cast<uint16_t*>(base) + tile.head * strides.head +
                (tile.first_k + row) * strides.row;
#pragma unroll 1
    for (int i = thread / 8; i < rows; i += 16) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int column = box * 64 + thread % 8 * 8;
        if (column < columns)
          *reinterpret_cast<uint4*>(out + i * strides.row + column) =
              ptx::ld_shared_v4(source + box * pitch + i * 128 + ((thread % 8) ^ (i % 8)) * 16);
      }
    }
  }
}

// x += (P or dS)^T (dO or Q), of the 16 queries of each step; streamed: dO or Q as columns.
template <class Op, int kCount, int kSteps>
__device__ __forceinline__ void issue_sum(float (&x)[kCount], const uint32_t (&by)[kSteps][4],
                                          uint64_t streamed, int begin, int end) {
#pragma unroll
  for (int m = begin; m < end; ++m)
    Op::template Wgmma<kCount * 2>::template rs<1>(x, by[m], streamed + m * (2048 / 16), 1);
  ptx::wgmma_commit();
}

// The blocks of queries of a consumer, and those where it has pairs to hide. With one tile they are
// counted here: [full_begin, full_end) see all of its 64 keys.
template <class C>
struct Blocks {
  int begin, end, iters, full_begin, full_end, block;

  __device__ __forceinline__ Blocks(const BackwardArgs& a, const KeyTile& tile, int w)
      : begin(ptx::redux_max(tile.begin)),
        end(ptx::redux_max(tile.end)),
        iters((end - begin) * (a.p.heads_q / a.p.heads_k)),
        block(begin) {
    const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
    const int first_key = tile.row + w * 64;
    const int first_query = max(first_key + 64 - window.after, 0);
    const bool all = first_key + 64 <= tile.seq_k;
    full_begin = ptx::redux_max(all ? (first_query + C::kBlockQ - 1) / C::kBlockQ : INT32_MAX);
    full_end = ptx::redux_max(max(first_key - window.before + 1, 0) / C::kBlockQ);
  }
  __device__ __forceinline__ void read(const BackwardStorage<C>&, uint32_t) {}
  __device__ __forceinline__ bool cut(int) const { return block < full_begin || block >= full_end; }
  __device__ __forceinline__ bool first() const { return false; }
  __device__ __forceinline__ bool more(int iter) const { return iter < iters; }
  __device__ __forceinline__ int index() const { return block; }
  __device__ __forceinline__ void next() {
    if (++block == end) block = begin;
  }
};
// With many tiles the loader decides, `block_and_flags`.
template <class C>
struct FlaggedBlocks {
  int flags = 0;

  __device__ __forceinline__ FlaggedBlocks(const BackwardArgs&, const KeyTile&, int) {}
  __device__ __forceinline__ void read(const BackwardStorage<C>& shared, uint32_t stage) {
    flags = ptx::redux_max(shared.queue.block[stage]);
  }
  __device__ __forceinline__ bool cut(int w) const { return flags >> (29 + w) & 1; }
  __device__ __forceinline__ bool first() const { return flags >> 27 & 1; }
  __device__ __forceinline__ bool more(uint32_t) const { return !(flags >> 28 & 1); }
  __device__ __forceinline__ int index() const { return flags & ((1 << 27) - 1); }
  __device__ __forceinline__ void next() {}
};

// The work of consumer w on a tile of keys.
template <class Op, class C, bool kVarlen, bool kSoftcap>
struct Consumer {
  static constexpr int kHeadDim = C::kHeadDim, kHeadDimV = C::kHeadDimV;
  static constexpr int kBlockQ = C::kBlockQ, kBlockK = C::kBlockK;
  static constexpr int kStages = C::kStages;
  // P of 128 queries becomes an operand in two parts, the second after dS of the first has freed
  // registers.
  static constexpr int kParts = kBlockQ == 128 && !kSoftcap ? 2 : 1;
  using Iter = std::conditional_t<C::kManyTiles, uint32_t, int>;
  using MmaS = typename Op::template Wgmma<kBlockQ>;
  using MmaDq = typename Op::template Wgmma<C::kDqColumns>;

  BackwardStorage<C>& shared;
  const BackwardArgs& a;
  const int w;
  // In shared memory, since registers are scarce.
  const KeyTile& tile;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float (&dk)[kHeadDim / 2], (&dv)[kHeadDimV / 2];
  float prob[kBlockQ / 2], dp[kBlockQ / 2];
  uint32_t p[kBlockQ / 16][4], ds[kBlockQ / 16][4];  // P^T and dS^T as operands, per 16 queries
  uint64_t k_rows, v_rows, q_rows, dout_rows;        // descriptors of operands: rows as they are,
  uint64_t q_columns, dout_columns, ds_rows, k_columns;  // or transposed
  std::conditional_t<C::kManyTiles, FlaggedBlocks<C>, Blocks<C>> blocks;

  __device__ __forceinline__ static uint32_t address(const void* x) {
    return ptx::shared_address(x);
  }

  __device__ __forceinline__ Consumer(BackwardStorage<C>& shared_, const BackwardArgs& a_, int w_,
                                      const KeyTile& tile_, float (&dk_)[kHeadDim / 2],
                                      float (&dv_)[kHeadDimV / 2])
      : shared(shared_),
        a(a_),
        w(w_),
        tile(tile_),
        dk(dk_),
        dv(dv_),
        k_rows(ptx::wgmma_descriptor(address(shared.k + w * 8192), 16, 1024)),
        v_rows(ptx::wgmma_descriptor(address(shared.v + w * 8192), 16, 1024)),
        q_rows(ptx::wgmma_descriptor(address(shared.q), 16, 1024)),
        dout_rows(ptx::wgmma_descriptor(address(shared.dout), 16, 1024)),
        q_columns(ptx::wgmma_descriptor(address(shared.q), kBlockQ * 128, 1024)),
        dout_columns(ptx::wgmma_descriptor(address(shared.dout), kBlockQ * 128, 1024)),
        ds_rows(
            ptx::wgmma_descriptor(address(shared.ds) + (C::kSplitRows ? w * 8192 : 0), 16, 1024)),
        k_columns(ptx::wgmma_descriptor(address(shared.k) + w * (C::kSplitRows    ? 0
                                                                 : C::kBoxes == 1 ? 64
                                                                                  : kBlockK * 128),
                                        kBlockK * 128, 1024)),
        blocks(a, tile, w) {}

  // The addresses that this lane reads.
  __device__ __forceinline__ uint32_t lse() const { return address(shared.lse) + lane % 4 * 8; }
  __device__ __forceinline__ uint32_t delta() const { return address(shared.delta) + lane % 4 * 8; }

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(address(&barrier));
  }

  // x^T = (rows of K or V) (rows of Q or dO)^T
  __device__ __forceinline__ void issue_product(float (&x)[kBlockQ / 2], uint64_t mine,
                                                uint64_t streamed, int columns) {
#pragma unroll
    for (int d = 0; d < columns / 16; ++d)
      MmaS::template ss<0>(x, mine + (d / 4 * kBlockK * 128 + d % 4 * 32) / 16,
                           streamed + (d / 4 * kBlockQ * 128 + d % 4 * 32) / 16, d > 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void pack(int begin, int end) {
#pragma unroll
    for (int e = begin * 8; e < end * 8; e += 2)
      p[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
  }

  // P below a softcap as operand of dV; for dS it is multiplied by the slope.
  __device__ __forceinline__ void put_capped(int e, float first, float second) {
    p[e / 8][e / 2 % 4] = Op::pack2(first, second);
    prob[e] = first * slope_of(prob[e]);
    prob[e + 1] = second * slope_of(prob[e + 1]);
  }

  __device__ __forceinline__ void issue_scores(float (&s)[kBlockQ / 2], Iter iter) {
    wait_for(shared.q_full[iter % kStages], iter / kStages);
    ptx::wgmma_fence();
    issue_product(s, k_rows, q_rows + iter % kStages * (C::kQBytes / 16), kHeadDim);
  }

  // Issues dP^T; P^T is computed meanwhile; on return all products are complete.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockQ / 2], Iter iter) {
    const uint32_t stage = iter % kStages;
    wait_for(shared.dout_full[stage], iter / kStages);
    ptx::wgmma_fence();
    issue_product(dp, v_rows, dout_rows + stage * (C::kDoutBytes / 16), kHeadDimV);
    blocks.read(shared, stage);
    // Computed before S^T arrives: a wait of the exponentials would be on the critical path.
    // A softcap alone bounds scores.
    const bool large = (!kSoftcap || C::kHasBiasMask) && flag_of(lse() + stage * (kBlockQ * 4));
    const bool cut = blocks.cut(w) || large;
    ptx::wgmma_wait<1>();
    ptx::wgmma_tie(s);
    if constexpr (kSoftcap) {
#pragma unroll
      for (int e = 0; e < kBlockQ / 2; ++e) {
        prob[e] = tanh_code(s[e] * a.cap_inner);
      }
    }
    if constexpr (C::kHasBiasMask) {
      const int pair_stage = iter % C::kBiasMaskStages;
      if (C::kBiasStaged || a.bias_tiles)
        wait_for(shared.bias_full[pair_stage], iter / C::kBiasMaskStages);
      uint32_t bias;
      if constexpr (C::kBiasStaged)
        bias = address(shared.bias_mask[pair_stage]);
      else
        bias = address(shared.ds[pair_stage]) + w * (kBlockQ * 128);
      const uint32_t rows = lse() + stage * (kBlockQ * 4);
      constexpr auto exponentiate = [](const auto&... given) {
        exponentiate_bias<Op, C, kBlockQ / 2>(given...);
      };
      if constexpr (kSoftcap) {  // each P becomes an operand at once: registers are scarce
        const float limit = large ? 1.f : INFINITY;
        bool shown[2] = {true, true};
        if (a.p.bias_mask.mask != nullptr) {
          shown[0] = shows_key(a, tile, w, iter, 0);
          shown[1] = shows_key(a, tile, w, iter, 1);
        }
        const auto capped = [&](int e) { return tanh_of(prob[e]); };
        const auto put = [&](int e, float first, float second) {
          put_capped(e, shown[e / 2 % 2] ? fminf(first, limit) : 0.f,
                     shown[e / 2 % 2] ? fminf(second, limit) : 0.f);
        };
        exponentiate(capped, a.cap_outer, put, a, tile, rows, bias, w, iter);
      } else {
        const auto raw = [&](int e) { return s[e]; };
        const auto put = [&](int e, float first, float second) {
          prob[e] = first;
          prob[e + 1] = second;
        };
        exponentiate(raw, a.exp_scale, put, a, tile, rows, bias, w, iter);
        hide_masked<C>(prob, a, tile, bias, w, iter);
      }
    }
#pragma unroll
    for (int n = 0; n < (C::kHasBiasMask ? 0 : kBlockQ / 8); ++n) {
      const float2 row = ptx::ld_shared_f2(lse() + stage * (kBlockQ * 4) + n * 32);
#pragma unroll
      for (int e = n * 4; e < n * 4 + 4; ++e) {
        const float offset = e % 2 == 0 ? row.x : row.y;
        if constexpr (kSoftcap)
          s[e] = ptx::ex2_approx(fmaf(tanh_of(prob[e]), a.cap_outer, -offset));
        else
          prob[e] = ptx::ex2_approx(fmaf(s[e], a.exp_scale, -offset));
      }
    }
    const auto hide_outside = [&](auto& x) {
      hide(x, window_of(a.p, tile.seq_q, tile.seq_k), tile.row + w * 64 + warp * 16 + lane / 4,
           blocks.index() * kBlockQ + lane % 4 * 2);
    };
    if constexpr (!kSoftcap) {
      if (cut) {
        limit_probabilities(prob);
        hide_outside(prob);
      }
    }
    if constexpr (kSoftcap) {
      if constexpr (!C::kHasBiasMask) {
#pragma unroll
        for (int e = 0; e < kBlockQ / 2; e += 2) put_capped(e, s[e], s[e + 1]);
      }
      if (cut) {  // S no longer needs registers
        hide_outside(prob);
        hide_outside(p);
      }
      ptx::wgmma_tie(prob);
    } else {
      ptx::wgmma_tie(prob);
      pack(0, kBlockQ / 16 / kParts);
    }
    blocks.next();
    ptx::schedule_fence(prob[kBlockQ / 2 - 1]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dp);
  }

  // Issues dV and makes dS^T an operand.
  __device__ __forceinline__ void issue_dv(Iter iter) {
    const uint32_t stage = iter % kStages;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      constexpr int kSteps = kBlockQ / 16 / kParts;
      const int first = part * kSteps;
      if (part > 0) pack(first, first + kSteps);
      ptx::wgmma_fence();
      issue_sum<Op>(dv, p, dout_columns + stage * (C::kDoutBytes / 16), first, first + kSteps);
#pragma unroll
      for (int n = first * 2; n < (first + kSteps) * 2; ++n) {
        const float2 row = ptx::ld_shared_f2(delta() + stage * (kBlockQ * 4) + n * 32);
#pragma unroll
        for (int e = n * 4; e < n * 4 + 4; e += 2) {
          prob[e] *= dp[e] + row.x;
          prob[e + 1] *= dp[e + 1] + row.y;
          ds[e / 8][e / 2 % 4] = Op::pack2(prob[e], prob[e + 1]);
        }
      }
    }
    if constexpr (C::kBiasStaged)
      leave_staged(prob, a, StagedBias<C>(address(shared.bias_mask[iter % C::kBiasMaskStages]), w));
  }

  __device__ __forceinline__ void share_ds(Iter iter) {
    // Addresses are recomputed: registers are scarcer than integer instructions.
    const uint32_t thread = opaque(threadIdx.x), matrix_row = thread % 8;
    const uint32_t ds_store = address(shared.ds) + w * (kBlockQ * 128) +
                              (matrix_row + thread % 32 / 16 * 8) * 128 +
                              ((thread / 32 % 4 * 2 + thread / 8 % 2) ^ matrix_row) * 16;
    poison_pieces(ds_store + iter % C::kDsStages * C::kDsBytes, kBlockQ / 16, 2048);
#pragma unroll
    for (int m = 0; m < kBlockQ / 16; ++m)
      ptx::stmatrix_x4_trans(ds_store + iter % C::kDsStages * C::kDsBytes + m * 2048, ds[m]);
    ptx::fence_proxy_async();
    if constexpr (C::kBiasStaged) release(shared.ds_done[iter % C::kBiasMaskStages]);
  }

  __device__ __forceinline__ void issue_dk(Iter iter) {
    ptx::wgmma_fence();
    issue_sum<Op>(dk, ds, q_columns + iter % kStages * (C::kQBytes / 16), 0, kBlockQ / 16);
  }

  __device__ __forceinline__ void issue_dq(float (&dq)[C::kDqColumns / 2], Iter iter) {
    const uint64_t rows = ds_rows + iter % C::kDsStages * (C::kDsBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockK / 16; ++n)
      MmaDq::template ss<1>(dq, rows + (n / 4 * kBlockQ * 128 + n % 4 * 32) / 16,
                            k_columns + n * (2048 / 16), n > 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void write_dq(const float (&dq)[C::kDqColumns / 2], Iter iter) {
    const Iter stage = iter % C::kDqStages;
    const uint32_t thread = opaque(threadIdx.x);
    const uint32_t dq_store = address(shared.dq[0][w]) + thread % 128 * 16;
    wait_for(shared.dq_empty[stage][w], iter / C::kDqStages + 1);
    poison_pieces(dq_store + stage * (C::kConsumers * C::kDqFloats * 4), C::dq_columns(w) / 8,
                  2048);
#pragma unroll
    for (int j = 0; j < C::kDqColumns / 8; ++j) {
      if (j * 8 >= C::dq_columns(w)) break;
      ptx::st_shared(dq_store + stage * (C::kConsumers * C::kDqFloats * 4) + j * 2048,
                     make_uint4(__float_as_uint(dq[j * 4]), __float_as_uint(dq[j * 4 + 1]),
                                __float_as_uint(dq[j * 4 + 2]), __float_as_uint(dq[j * 4 + 3])));
    }
    ptx::fence_proxy_async();
    release(shared.dq_full[stage][w]);
  }

  __device__ __forceinline__ void begin_block(Iter iter) {
    float s[kBlockQ / 2];
    issue_scores(s, iter);
    exponentiate(s, iter);
    issue_dv(iter);
  }

  __device__ __forceinline__ void end_block(Iter iter) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dk);
    release(shared.q_empty[iter % kStages]);
  }

  // All blocks of a tile that has some. iter: number of blocks done, before and after the tile.
  __device__ __forceinline__ void run(uint32_t& iter) {
    Iter i = iter;
    if constexpr (!C::kManyTiles) {
      wait_for(shared.kv_full, 0);
      begin_block(0);
      share_ds(0);
      issue_dk(0);
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(dv);
      release(shared.ds_full);
      if constexpr (C::kHasBiasMask && !C::kBiasStaged) release(shared.ds_done[0]);
      release(shared.dout_empty[0]);
      end_block(0);
      i = 1;
    }
#pragma unroll 1
    for (; blocks.more(i); ++i) {
      float dq[C::kDqColumns / 2];
      begin_block(i);
      // The other consumer has shared dS of the previous block, and has read the data that is
      // overwritten next.
      wait_for(shared.ds_full, i - 1);
      share_ds(i);
      if constexpr (kBlockQ == 128 || kSoftcap) {  // frees the registers of P
        ptx::wgmma_wait<0>();
        ptx::wgmma_tie(dv);
      }
      // With many tiles the first block also computes dQ, of old data: a branch would separate the
      // products.
      issue_dq(dq, i - 1);
      issue_dk(i);
      ptx::wgmma_wait<1>();
      ptx::wgmma_tie(dq);
      ptx::wgmma_tie(dv);
      release(shared.ds_full);
      if constexpr (C::kHasBiasMask && !C::kBiasStaged) release(shared.ds_done[i % C::kDsStages]);
      release(shared.dout_empty[i % kStages]);
      if (!blocks.first()) write_dq(dq, i - 1);
      end_block(i);
    }
    iter = i;
    float dq[C::kDqColumns / 2];
    wait_for(shared.ds_full, iter - 1);
    issue_dq(dq, iter - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(dq);
    if constexpr (C::kManyTiles) release(shared.queue.kv_empty);
    write_dq(dq, iter - 1);
    ptx::barrier_sync(kAllConsumers, 128 * C::kConsumers);  // K and dS have been read
  }
};

// Stages dK and dV in shared memory and stores them; iter: number of blocks done.
template <class Op, class C, bool kVarlen>
__device__ __forceinline__ void write_gradients(BackwardStorage<C>& shared, const BackwardArgs& a,
                                                int w, const KeyTile& tile,
                                                const float (&dk)[C::kHeadDim / 2],
                                                const float (&dv)[C::kHeadDimV / 2],
                                                uint32_t iter) {
  constexpr int kBlockQ = C::kBlockQ, kBlockK = C::kBlockK;
  const uint32_t lane = threadIdx.x % 32;
  const auto address = [](const void* x) { return ptx::shared_address(x); };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(address(&barrier));
  };
  const FlashsciBackwardParams& given = a.p;
  const int row = tile.row + w * 64;
  const auto send_dv = [&](uint32_t source, int pitch) {
    send_rows<C::kBoxesV, kVarlen>(source, pitch, a.dv, given.dv, given.dv_strides,
                                   given.head_dim_v, tile, row);
  };
  const auto send_dk = [&](uint32_t source, int pitch) {
    send_rows<C::kBoxes, kVarlen>(source, pitch, a.dk, given.dk, given.dk_strides, given.head_dim,
                                  tile, row);
  };
  if constexpr (C::kManyTiles) {
    // dV goes out through dS. dK goes there too if there is room, else through dQ once that has
    // been copied. (More than 196 KiB of shared memory cost 8%.)
    const uint32_t staged_dv = address(shared.ds[0]) + w * (kBlockQ * 128);
    const uint32_t staged_dk = C::kNarrow ? staged_dv + C::kDsBytes : address(shared.dq[0][w]);
    constexpr int kDkPitch = 64 * 128;
    stage_rows<Op>(dv, 1.f, staged_dv, C::kDsBytes);
    if constexpr (!C::kNarrow) wait_for(shared.dq_empty[0][w], iter + 1);
    stage_rows<Op>(dk, given.scale, staged_dk, kDkPitch);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kConsumer + w, 128);
    send_dv(staged_dv, C::kDsBytes);
    send_dk(staged_dk, kDkPitch);
    release(shared.queue.tile_empty[iter >> 30 & 1]);
  } else {
    constexpr int kPitch = kBlockK * 128;
    stage_rows<Op>(dv, 1.f, address(shared.v) + w * 8192, kPitch);
    stage_rows<Op>(dk, given.scale, address(shared.k) + w * 8192, kPitch);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kConsumer + w, 128);
    send_dv(address(shared.v) + w * 8192, kPitch);
    send_dk(address(shared.k) + w * 8192, kPitch);
  }
}

// A tile of keys. iter: number of blocks done, and of tiles in the upper two bits, which saves a
// register.
template <class Op, class C, bool kVarlen, bool kSoftcap>
__device__ __forceinline__ void consume_tile(BackwardStorage<C>& shared, const BackwardArgs& a,
                                             int w, uint32_t& iter) {
  float dk[C::kHeadDim / 2], dv[C::kHeadDimV / 2];
#pragma unroll
  for (int e = 0; e < C::kHeadDim / 2; ++e) dk[e] = 0.f;
#pragma unroll
  for (int e = 0; e < C::kHeadDimV / 2; ++e) dv[e] = 0.f;
  const KeyTile& tile = shared.tile[C::kManyTiles ? iter >> 30 & 1 : 0];
  if constexpr (C::kManyTiles) {
    wait_for(shared.kv_full, iter >> 30);
    ptx::bulk_wait_read<0>();  // dK and dV of the previous tile have left their buffers
    ptx::barrier_sync(kConsumer + w, 128);
  }
  // Equal in all lanes, which the compiler learns only from redux: wgmma needs uniform control
  // flow.
  if (ptx::redux_max(tile.end - tile.begin) > 0)
    Consumer<Op, C, kVarlen, kSoftcap>(shared, a, w, tile, dk, dv).run(iter);
  else if constexpr (C::kManyTiles) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.queue.kv_empty));
  }
  write_gradients<Op, C, kVarlen>(shared, a, w, tile, dk, dv, iter);
}

template <class Op, class C, bool kVarlen, bool kSoftcap>
__device__ __forceinline__ void consume(BackwardStorage<C>& shared, const BackwardArgs& a, int w) {
  uint32_t iter = 0;
  if constexpr (C::kManyTiles) {
    w = ptx::redux_max(w);
#pragma unroll 1
    for (;; iter += 1u << 30) {
      const uint32_t slot = iter >> 30 & 1;
      wait_for(shared.queue.tile_full[slot], iter >> 31);
      if (ptx::redux_max(shared.tile[slot].row) < 0) break;
      consume_tile<Op, C, kVarlen, kSoftcap>(shared, a, w, iter);
    }
  } else {
    consume_tile<Op, C, kVarlen, kSoftcap>(shared, a, w, iter);
  }
  ptx::bulk_wait_read<0>();
}

}  // namespace flashsci::sm90::bwd
