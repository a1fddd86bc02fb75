// What the consumer warpgroups of the sm90 forward on 8-bit floats have in common, whatever the order
// in which they take products and softmax: the walk over tiles, barriers, masks, the stores.
#pragma once
#include <cstdint>

#include "../../core/dtype_bf16.cuh"
#include "../../core/dtype_f16.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/qgmma.cuh"
#include "../../ptx/redux.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../../ptx/wgmma.cuh"
#include "../fwd/epilogue.cuh"
#include "config.cuh"
#include "softmax.cuh"

namespace flashsci::sm90::fp8 {

// The tile that a consumer is at.
template <class C>
struct Work {
  const TileInfo& info;
  Window seen;
  fwd::Blocks<C> own;        // that this consumer's rows see
  int full_begin, full_end;  // keys that all of them see
  float scale;               // of q k^T: the call's times that of these rows of q
};

// 64 query rows of tile after tile.
template <class C, bool kVarlen>
struct ConsumerState {
  static constexpr int kBlockK = C::kBlockK, kStages = C::kStages;
  static constexpr int kHeadDim = C::kHeadDim, kHeadDimV = C::kHeadDimV;

  Storage<C>& shared;
  const Args& a;
  const int w;  // the consumer
  const int lane;

  float o[kHeadDimV / 2];  // output, unnormalised
  RowStatistics rows;
  uint32_t head = 0;   // blocks behind us: they tell stage and phase of the next
  uint32_t tiles = 0;  // tiles behind us
  int searching;       // some row of the warp has seen no key yet, or scores are capped

  __device__ __forceinline__ ConsumerState(Storage<C>& shared_, const Args& a_, int w_)
      : shared(shared_), a(a_), w(w_), lane(threadIdx.x % 32) {}

  // The warp's first row in the tile.
  __device__ __forceinline__ int warp_row() const { return w * 64 + threadIdx.x / 32 % 4 * 16; }

  // --- barriers

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
  }
  __device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) const {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
  }
  // Of block n, counted as `head` is.
  __device__ __forceinline__ void wait_k(uint32_t n) const {
    wait(shared.k_full[n % kStages], n / kStages);
  }
  __device__ __forceinline__ void wait_v(uint32_t n) const {
    wait(shared.turned_full[n % kStages], n / kStages);
  }
  __device__ __forceinline__ void release_k(uint32_t n) const {
    release(shared.k_empty[n % kStages]);
  }
  __device__ __forceinline__ void release_v(uint32_t n) const {
    release(shared.turned_empty[n % kStages]);
  }
  __device__ __forceinline__ void release_q() const {
    release(shared.q_empty[tiles % C::kQStages][w]);
  }
  // Blocks that this warpgroup's rows do not see.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (; count > 0; --count, ++head) {
      wait_k(head);
      release_k(head);
      wait_v(head);
      release_v(head);
    }
  }

  // --- descriptors, of a stage

  // In uniform registers, and with them what is added to them. kRowBytes: of the operand; first: of its
  // first stage.
  template <int kRowBytes>
  __device__ __forceinline__ uint64_t descriptor(const unsigned char* first, uint32_t bytes) const {
    const uint32_t base = ptx::shared_address(&shared);  // one register for all of them
    const uint32_t before =
        static_cast<uint32_t>(first - reinterpret_cast<unsigned char*>(&shared));
    return ptx::qgmma_descriptor<kRowBytes>(0) |
           static_cast<uint32_t>(ptx::redux_max(static_cast<int>((base + before + bytes) >> 4)));
  }
  __device__ __forceinline__ uint64_t q_tile() const {
    return descriptor<C::kSpan>(shared.q[0][0],
                                (tiles % C::kQStages * C::kConsumers + w) * C::kQBytes);
  }
  __device__ __forceinline__ uint64_t k_tile(uint32_t stage) const {
    return descriptor<C::kSpan>(shared.k[0], stage * C::kKBytes);
  }
  __device__ __forceinline__ uint64_t turned_tile(uint32_t stage) const {
    return descriptor<kBlockK>(shared.v_turned[0], stage * C::kVBytes);
  }

  // --- scores

  // From q k^T to what a factor takes to powers of two; returns the factor.
  template <int kCount>
  __device__ __forceinline__ float modify_scores(float (&s)[kCount], float scale) {
    if (a.p.softcap != 0.f) {
      const float inner = scale * a.inverse_softcap;
#pragma unroll
      for (int e = 0; e < kCount; ++e) s[e] = a.p.softcap * tanh_accurate(inner * s[e]);
      return kLog2e;
    }
    const float factor = scale * kLog2e;
    if (factor > 0.f) return factor;
    // Where it is negative the largest score is not the largest product, and 0 times the -inf of a
    // hidden key is none.
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= factor;
    return 1.f;
  }
  // Scores of keys first_key ...
  template <int kCount>
  __device__ __forceinline__ void mask(float (&s)[kCount], const Work<C>& work, int first_key) {
    const int column = first_key + lane % 4 * 2, row = work.info.row + warp_row() + lane / 4;
    if (first_key + 2 * kCount > work.full_end)
      fwd::mask_scores<0, kCount, false>(s, work.seen, row, column);
    if (first_key < work.full_begin) fwd::mask_scores<0, kCount, true>(s, work.seen, row, column);
  }

  // Rows g and g + 8: of accumulators, or two numbers.
  template <int kCount>
  static __device__ __forceinline__ void multiply(float (&x)[kCount], const float (&alpha)[2]) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] *= alpha[kCount == 2 ? e : e >> 1 & 1];
  }
  // From q k^T to exponents that P may have. rescale(alpha): of what is on the offset until now.
  // Blocks that some rows do not see, or where a factor is to be a part of the scores, take longer.
  template <int kCount, class Rescale>
  __device__ __forceinline__ void find_exponents(float (&s)[kCount], const Work<C>& work,
                                                 int first_key, float key_scale,
                                                 const Rescale& rescale) {
    float factor = work.scale * key_scale * kLog2e;
    const bool plain = searching == 0 && factor > 0.f && first_key + 2 * kCount <= work.full_end &&
                       first_key >= work.full_begin;
    if (__builtin_expect(!plain, false)) {
      factor = modify_scores(s, work.scale * key_scale);
      mask(s, work, first_key);
      searching = begin_rows(s, rows, factor) || a.p.softcap != 0.f;
    }
    exponents(s, rows, factor);
    if (__builtin_expect(outgrow(s), false)) {
      float alpha[2];
      follow(s, rows, alpha);
      rescale(alpha);
    }
  }

  // --- tiles

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < kHeadDimV / 2; ++e) o[e] = 0.f;
    searching = 1;
    rows.sum[0] = rows.sum[1] = 0.f;
    rows.row_max_log2[0] = rows.row_max_log2[1] = fwd::kUninitializedMax;
  }
  __device__ __forceinline__ void write(const TileInfo& tile) {
    const int seq_q = kVarlen ? tile.seq_q : a.p.seq_q;
    auto& staging = shared.staging[warp_row() / 16];
    if (a.out_is_fp16)
      fwd::write_output<Float16, C, kVarlen>(o, rows, a, tile, seq_q, warp_row(), staging);
    else
      fwd::write_output<BFloat16, C, kVarlen>(o, rows, a, tile, seq_q, warp_row(), staging);
  }
  // attend(work): softmax and products of the blocks that this consumer's rows see, from the last to
  // the first, of which there is one. It moves `head`, and releases Q.
  template <class Attend>
  __device__ __forceinline__ void run(const Attend& attend) {
#pragma unroll 1
    for (;; ++tiles) {
      const uint32_t q_stage = tiles % C::kQStages;
      wait(shared.q_full[q_stage][w], tiles / C::kQStages);
      const TileInfo& info = shared.tile_info[tiles % kTileSlots];
      // The same in all lanes, which only redux tells the compiler: wgmma wants uniform flow.
      const int row = ptx::redux_max(info.row);
      if (row < 0) break;
      const int seq_q = kVarlen ? ptx::redux_max(info.seq_q) : a.p.seq_q;
      const int seq_k = kVarlen ? ptx::redux_max(info.seq_k) : a.p.seq_k;
      const Window seen = fwd::window_of(a.p, seq_q, seq_k);
      const int first_row = row + w * 64;
      const fwd::Blocks<C> blocks(seen, row, C::kBlockQ, seq_q);  // of all consumers
      Work<C> work{info, seen, fwd::Blocks<C>(seen, first_row, 64, seq_q)};
      clear();
      if (work.own.first >= work.own.end) {
        release_q();
        skip(blocks.end - blocks.first);
      } else {
        work.full_begin = seen.begin(first_row + 63);
        work.full_end = max(seen.end(first_row), 0);
        const float* q_first = first_scale(a.q_scale, info, info.head, info.first_q);
        work.scale = a.p.scale * scale_of(a.q_scale, q_first, first_row);
        skip(blocks.end - work.own.end);
        attend(work);
        skip(work.own.first - blocks.first);
      }
      write(info);
    }
    ptx::bulk_wait_read<0>();
  }
};

}  // namespace flashsci::sm90::fp8
