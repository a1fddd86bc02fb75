// Bias and mask in the sm90 backward: reads, additions and writes per pair of a query and a key.
//
// Maths     p_ij = exp(s_ij + bias_ij - lse_i); dbias_ij = ds_ij, summed over the dims that the
//           bias lacks.
// Roles     Warp 3 of the copying warpgroup brings tiles of the bias to the place of the block's dS
//           (64 keys of a consumer, all queries); the consumers read them as they store dS,
//           transposed, and overwrite them. If dbias has all pairs, the same warp stores dS to
//           dbias; otherwise sm80's kernel sums it (bias_gradient.cuh). Values that are the same
//           for all queries come straight from global memory.
// Shared    One more stage of dS (the third), and nothing else.
// Limits    The bias comes by tiles if TMA takes it: q's dtype, neighbouring keys contiguous,
//           strides multiples of 16 bytes. fp32 or a mask by pairs: bias_staged.cuh, without a
//           softcap.
#pragma once
#include <cstdint>

#include "../../core/poison.cuh"
#include "../../core/softmax.cuh"
#include "../../ptx/bulk.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/math.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "bias_staged.cuh"
#include "config.cuh"

namespace flashsci::sm90::bwd {

inline bool has_bias_mask(const FlashsciBackwardParams& p) {
  return p.bias_mask.bias != nullptr || p.bias_mask.mask != nullptr;
}

// Whether it is the same for all queries.
__host__ __device__ inline bool is_of_keys(const FlashsciScoreStrides& s, int seq_q) {
  return s.row == 0 || seq_q == 1;
}

inline bool has_bias_tiles(const FlashsciBackwardParams& p) {
  return p.bias_mask.bias != nullptr && !is_of_keys(p.bias_mask.bias_strides, p.seq_q);
}

inline bool has_mask_tiles(const FlashsciBackwardParams& p) {
  return p.bias_mask.mask != nullptr && !is_of_keys(p.bias_mask.mask_strides, p.seq_q);
}

// Whether bias_staged.cuh serves it.
inline bool has_staged_bias_mask(const FlashsciBackwardParams& p) {
  return has_mask_tiles(p) || (has_bias_tiles(p) && p.bias_mask.bias_is_fp32);
}

// Whether dbias has an element for every pair.
inline bool owns_bias(const FlashsciBackwardParams& p) {
  const auto own = [](int64_t size, int64_t stride) { return size == 1 || stride != 0; };
  const FlashsciScoreStrides& s = p.dbias_strides;
  return own(p.batch0, s.batch0) && own(p.batch1, s.batch1) && own(p.heads_q, s.head);
}

// Whether dS is added to the tiles of a shared dbias, in any order.
inline bool adds_bias(const FlashsciBackwardParams& p) {
  return p.dbias != nullptr && has_bias_tiles(p) && !owns_bias(p) && p.bias_mask.bias_is_fp32 &&
         !p.deterministic && p.seq_k % 4 == 0;
}

// Whether dbias is written by tiles. With a softcap dS has the factor of its slope, dbias has not.
inline bool stores_bias(const FlashsciBackwardParams& p) {
  return p.dbias != nullptr && p.softcap == 0.f && has_bias_tiles(p) &&
         (owns_bias(p) || adds_bias(p));
}

inline bool sums_bias(const FlashsciBackwardParams& p) {
  return p.dbias != nullptr && !stores_bias(p);
}

inline bool takes_bias_mask(const FlashsciBackwardParams& p) {
  if (!has_bias_mask(p)) return true;
  if (p.cu_seqlens_q != nullptr || p.head_dim > 128 || p.head_dim_v > 128) return false;
  if (p.softcap != 0.f && (p.bias_mask.capped || has_staged_bias_mask(p))) return false;
  if (has_mask_tiles(p)) {  // with a bias by pairs: fp32, at narrow heads
    const bool narrow = p.head_dim <= 64 && p.head_dim_v <= 64;
    if (p.bias_mask.mask_strides.column != 1) return false;
    if (has_bias_tiles(p) && !(p.bias_mask.bias_is_fp32 && narrow)) return false;
  }
  return !has_bias_tiles(p) || p.bias_mask.bias_strides.column == 1;
}

inline FlashsciBackwardParams bias_alone(const FlashsciBackwardParams& p) {
  FlashsciBackwardParams bias = p;
  bias.dq = bias.dk = bias.dv = nullptr;
  return bias;
}

template <class Op>
cudaError_t sum_bias(const FlashsciBackwardParams& p, int64_t used, cudaStream_t stream) {
  FlashsciBackwardParams bias = bias_alone(p);
  bias.workspace = static_cast<unsigned char*>(p.workspace) + used;
  return static_cast<cudaError_t>(Op::bias_gradient(&bias, stream));
}

// Clears dbias if tiles are added to it, or if the window hides tiles, which are not visited then.
inline cudaError_t clear_bias(const FlashsciBackwardParams& p, cudaStream_t stream) {
  if (p.window_left < 0 && p.window_right < 0 && !adds_bias(p)) return cudaSuccess;
  const auto own = [](int64_t size, int64_t stride) { return stride == 0 ? 1 : size; };
  const FlashsciScoreStrides& s = p.dbias_strides;
  const int64_t rows =
      own(p.batch0, s.batch0) * own(p.batch1, s.batch1) * own(p.heads_q, s.head) * p.seq_q;
  return clear_memory(p.dbias, rows * p.seq_k * (p.bias_mask.bias_is_fp32 ? 4 : 2), stream);
}

// element: bytes of an element of q.
template <class C>
cudaError_t encode_bias_mask(BackwardArgs& a, MapElement element) {
  const FlashsciBackwardParams& p = a.p;
  if (p.bias_mask.bias_is_fp32) element = kFloat32;
  cudaError_t error = cudaSuccess;
  const auto encode = [&](CUtensorMap& map, const void* base, const FlashsciScoreStrides& s,
                          const MapElement& of, int box_keys) {
    const FlashsciStrides rows = {s.batch0, s.batch1, s.head, s.row};
    if (error == cudaSuccess)
      error = encode_map(&map, base, of, p.seq_k,
                         dense_dims(rows, p.seq_q, p.heads_q, p.batch1, p.batch0), box_keys,
                         C::BiasBox::kRows);
  };
  a.bias_tiles = has_bias_tiles(p), a.stores_bias = stores_bias(p);
  a.mask_tiles = has_mask_tiles(p), a.adds_bias = adds_bias(p);
  static_assert(C::StagedBiasBox::kRows == C::BiasBox::kRows &&
                C::MaskBox::kRows == C::BiasBox::kRows);
  const int box_keys = element.bytes == 4 ? C::StagedBiasBox::kColumns : C::BiasBox::kColumns;
  if (a.bias_tiles) encode(a.bias, p.bias_mask.bias, p.bias_mask.bias_strides, element, box_keys);
  if (a.stores_bias) encode(a.dbias, p.dbias, p.dbias_strides, element, box_keys);
  if (a.mask_tiles)
    encode(a.mask, p.bias_mask.mask, p.bias_mask.mask_strides, kByte, C::MaskBox::kColumns);
  return error;
}

// The copying warp, one thread: brings the bias of block after block, and stores dS of completed
// blocks.
template <class C>
__device__ __forceinline__ void move_bias_mask(BackwardStorage<C>& shared, const BackwardArgs& a,
                                               const KeyTile& tile) {
  if (!a.bias_tiles) return;
  const int blocks = tile.end - tile.begin, group = a.p.heads_q / a.p.heads_k;
  const int iters = blocks * group;
  const auto boxes = [&](int iter, const auto& move) {
    const int head = tile.head * group + iter / blocks, block = tile.begin + iter % blocks;
#pragma unroll
    for (int w = 0; w < C::kConsumers; ++w)
      move(ptx::shared_address(shared.ds[iter % C::kDsStages]) + w * C::BiasBox::kBytes,
           tile.row + w * C::BiasBox::kColumns, block * C::kBlockQ, head);
  };
  const auto load = [&](int iter) {
    const uint32_t full = ptx::shared_address(&shared.bias_full[iter % C::kDsStages]);
    poison_stage(ptx::shared_address(shared.ds[iter % C::kDsStages]), C::kDsBytes);
    ptx::mbarrier_arrive_expect(full, sizeof(shared.ds[0]));
    boxes(iter, [&](uint32_t target, int key, int row, int head) {
      ptx::tma_load_5d(target, &a.bias, full, key, row, head, tile.batch1, tile.batch0);
    });
  };
  for (int iter = 0; iter < min(iters, C::kDsStages); ++iter) load(iter);
  ptx::wait_for_prerequisites();  // the previous kernel may clear dbias
#pragma unroll 1
  for (int iter = 0; iter < iters; ++iter) {
    sleep_for(shared.ds_done[iter % C::kDsStages], iter / C::kDsStages);
    if (a.stores_bias) {
      boxes(iter, [&](uint32_t source, int key, int row, int head) {
        if (key < tile.seq_k)
          ptx::tma_store_5d(&a.dbias, source, key, row, head, tile.batch1, tile.batch0);
      });
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();
    }
    if (iter > 0 && iter - 1 + C::kDsStages < iters) load(iter - 1 + C::kDsStages);
  }
  ptx::bulk_wait<0>();
}

// The offset of a head's pair of this lane's key (in the tile) and any query, in elements.
__device__ __forceinline__ int64_t offset_of_key(const FlashsciScoreStrides& s,
                                                 const BackwardArgs& a, const KeyTile& tile,
                                                 int head, int key) {
  return tile.batch0 * s.batch0 + tile.batch1 * s.batch1 +
         (tile.head * (a.p.heads_q / a.p.heads_k) + head) * s.head +
         min(tile.row + key, tile.seq_k - 1) * s.column;
}

// The offset of the pair of this lane's first key (half: or of the one 8 further) in a block.
// Recomputed each time: registers are scarcer than integer instructions.
__device__ __forceinline__ int64_t offset_in_block(const FlashsciScoreStrides& s,
                                                   const BackwardArgs& a, const KeyTile& tile,
                                                   int w, int iter, int half) {
  const int thread = opaque(threadIdx.x);
  return offset_of_key(s, a, tile, iter / (tile.end - tile.begin),
                       w * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 + half * 8);
}

// Whether a mask of keys shows this lane's key.
__device__ __forceinline__ bool shows_key(const BackwardArgs& a, const KeyTile& tile, int w,
                                          int iter, int half) {
  const FlashsciBiasMask& bias_mask = a.p.bias_mask;
  return __ldg(bias_mask.mask + offset_in_block(bias_mask.mask_strides, a, tile, w, iter, half)) !=
         0;
}

// P^T from the exponents factor * score(e) and the bias, by put(e, p_e, p_(e + 1)); accumulator
// elements as in mainloop.cuh. lse: of the lane's first query in shared memory; bias: of consumer
// w there, or the separate buffers of the block.
template <class Op, class C, int kCount, class Score, class Put>
__device__ __forceinline__ void exponentiate_bias(const Score& score, float factor, const Put& put,
                                                  const BackwardArgs& a, const KeyTile& tile,
                                                  uint32_t lse, uint32_t bias, int w, int iter) {
  const FlashsciBiasMask& bias_mask = a.p.bias_mask;
  if (C::kBiasStaged && a.bias_tiles) {
    exponentiate_staged<C, kCount>(score, factor, put, lse, StagedBias<C>(bias, w));
  } else if (a.bias_tiles) {
    const int thread = opaque(threadIdx.x), matrix_row = thread % 8;
    bias += (matrix_row + thread % 32 / 16 * 8) * 128 +
            ((thread / 32 % 4 * 2 + thread / 8 % 2) ^ matrix_row) * 16;
#pragma unroll
    for (int m = 0; m < kCount / 8; ++m) {  // 16 queries
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, bias + m * 2048);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const float2 row = ptx::ld_shared_f2(lse + m * 64 + e / 4 * 32);
        const uint32_t word = words[e / 2];
        const float first = Op::to_float(static_cast<uint16_t>(word & 0xffff));
        const float second = Op::to_float(static_cast<uint16_t>(word >> 16));
        const int at = m * 8 + e;
        put(at, ptx::ex2_approx(fmaf(score(at), factor, fmaf(first, kLog2e, -row.x))),
            ptx::ex2_approx(fmaf(score(at + 1), factor, fmaf(second, kLog2e, -row.y))));
      }
    }
  } else {
    float addend[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (bias_mask.bias == nullptr) continue;
      const int64_t at = offset_in_block(bias_mask.bias_strides, a, tile, w, iter, half);
      addend[half] =
          kLog2e * (bias_mask.bias_is_fp32
                        ? __ldg(static_cast<const float*>(bias_mask.bias) + at)
                        : Op::to_float(__ldg(static_cast<const uint16_t*>(bias_mask.bias) + at)));
    }
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const float2 row = ptx::ld_shared_f2(lse + e / 4 * 32);
      const float add = addend[e / 2 % 2];
      put(e, ptx::ex2_approx(fmaf(score(e), factor, add - row.x)),
          ptx::ex2_approx(fmaf(score(e + 1), factor, add - row.y)));
    }
  }
}

// Elements that the mask hides become zero.
template <class C, int kCount>
__device__ __forceinline__ void hide_masked(float (&p)[kCount], const BackwardArgs& a,
                                            const KeyTile& tile, uint32_t bias, int w, int iter) {
  if (C::kBiasStaged && a.mask_tiles) {
    hide_staged<C>(p, bias, w);
  } else if (a.p.bias_mask.mask != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool shown = shows_key(a, tile, w, iter, half);
#pragma unroll
      for (int e = half * 2; e < kCount; e += 4) {
        p[e] = shown ? p[e] : 0.f;
        p[e + 1] = shown ? p[e + 1] : 0.f;
      }
    }
  }
}

}  // namespace flashsci::sm90::bwd
