// A consumer warpgroup of the sm90 forward on 8-bit floats: 64 query rows of tile after tile, from S
// to the stores.
//
// `Consumer::run` is the loop over tiles, `step` the work on a block of keys: S, its softmax, P as
// 8 bits, P V and the sums of P of this block alone, and those of all blocks in fp32. Nothing
// overlaps within a warpgroup, so that the product of a block can take the registers of its scores.
// Meanwhile the other warpgroups, which take turns, keep the tensor cores busy.
//
// With C::kFast the tensor core adds P V of all blocks to the output (`fast_steps`): P V of a block
// and S of the next are issued together.
#pragma once
#include <cstdint>

#include "../../core/dtype_bf16.cuh"
#include "../../core/dtype_f16.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/qgmma_wide.cuh"
#include "../../ptx/reduce.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "../fwd/epilogue.cuh"
#include "config.cuh"
#include "softmax.cuh"
#include "split_tail.cuh"

namespace flashsci::sm90::fp8 {

template <class C, bool kVarlen>
struct Consumer {
  static constexpr int kBlockK = C::kBlockK, kStages = C::kStages;
  static constexpr int kHeadDim = C::kHeadDim, kHeadDimV = C::kHeadDimV;
  // Columns of V at a time.
  static constexpr int kChunk = 64, kChunks = kHeadDimV / kChunk;
  using Values = float[kChunk / 2];       // their product,
  using Product = float[kChunk / 2 + 4];  // and sums of P
  static constexpr int kFirst =
      C::kFast || kHeadDim < 128 ? kHeadDim : 128;  // columns of q k^T at a time, and of the rest
  using Rest = float[kFirst < kHeadDim ? kBlockK / 2 : 1];
  // Whether O is rescaled during P V of the block, instead of before its exponentials.
  static constexpr bool kLate = kHeadDimV > 64 && !C::kFast;
  using Output = float[kHeadDimV / 2];

  Storage<C>& shared;
  const Args& a;
  const int w;                      // the consumer
  const int lane, warp_row;         // the warp's first row in the tile
  const int row_in_tile;            // this lane's first row
  uint64_t q_desc, k_desc, v_desc;  // of the first stages; V: transposed

  float s[kBlockK / 2];  // scores, then P
  // Output, unnormalised; kFast: without the scale of V, then the sums of P of a block.
  float o[kHeadDimV / 2 + (C::kFast ? 4 : 0)];
  uint32_t p[kBlockK / 32][4];  // P as operand, per 32 keys
  RowStatistics rows;
  bool grew = false;   // whether offsets of this warp's rows grew in the last block,
  float alpha[2];      // and the factor of O in that case
  uint32_t head = 0;   // blocks done: they give stage and phase of the next
  uint32_t tiles = 0;  // tiles done

  // Of the current tile.
  struct Work {
    const TileInfo& info;
    Window seen;
    fwd::Blocks<C> own;          // blocks that this consumer's rows see
    int plain_begin, plain_end;  // blocks that all of its rows see as a whole
    float scale;  // of q k^T, and of these rows of q; without softcap, in powers of 2
  };

  __device__ __forceinline__ Consumer(Storage<C>& shared_, const Args& a_, int w_)
      : shared(shared_),
        a(a_),
        w(w_),
        lane(threadIdx.x % 32),
        warp_row(w * 64 + threadIdx.x / 32 % 4 * 16),
        row_in_tile(warp_row + lane / 4),
        q_desc(ptx::qgmma_descriptor<C::kSpan>(ptx::shared_address(shared.q[0][w]))),
        k_desc(ptx::qgmma_descriptor<C::kSpan>(ptx::shared_address(shared.k))),
        v_desc(ptx::qgmma_descriptor<kBlockK>(ptx::shared_address(shared.v_turned))) {}

  // --- barriers

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
  __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  }
  // The consumers take turns at [P V of a block, S of the next]. Otherwise all would drift to the
  // same step, and wait for the same unit. One warpgroup waits, one arrives.
  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(1 + w, 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::barrier_arrive(w + 1 == C::kConsumers ? 1 : w + 2, 256);
  }
  // Skips blocks that this warpgroup's rows do not see.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (; count > 0; --count, ++head) {
      wait(shared.k_full[head % kStages], head / kStages);
      release(shared.k_empty[head % kStages]);
      wait(shared.turned_full[head % kStages], head / kStages);
      release(shared.turned_empty[head % kStages]);
      pass_turn();
      take_turn();
    }
  }

  // --- products

  // Columns [kBegin, kEnd) of q and k.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void issue_qk(float (&scores)[kBlockK / 2]) {
    const uint64_t q_tile = q_desc + tiles % C::kQPlaces * (C::kConsumers * C::kQBytes / 16);
    const uint64_t k_tile = k_desc + head % kStages * (C::kKBytes / 16);
#pragma unroll
    for (int d = kBegin; d < kEnd; d += 32) {
      const int box = d / C::kSpan, column = d % C::kSpan;
      ptx::Qgmma<kBlockK>::ss(scores, q_tile + (box * C::QBox::kBytes + column) / 16,
                              k_tile + (box * C::KBox::kBytes + column) / 16, d > kBegin);
    }
  }
  // S = q k^T; returns this block's scales. No sum of the tensor cores runs over more than 128
  // columns.
  __device__ __forceinline__ float2 begin_scores(Rest& rest) {
    wait(shared.k_full[head % kStages], head / kStages);
    return issue_scores(rest);
  }
  __device__ __forceinline__ float2 issue_scores(Rest& rest) {
    ptx::wgmma_fence();
    issue_qk<0, kFirst>(s);
    if constexpr (kFirst < kHeadDim) issue_qk<kFirst, kHeadDim>(rest);
    ptx::wgmma_commit();
    pass_turn();
    return shared.scales[head % kStages];
  }
  __device__ __forceinline__ void end_scores(Rest& rest, bool last) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_tie(s);
    if constexpr (kFirst < kHeadDim) {
      ptx::wgmma_tie(rest);
#pragma unroll
      for (int e = 0; e < kBlockK / 2; ++e) s[e] += rest[e];
    }
    release(shared.k_empty[head % kStages]);
    if (last) release(shared.q_empty[tiles % C::kQStages][w]);
  }
  // P V of this block and columns [kChunk chunk, ...); the last chunk includes the rows after V: a
  // column with the sums of P, which lane 0 of a quad has, and zeros, which the other lanes have.
  __device__ __forceinline__ void issue_pv(Product& product, int chunk) {
    const uint64_t v_tile = v_desc + head % kStages * (C::kTurnedBytes / 16);
#pragma unroll
    for (int n = 0; n < kBlockK / 32; ++n) {
      const uint64_t v = v_tile + (chunk * kChunk * kBlockK + n * 32) / 16;
      if (chunk + 1 < kChunks)
        ptx::Qgmma<kChunk>::rs(values_of(product), p[n], v, n > 0);
      else
        ptx::Qgmma<kChunk + 8>::rs(product, p[n], v, n > 0);
    }
    ptx::wgmma_commit();
  }
  static __device__ __forceinline__ Values& values_of(Product& product) {
    return reinterpret_cast<Values&>(product);
  }
  // O += P V v_scale, and the sums of P: products of one block in the tensor core, the sum over
  // blocks in fp32. The sum of a chunk is taken during the product of the next.
  __device__ __forceinline__ void add_values(float v_scale) {
    Product product[2];
    ptx::wgmma_fence();
    issue_pv(product[0], 0);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      Product& own = product[chunk % 2];
      if (chunk + 1 < kChunks) {
        if (chunk > 0) ptx::wgmma_fence();  // sums have read the next product's registers
        issue_pv(product[(chunk + 1) % 2], chunk + 1);
        if (kLate && chunk == 0) follow_offsets();
        ptx::wgmma_wait<1>();
        ptx::wgmma_tie(values_of(own));
      } else {
        ptx::wgmma_wait<0>();
        release(shared.turned_empty[head % kStages]);
        ptx::wgmma_tie(own);
        rows.sum[0] += own[kChunk / 2], rows.sum[1] += own[kChunk / 2 + 2];
      }
#pragma unroll
      for (int e = 0; e < kChunk / 2; ++e) {
        float& sum = o[chunk * (kChunk / 2) + e];
        sum = fmaf(own[e], v_scale, sum);
      }
    }
  }

  // kFast: O += P V; the sums of P, which end_values has left at zero, are those of this block.
  __device__ __forceinline__ void issue_values() {
    static_assert(!C::kFast || kHeadDimV == 256, "two products of 128 columns");
    auto& first = reinterpret_cast<float (&)[64]>(o[0]);
    auto& second = reinterpret_cast<float (&)[68]>(o[64]);
    const uint64_t v_tile = v_desc + head % kStages * (C::kTurnedBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockK / 32; ++n) {
      const uint64_t v = v_tile + n * 32 / 16;
      ptx::Qgmma<128>::rs(first, p[n], v, 1);
      ptx::Qgmma<136>::rs(second, p[n], v + 128 * kBlockK / 16, 1);
    }
    ptx::wgmma_commit();
  }
  // When the products of a block are done: `block` others were before it.
  __device__ __forceinline__ void end_values(uint32_t block) {
    ptx::wgmma_tie(o);
    release(shared.turned_empty[block % kStages]);
    float &sum0 = o[kHeadDimV / 2], &sum1 = o[kHeadDimV / 2 + 2];
    rows.sum[0] += sum0, rows.sum[1] += sum1;
    // Zero; of a constant ptxas would make the products wait for each other (C7511).
    sum0 -= sum0, sum1 -= sum1;
  }
  __device__ __forceinline__ Output& output() { return reinterpret_cast<Output&>(o); }

  __device__ __forceinline__ void follow_offsets() {
    if (__builtin_expect(grew, 0)) {
#pragma unroll
      for (int e = 0; e < kHeadDimV / 2; ++e) o[e] *= alpha[e >> 1 & 1];
    }
  }

  // --- scores

  // Whether q k^T are the scores, up to a factor.
  __device__ __forceinline__ bool is_plain(const Work& work, int block, float factor) const {
    return a.p.softcap == 0.f && factor > 0.f && block >= work.plain_begin &&
           block < work.plain_end;
  }
  __device__ __forceinline__ void shape_scores(const Work& work, int block, float& factor) {
    if (a.p.softcap != 0.f || !(factor > 0.f)) factor = modify_scores(factor);
    if (block < work.plain_begin || block >= work.plain_end) mask(work, block);
  }
  // Turns q k^T into scores up to a factor; returns the factor that gives powers of two.
  __device__ __forceinline__ float modify_scores(float factor) {
    if (a.p.softcap != 0.f) {
      const float inner = factor * a.inverse_softcap;
#pragma unroll
      for (int e = 0; e < kBlockK / 2; ++e) s[e] = a.p.softcap * tanh_accurate(inner * s[e]);
      return kLog2e;
    }
    // A negative factor needs this: the largest score is then not the largest product. So does a
    // zero factor: 0 times the -inf of a hidden key is NaN.
#pragma unroll
    for (int e = 0; e < kBlockK / 2; ++e) s[e] *= factor;
    return 1.f;
  }
  __device__ __forceinline__ void mask(const Work& work, int block) {
    const int column = block * kBlockK + lane % 4 * 2, row = work.info.row + row_in_tile;
    if (block >= work.plain_end) fwd::mask_scores<0, kBlockK / 2, false>(s, work.seen, row, column);
    if (block < work.plain_begin) fwd::mask_scores<0, kBlockK / 2, true>(s, work.seen, row, column);
  }
  // S becomes P. Exponents that are too large although offsets have grown come from the roundings
  // of large scores: these are cut.
  __device__ __forceinline__ void softmax(float factor) {
    float maximum[2];
    lane_max(s, maximum);
    Exponent exponent{factor, {rows.row_max_log2[0], rows.row_max_log2[1]}};
    grew = outgrows(maximum, rows, factor);
    if (__builtin_expect(grew, 0)) {
      follow(maximum, rows, alpha, factor);
      if (!kLate) follow_offsets();
      exponent.offset[0] = rows.row_max_log2[0], exponent.offset[1] = rows.row_max_log2[1];
      if (outgrows(maximum, rows, factor)) {
#pragma unroll
        for (int e = 0; e < kBlockK / 2; ++e) s[e] = fminf(exponent.of(s[e], e), kLargestExponent);
        exponent = {1.f, {0.f, 0.f}};
      }
    }
    exponentials(s, exponent);
    pack(p, s);
  }

  // --- tiles

  __device__ __forceinline__ void step(const Work& work, int block) {
    Rest rest;
    const float2 scales = begin_scores(rest);
    float factor = work.scale * scales.x;  // during the product
    const bool plain = is_plain(work, block, factor);
    end_scores(rest, block == work.own.first);
    if (!plain) shape_scores(work, block, factor);
    softmax(factor);
    wait(shared.turned_full[head % kStages], head / kStages);
    take_turn();
    add_values(scales.y);
    ++head;
  }
  // Of all blocks, with C::kFast. passes: whether the turn ends with the last products.
  __device__ __forceinline__ void fast_steps(const Work& work, bool passes) {
    Rest rest;
    int block = work.own.end - 1;
    float factor = work.scale * begin_scores(rest).x;
    bool plain = is_plain(work, block, factor);
#pragma unroll 1
    for (;;) {
      end_scores(rest, block == work.own.first);
      if (!plain) shape_scores(work, block, factor);
      softmax(factor);
      wait(shared.turned_full[head % kStages], head / kStages);
      if (block == work.own.first) break;
      wait(shared.k_full[(head + 1) % kStages], (head + 1) / kStages);
      take_turn();
      issue_values();
      ++head, --block;
      factor = work.scale * issue_scores(rest).x;
      plain = is_plain(work, block, factor);
      ptx::wgmma_wait<1>();
      end_values(head - 1);
    }
    take_turn();
    issue_values();
    if (passes) pass_turn();
    ptx::wgmma_wait<0>();
    end_values(head);
    ++head;
  }
  // The scale of V, which has one of its own in each tile.
  __device__ __forceinline__ void scale_output(const TileInfo& tile) {
    const float* first = first_scale(a.v_scale, tile, tile.head_k, tile.first_k);
    const float v_scale = scale_of(a.v_scale, first, 0);
#pragma unroll
    for (float& x : output()) x *= v_scale;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& x : o) x = 0.f;
    rows.sum[0] = rows.sum[1] = 0.f;
    rows.row_max_log2[0] = rows.row_max_log2[1] = kUninitializedMax;
  }
  // Whether these are the sums of a whole tile.
  __device__ __forceinline__ bool gathered(const TileInfo& tile) {
    const int piece_of = ptx::redux_max(tile.piece_of);
    return piece_of < 0 ||
           gather<C>(output(), rows, a.tail, piece_of, tile.first_block == 0, warp_row / 16);
  }
  __device__ __forceinline__ void write(const TileInfo& tile) {
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q;
    auto& staging = shared.staging[warp_row / 16];
    if (a.out_is_fp16)
      fwd::write_output<Float16, C, kVarlen>(output(), rows, a, tile, seq_q, warp_row, staging);
    else
      fwd::write_output<BFloat16, C, kVarlen>(output(), rows, a, tile, seq_q, warp_row, staging);
  }

  __device__ __forceinline__ void run() {
    if (w == C::kConsumers - 1) pass_turn();  // to the first consumer
#pragma unroll 1
    for (;; ++tiles) {
      const uint32_t q_stage = tiles % C::kQStages;
      wait(shared.q_full[q_stage][w], tiles / C::kQStages);
      const TileInfo& info = shared.tile_info[tiles % kTileSlots];
      // Equal in all lanes, which the compiler learns only from redux: wgmma needs uniform control
      // flow.
      const int row = ptx::redux_max(info.row);
      if (row < 0) break;
      const int seq_q = kVarlen ? ptx::redux_max(info.seq_q) : a.p.seq_q;
      const int seq_k = kVarlen ? ptx::redux_max(info.seq_k) : a.p.seq_k;
      const Window seen = fwd::window_of(a.p, seq_q, seq_k);
      const int first_row = row + w * 64;
      const int first_block = ptx::redux_max(info.first_block);
      const int end_block = ptx::redux_max(info.end_block);
      const auto blocks_from = [&](int begin, int count) {
        return blocks_of<C, kVarlen>(seen, begin, count, seq_q, first_block, end_block);
      };
      const fwd::Blocks<C> blocks = blocks_from(row, C::kBlockQ);  // of all consumers
      Work work{info, seen, blocks_from(first_row, 64)};
      bool passed = false;
      clear();
      take_turn();
      if (work.own.first >= work.own.end) {
        release(shared.q_empty[q_stage][w]);
        skip(blocks.end - blocks.first);
      } else {
        work.plain_begin = (seen.begin(first_row + 63) + kBlockK - 1) / kBlockK;
        work.plain_end = max(seen.end(first_row), 0) / kBlockK;
        const float* q_first = first_scale(a.q_scale, info, info.head, info.first_q);
        work.scale = (a.p.softcap != 0.f ? 1.f : kLog2e) * a.p.scale *
                     scale_of(a.q_scale, q_first, first_row);
        skip(blocks.end - work.own.end);
        if constexpr (C::kFast) {
          passed = work.own.first == blocks.first;
          fast_steps(work, passed);
        } else {
#pragma unroll 1
          for (int block = work.own.end - 1; block >= work.own.first; --block) step(work, block);
        }
        skip(work.own.first - blocks.first);
      }
      if (!passed) pass_turn();
      if (C::kFast && work.own.first < work.own.end) scale_output(info);
      if (kVarlen || gathered(info)) write(info);
    }
    if (w == 0) take_turn();  // takes the last turn, so that the barrier ends balanced
    ptx::bulk_wait_read<0>();
  }
};

}  // namespace flashsci::sm90::fp8
