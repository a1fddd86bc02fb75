// The common part of the roles of the sm90 backward: tile shapes, shared memory, arguments, and the
// division of the work.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../../core/mask.cuh"
#include "../../core/varlen.cuh"
#include "../../include/flashsci.h"
#include "../../ptx/fence.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/shared.cuh"
#include "../tma_box.cuh"
#include "../tma_map.h"

namespace flashsci::sm90::bwd {

template <int kCount>
using Columns = std::integral_constant<int, kCount>;

// Bias and mask: none; a bias in q's dtype in the place of dS (bias_aliased.cuh); an fp32 bias or a
// mask by pairs in separate buffers (bias_staged.cuh).
enum class BiasMaskTiles { kNone, kAliased, kStaged };

// kHeadDim: columns of q and k; kHeadDimV: of v. kManyTiles: a CTA takes tiles of keys one after
// the other; otherwise it has one.
template <int kHeadDim_, int kHeadDimV_, int kBlockQ_,
          BiasMaskTiles kBiasMaskTiles = BiasMaskTiles::kNone, bool kManyTiles_ = false>
struct BackwardTiling {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kBlockQ = kBlockQ_;
  static constexpr bool kD256 = false, kHasBiasMask = kBiasMaskTiles != BiasMaskTiles::kNone;
  static constexpr bool kBiasStaged = kBiasMaskTiles == BiasMaskTiles::kStaged,
                        kManyTiles = kManyTiles_;
  static constexpr int kConsumers = 2, kBlockK = 64 * kConsumers, kStages = 2;
  static constexpr int kCtas = 1, kKeys = kBlockK;  // of a cluster; of a CTA
  static constexpr int kDoutStages = kStages, kCounters = kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBoxes = (kHeadDim + 63) / 64, kBoxesV = (kHeadDimV + 63) / 64;
  static constexpr bool kNarrow = kBoxes == 1 && kBoxesV == 1;
  static constexpr int kQBytes = kBlockQ * kBoxes * 128, kDoutBytes = kBlockQ * kBoxesV * 128;
  static constexpr int kKBytes = kBlockK * kBoxes * 128, kVBytes = kBlockK * kBoxesV * 128;
  static constexpr int kDsBytes = kBlockQ * kBlockK * 2;
  // The consumers share dQ: 64 rows each, or half of the columns in shared memory.
  static constexpr bool kSplitRows = kBlockQ == 128;
  static constexpr int kDqColumns = kSplitRows ? kHeadDim : kBoxes * 32;
  static constexpr int kDqFloats = 64 * kDqColumns;  // per consumer
  static constexpr int kDqStages = 1, kDsStages = kHasBiasMask && !kBiasStaged ? 3 : 2;
  static constexpr int kBiasMaskStages = kBiasStaged && !kNarrow ? 1 : kDsStages;
  // Shared memory holds the mask in addition to the fp32 bias of a block only for narrow heads.
  static constexpr int kBiasBytes = kBlockQ * kBlockK * 4, kMaskBytes = kBlockQ * kBlockK;
  static constexpr bool kMaskSeparate = kNarrow;
  static constexpr int kMaskAt = kMaskSeparate ? kBiasBytes : 0;
  static constexpr int kStagedBytes = kBiasBytes + (kMaskSeparate ? kMaskBytes : 0);
  using QBox = Box<kBlockQ>;  // Q and dO
  using KBox = Box<kBlockK>;
  using StoreBox = Box<64>;                   // dK and dV
  using BiasBox = Box<kBlockQ>;               // aliased bias, and its dbias
  using StagedBiasBox = Box<kBlockQ, 32, 4>;  // staged bias, and its dbias
  using MaskBox = Box<kBlockQ, 64, 1>;
  static_assert(kDsBytes == kConsumers * BiasBox::kBytes &&
                    kBiasBytes == kBlockK / StagedBiasBox::kColumns * StagedBiasBox::kBytes &&
                    kMaskBytes == kConsumers * MaskBox::kBytes,
                "barriers expect what is loaded");
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128);
  static_assert(kHeadDimV == 64 || kHeadDimV == 96 || kHeadDimV == 128);
  static_assert(kBlockQ == 64 || (kBlockQ == 128 && kNarrow));
  static_assert(!kHasBiasMask || !kManyTiles, "the warp that moves pairs has one tile");

  // The columns of consumer w within kHeadDim: the first ones.
  static constexpr __host__ __device__ int dq_columns(int w) {
    return kDqColumns - w * (kSplitRows ? 0 : 2 * kDqColumns - kHeadDim);
  }
};

// A tile: 128 keys of one head and the queries that see them.
struct KeyTile {
  int row;             // the first key in its sequence; < 0: no work, or the end
  int first_k, seq_k;  // rows of the sequence (dense: 0 and the parameter)
  int first_q, seq_q;
  int first_tile;            // of the sequence among the query tiles of a head
  int begin, end;            // query tiles of the sequence that see some of the keys
  int head, batch1, batch0;  // head: of keys
  uint32_t batch;            // batch0 * B1 + batch1
};

template <int kStages, int kBytes>
struct BiasMaskBuffers {
  // [stage]: bias, fp32 [32 keys][kBlockQ rows][32]; mask [consumer's 64 keys][kBlockQ rows][64]
  unsigned char bias_mask[kStages][kBytes];
};
template <int kBytes>
struct BiasMaskBuffers<0, kBytes> {};

// For a CTA that takes many tiles: the loader is one tile ahead of the computing and the writing
// warps.
template <int kStages>
struct TileQueue {
  uint32_t tiles, blocks;  // finished by the loader
  int block[kStages];      // the tile's block of queries, and flags: `block_and_flags`
  uint64_t tile_full[2], tile_empty[2], kv_empty;
};
template <>
struct TileQueue<0> {};

template <class C>
struct BackwardStorage : BiasMaskBuffers<C::kBiasStaged ? C::kBiasMaskStages : 0, C::kStagedBytes> {
  unsigned char k[C::kKBytes];                    // [box][128 keys][64]
  unsigned char v[C::kVBytes];                    // the same
  unsigned char q[C::kStages][C::kQBytes];        // [stage][box][kBlockQ rows][64]
  unsigned char dout[C::kStages][C::kDoutBytes];  // the same
  unsigned char ds[C::kDsStages][C::kDsBytes];    // [stage][consumer's 64 keys][kBlockQ rows][64]
  float dq[C::kDqStages][C::kConsumers][C::kDqFloats];  // in register order
  float lse[C::kStages][C::kBlockQ];                    // per row, in powers of two
  float delta[C::kStages][C::kBlockQ];                  // negative
  TileQueue<C::kManyTiles ? C::kStages : 0> queue;
  KeyTile tile[C::kManyTiles ? 2 : 1];
  uint64_t kv_full;
  uint64_t q_full[C::kStages], q_empty[C::kStages];        // Q and lse
  uint64_t dout_full[C::kStages], dout_empty[C::kStages];  // dO and delta
  uint64_t ds_full;
  uint64_t dq_full[C::kDqStages][C::kConsumers], dq_empty[C::kDqStages][C::kConsumers];
  uint64_t bias_full[C::kDsStages];  // aliased: the bias; staged: the bias or the mask
  uint64_t ds_done[C::kDsStages];    // dS is stored, and that of the previous block has been read;
                                     // staged: dS has replaced the bias, and the mask has been read
};

struct alignas(128) BackwardArgs {
  CUtensorMap q, dout;                           // boxes of kBlockQ rows
  CUtensorMap k, v;                              // boxes of 128 rows
  CUtensorMap dk, dv;                            // boxes of 64 rows
  CUtensorMap q_cut, q_row, dout_cut, dout_row;  // packed: load_rows
  CUtensorMap k_cut, k_row, v_cut, v_row;
  FlashsciBackwardParams p;
  float* dq;     // [head][query tile][consumer][its columns]: `dq_of`
  float* lse;    // [head][query tile][kBlockQ], in powers of two; 3.4e38 for a row that sees no key
  float* delta;  // [head][query tile][kBlockQ], negative
  int* dq_semaphores;         // [head][query tile][kCounters]: number of key tiles added; or NULL:
                              // any order
  bool descending;            // the last key tile first, for causal windows
  uint32_t q_tiles, k_tiles;  // of a head; packed: slots
  uint32_t group;       // smallest number of key heads whose tiles are mixed, the longest first
  uint32_t key_heads;   // B0 * B1 * Hk
  int dout_row_offset;  // 0, or beyond the tensor: dO is then zero
  float exp_scale;      // P = exp2(exp_scale s - lse)
  float cap_inner, cap_outer;    // softcap: s = cap_outer tanh(cap_inner q.k), in powers of two
  CUtensorMap bias, dbias;       // boxes of kBlockQ rows and 64 keys
  bool bias_tiles, stores_bias;  // the bias is read by tiles; dbias is written by tiles
  int* ascending;  // packed, in turns: whether offsets ascend; if not, some turn would never come
  uint32_t* handed_out;        // many tiles: number of tiles taken, initially `known`
  uint32_t known;              // CTAs whose first tile has their own index: all; in turns none
  bool mask_tiles, adds_bias;  // staged: the mask is read by tiles; tiles are added to dbias
  CUtensorMap mask;
};

// A flag that the lse of some row of a query tile is large (kLargeExponent): the last bit of the
// lse of its first rows. It changes them by an ulp and needs no memory or load of its own.
inline constexpr int kFlaggedRows = 8;  // each lane's first elements include one of them
__device__ __forceinline__ float flagged(float lse, bool large) {
  return __uint_as_float((__float_as_uint(lse) & ~1u) | large);
}
// lse: of this lane's first row, in shared memory. The result is the same in all lanes of a warp.
__device__ __forceinline__ bool flag_of(uint32_t lse) {
  return __any_sync(0xffffffffu, ptx::ld_shared(lse) & 1u);
}

__device__ __forceinline__ Window window_of(const FlashsciBackwardParams& p, int seq_q, int seq_k) {
  return Window(p.window_left, p.window_right, p.lower_right != 0, seq_q, seq_k);
}

// A whole warp must call it.
template <class C, bool kVarlen>
__device__ __forceinline__ KeyTile find_key_tile(const BackwardArgs& a, uint32_t item) {
  const FlashsciBackwardParams& p = a.p;
  // At least `group` heads at a time, in groups of nearly equal size: a small last group would
  // begin its longest tiles when the others end.
  const uint32_t groups = max(a.key_heads / a.group, 1u);
  uint32_t size = a.key_heads / groups, first_head = 0;
  const uint32_t larger = (a.key_heads - groups * size) * (size + 1);  // heads of larger groups
  if (item < larger * a.k_tiles)
    ++size;
  else
    first_head = larger;
  first_head += (item - first_head * a.k_tiles) / (size * a.k_tiles) * size;
  const uint32_t rest = item - first_head * a.k_tiles;
  const uint32_t index = a.descending ? a.k_tiles - 1 - rest / size : rest / size;
  const uint32_t batch_head = first_head + rest % size;
  KeyTile tile;
  tile.batch = batch_head / static_cast<uint32_t>(p.heads_k);
  tile.head = batch_head - tile.batch * p.heads_k;
  tile.batch0 = tile.batch / static_cast<uint32_t>(p.batch1);
  tile.batch1 = tile.batch - tile.batch0 * static_cast<uint32_t>(p.batch1);
  if constexpr (kVarlen) {
    const TileOfSequence found = find_tile<C::kBlockK>(
        static_cast<int>(index), p.cu_seqlens_k, p.cu_seqlens_q, p.num_seqs, p.seq_k, p.seq_q);
    const int segment = static_cast<int>(index) - found.tile - found.first_q / C::kBlockK;
    tile.first_k = found.first_q, tile.seq_k = found.seq_q;
    tile.first_q = found.first_k, tile.seq_q = found.seq_k;
    tile.first_tile = found.first_k / C::kBlockQ + segment;
    const bool inside = found.tile >= 0 && found.tile * C::kBlockK < found.seq_q;
    tile.row = inside ? found.tile * C::kBlockK : -1;
  } else {
    tile.first_k = tile.first_q = tile.first_tile = 0;
    tile.seq_k = p.seq_k, tile.seq_q = p.seq_q;
    tile.row = static_cast<int>(index) * C::kBlockK;
  }
  const Window window = window_of(p, tile.seq_q, tile.seq_k);
  const int last = min(tile.row + C::kBlockK, tile.seq_k) - 1;
  const int first_query = max(tile.row - window.after + 1, 0);
  const int end_query = min(last - window.before + 1, tile.seq_q);
  const bool some = tile.row >= 0 && first_query < end_query;
  tile.begin = some ? first_query / C::kBlockQ : 0;
  tile.end = some ? (end_query + C::kBlockQ - 1) / C::kBlockQ : 0;
  return tile;
}

// A block of queries, with flags: bit 27, it is the first of the tile; bit 28, it is the last; bit
// 29 + w, consumer w has pairs to hide in it.
template <class C>
__device__ __forceinline__ int block_and_flags(const BackwardArgs& a, const KeyTile& tile,
                                               int block, bool first, bool last) {
  const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
  const int row = block * C::kBlockQ;
  int result = block | first << 27 | last << 28;
#pragma unroll
  for (int w = 0; w < C::kConsumers; ++w) {
    const int key = tile.row + w * 64;
    const bool all = key + 64 <= tile.seq_k && row >= key + 64 - window.after &&
                     row + C::kBlockQ <= key - window.before + 1;
    if (!all) result |= 1 << (29 + w);
  }
  return result;
}

// The index of the statistics of a query tile, in tiles.
__device__ __forceinline__ int64_t statistics_tile(const BackwardArgs& a, const KeyTile& tile,
                                                   int head_q, int block) {
  return static_cast<int64_t>(tile.batch * a.p.heads_q + head_q) * a.q_tiles + tile.first_tile +
         block;
}

// Whether consumer w has columns of dQ within the head dim; columns beyond are never read.
template <class C>
__device__ __forceinline__ bool wants_dq(const BackwardArgs& a, int w) {
  return a.p.dq != nullptr && (C::kSplitRows || w * C::kDqColumns < a.p.head_dim);
}

// The address of dQ of consumer w; part: kConsumers times the query tile.
template <class C>
__device__ __forceinline__ float* dq_of(const BackwardArgs& a, uint32_t part, int w) {
  constexpr uint32_t kMean = C::kBlockQ * C::kHeadDim / C::kConsumers;
  return a.dq + uint64_t{part} * kMean + w * (C::kDqFloats - kMean);
}

// Whether turns will come; valid after the first kernel.
template <bool kVarlen>
__device__ __forceinline__ bool semaphores_come(const BackwardArgs& a) {
  return !kVarlen || a.dq_semaphores == nullptr || ptx::load_acquire(a.ascending) != 0;
}

// The number of key tiles that add to a query tile before this one.
template <class C>
__device__ __forceinline__ int semaphore_value(const BackwardArgs& a, const KeyTile& tile,
                                               int block) {
  const Window window = window_of(a.p, tile.seq_q, tile.seq_k);
  const int row = block * C::kBlockQ, last_row = min(row + C::kBlockQ, tile.seq_q) - 1;
  const int index = tile.row / C::kBlockK;
  return a.descending ? (window.end(last_row) - 1) / C::kBlockK - index
                      : index - window.begin(row) / C::kBlockK;
}

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity & 1);
}
__device__ __forceinline__ void sleep_for(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_sleep(ptx::shared_address(&barrier), parity & 1);
}
__device__ __forceinline__ void wait_semaphore(const int* iter, int mine) {
  while (ptx::load_acquire(iter) != mine) {
  }
}

}  // namespace flashsci::sm90::bwd
