// An fp32 bias, or a mask, by pairs in the sm90 backward: tiles in separate buffers.
//
// Maths     As in bias_aliased.cuh; dbias in fp32.
// Roles     Warp 3 of the copying warpgroup brings a block's bias and mask. The consumers read them
//           element by element; each lane stores dS over the bias elements that it read. The warp
//           then copies dS into dbias, or adds it to a dbias that batches or heads share.
// Shared    Bias: boxes of 32 keys and all queries, 128-byte swizzle. Mask: boxes of 64 keys, by
//           64-byte swizzle. Both without bank conflicts for the layout of S^T.
// Pipeline  Two stages at D 64, one at D 128: there the bias of a block is loaded once the copy
//           engine has read dS of the previous block.
// Limits    Bias and mask together: D 64 only. Keys contiguous, other strides multiples of 16
//           bytes. Deterministic: sm80's kernel sums a shared bias.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/smem_tile.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

// The copying warp, one thread.
template <class C>
__device__ __forceinline__ void move_staged_bias_mask(BackwardStorage<C>& shared,
                                                      const BackwardArgs& a, const KeyTile& tile) {
  const int blocks = tile.end - tile.begin, group = a.p.heads_q / a.p.heads_k;
  const int iters = blocks * group;
  const auto head_of = [&](int iter) { return tile.head * group + iter / blocks; };
  const auto row_of = [&](int iter) { return (tile.begin + iter % blocks) * C::kBlockQ; };
  const auto load = [&](int iter) {
    const int stage = iter % C::kBiasMaskStages;
    const uint32_t full = ptx::shared_address(&shared.bias_full[stage]);
    const uint32_t target = ptx::shared_address(shared.bias_mask[stage]);
    poison_stage(target, C::kStagedBytes);
    ptx::mbarrier_arrive_expect(
        full, (a.bias_tiles ? C::kBiasBytes : 0) + (a.mask_tiles ? C::kMaskBytes : 0));
    if (a.bias_tiles) {
#pragma unroll
      for (int box = 0; box < C::kBlockK / C::StagedBiasBox::kColumns; ++box)
        ptx::tma_load_5d(target + box * C::StagedBiasBox::kBytes, &a.bias, full,
                         tile.row + box * C::StagedBiasBox::kColumns, row_of(iter), head_of(iter),
                         tile.batch1, tile.batch0);
    }
    if (a.mask_tiles) {
#pragma unroll
      for (int w = 0; w < C::kConsumers; ++w)
        ptx::tma_load_5d(target + C::kMaskAt + w * C::MaskBox::kBytes, &a.mask, full,
                         tile.row + w * C::MaskBox::kColumns, row_of(iter), head_of(iter),
                         tile.batch1, tile.batch0);
    }
  };
  for (int iter = 0; iter < min(iters, C::kBiasMaskStages); ++iter) load(iter);
  ptx::wait_for_prerequisites();  // the previous kernel may clear dbias
#pragma unroll 1
  for (int iter = 0; iter < iters; ++iter) {
    const int stage = iter % C::kBiasMaskStages;
    sleep_for(shared.ds_done[stage], iter / C::kBiasMaskStages);
    if (a.stores_bias) {
#pragma unroll 1
      for (int box = 0; box < C::kBlockK / 32; ++box) {
        const int key = tile.row + box * 32;
        const uint32_t source =
            ptx::shared_address(shared.bias_mask[stage]) + box * (C::kBlockQ * 128);
        if (key >= tile.seq_k) break;
        if (a.adds_bias)
          ptx::tma_add_5d(&a.dbias, source, key, row_of(iter), head_of(iter), tile.batch1,
                          tile.batch0);
        else
          ptx::tma_store_5d(&a.dbias, source, key, row_of(iter), head_of(iter), tile.batch1,
                            tile.batch0);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    if (iter + C::kBiasMaskStages < iters) load(iter + C::kBiasMaskStages);
  }
  ptx::bulk_wait<0>();
}

// The place of a lane's elements (mainloop.cuh) in a block's bias. Rows are 128 bytes, their
// 16-byte pieces permuted by the row: the next query is in the next row, 8 keys on are 2 pieces on.
template <class C>
struct StagedBias {
  uint32_t first;

  __device__ __forceinline__ StagedBias(uint32_t bias, int w) {
    const int thread = opaque(threadIdx.x), row = thread % 4 * 2;
    const int piece = thread / 32 % 2 * 4 + thread % 32 / 16;
    first = bias + (w * 2 + thread / 64 % 2) * (C::kBlockQ * 128) + row * 128 + (piece ^ row) * 16 +
            thread / 4 % 4 * 4;
  }
  __device__ __forceinline__ uint32_t operator[](int e) const {
    return (first ^ (e / 2 % 2 * 32 + e % 2 * 16)) + (e % 2 * 128 + e / 4 * 1024);
  }
};

// P^T from the exponents factor * score(e) and the bias, by put(e, p_e, p_(e + 1)); lse: of the
// lane's first query in shared memory.
template <class C, int kCount, class Score, class Put>
__device__ __forceinline__ void exponentiate_staged(const Score& score, float factor,
                                                    const Put& put, uint32_t lse,
                                                    const StagedBias<C>& bias) {
  const auto addend = [&](int e, float lse_of_row) {
    return fmaf(__uint_as_float(ptx::ld_shared(bias[e])), kLog2e, -lse_of_row);
  };
#pragma unroll
  for (int n = 0; n < kCount; n += 4) {
    const float2 row = ptx::ld_shared_f2(lse + n * 8);
#pragma unroll
    for (int e = n; e < n + 4; e += 2) {
      put(e, ptx::ex2_approx(fmaf(score(e), factor, addend(e, row.x))),
          ptx::ex2_approx(fmaf(score(e + 1), factor, addend(e + 1, row.y))));
    }
  }
}

// Stores dS^T, if it is wanted, where this lane has read the bias.
template <class C, int kCount>
__device__ __forceinline__ void leave_staged(const float (&ds)[kCount], const BackwardArgs& a,
                                             const StagedBias<C>& bias) {
  if (!a.stores_bias) return;
#pragma unroll
  for (int e = 0; e < kCount; ++e) ptx::st_shared(bias[e], __float_as_uint(ds[e]));
}

// Hidden elements become zero.
template <class C, int kCount>
__device__ __forceinline__ void hide_staged(float (&p)[kCount], uint32_t buffers, int w) {
  const int thread = opaque(threadIdx.x), pair = thread % 4, warp = thread / 32 % 4;
  const uint32_t first = buffers + C::kMaskAt + w * (C::kBlockQ * 64) + pair * 128 +
                         (warp ^ pair) * 16 + thread % 32 / 4;
#pragma unroll
  for (int e = 0; e < kCount; ++e)
    p[e] = ptx::ld_shared_u8(first + e / 4 * 512 + e % 2 * 64 + e / 2 % 2 * 8) != 0 ? p[e] : 0.f;
}

}  // namespace flashsci::sm90::bwd
