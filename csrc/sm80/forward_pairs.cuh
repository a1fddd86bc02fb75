// The forward of forward.cuh with a bias or a mask.
//
// Maths     as there, with s_ij + bias_ij before the softmax and -inf where the mask hides.
// Roles     One CTA per (query tile, kMembers neighbours along the dimension that shares the bias),
//           all on grid.x: the tiles side by side, then the other members, so that a bias is read
//           while it is in L2. Every warp works on its rows of all members in turn and starts their
//           scores from the one bias tile that it has in registers: S = Q K^T + bias / scale costs
//           nothing beyond the product.
// Shared    Q of every member (later its output), 2 x (K, V) of every member, swizzled; 2 x one
// byte
//           a key of every member's key mask: `PairsStorage`. Keys are interleaved (tile.cuh).
// Pipeline  K, V and key mask of tile n - 1 fly during all of tile n. The bias goes from global
//           memory to registers: that of tile n - 1 flies from the moment the last member's S has
//           taken up that of tile n, during softmax and P V. One barrier a tile.
// Limits    Exponentials and issue at D = 32, HMMA from D = 64 on; a bias that is not shared: HBM.
#pragma once
#include <algorithm>

#include "forward.cuh"
#include "pair_tile.cuh"

namespace flashsci::sm80 {

// 32 keys at a time: scores and bias tile take 64 registers, the outputs of all members dims x
// members, Q (where that fits) half of it.
inline constexpr int kPairsKeys(int head_dim) {
  return FLASHSCI_TILE_PRESET == 0 && head_dim > 128 ? 16 : 32;
}
template <int kHeadDim>
using PairsTiles = Tiling<kHeadDim, (kHeadDim <= 128 ? 128 : 64), kPairsKeys(kHeadDim), 4, 2, 2>;

// Keys that are copied at once, for one barrier.
template <class C>
inline constexpr int kStageKeys = C::kHeadDim <= 64 ? 2 * C::kBlockK : C::kBlockK;

template <class C, int kMembers>
struct alignas(128) PairsStorage {
  static constexpr int kKeys = kStageKeys<C>;
  uint16_t q[kMembers][C::kBlockQ * C::kHeadDim];  // [kBlockQ, kHeadDim], then the output tile
  uint16_t k[2][kMembers][kKeys * C::kHeadDim];    // [stage, member, kKeys, kHeadDim]
  uint16_t v[2][kMembers][kKeys * C::kHeadDim];    // [stage, member, kKeys, kHeadDim]
  uint8_t shown[2][kMembers][kKeys];               // [stage, member, kKeys]
};

// What the host derives from the parameters, beyond ForwardPlan.
struct PairsPlan {
  int64_t q_step, k_step, v_step, out_step, lse_step, mask_step;  // elements to the next member
  uint32_t members, groups;          // along the shared dimension; ceil(members / kMembers)
  int32_t shared_dim;                // 0 batch0, 1 batch1, 2 head
  int32_t vector_bias, vector_mask;  // four keys of any row are an aligned vector
  int32_t key_mask;                  // the mask is the same for all queries
  int32_t shares;                    // members have a bias or a mask of pairs in common
  float bias_factor;                 // from natural units to those of the scores
};

// Where the first member of a block is.
struct PairsPlace {
  uint32_t batch0, batch1, head, count;

  __device__ __forceinline__ PairsPlace(uint32_t block, int of_block,
                                        const FlashsciForwardParams& p, const ForwardPlan& plan,
                                        const PairsPlan& pairs) {
    uint32_t rest = block / plan.tiles;
    const uint32_t outer = rest / pairs.groups;
    const uint32_t member = (rest - outer * pairs.groups) * of_block;
    count = pairs.members - member;  // at least 1; more than of_block: all there
    const auto heads = static_cast<uint32_t>(p.heads_q), second = static_cast<uint32_t>(p.batch1);
    const uint32_t inner = pairs.shared_dim == 2 ? second : heads;
    const uint32_t a = outer / inner, b = outer - a * inner;
    batch0 = pairs.shared_dim == 0 ? member : a;
    batch1 = pairs.shared_dim == 0 ? a : pairs.shared_dim == 1 ? member : b;
    head = pairs.shared_dim == 2 ? member : b;
  }
  template <class Strides>
  __device__ __forceinline__ int64_t offset(const Strides& strides, uint32_t of_head) const {
    return batch0 * strides.batch0 + batch1 * strides.batch1 + of_head * strides.head;
  }
};

template <class C>
__device__ __forceinline__ void copy_scores(float (&s)[C::kM][C::kN][4],
                                            const float (&c)[C::kM][C::kN][4]) {
#pragma unroll
  for (int i = 0; i < C::kM * C::kN * 4; ++i)
    s[i / (C::kN * 4)][i / 4 % C::kN][i % 4] = c[i / (C::kN * 4)][i / 4 % C::kN][i % 4];
}

template <class C>
__device__ __forceinline__ void add_scores(float (&s)[C::kM][C::kN][4],
                                           const float (&c)[C::kM][C::kN][4]) {
#pragma unroll
  for (int i = 0; i < C::kM * C::kN * 4; ++i)
    s[i / (C::kN * 4)][i / 4 % C::kN][i % 4] += c[i / (C::kN * 4)][i / 4 % C::kN][i % 4];
}

// S += Q K^T with Q in registers.
template <class Op, class C>
__device__ __forceinline__ void multiply_kept_qk(float (&s)[C::kM][C::kN][4],
                                                 const uint32_t (&q)[C::kHeadDim / 16][C::kM][4],
                                                 uint32_t k_start) {
  using T = Tile<C::kHeadDim>;
#pragma unroll
  for (int d = 0; d < C::kHeadDim / 16; ++d) {
#pragma unroll
    for (int n = 0; n < C::kN / 2; ++n) {
      uint32_t b[4];  // K [16 keys, 16]: two n8 blocks
      ptx::ldmatrix_x4(b, T::pair_address(k_start, d) + n * 16 * T::kRowBytes);
#pragma unroll
      for (int m = 0; m < C::kM; ++m) {
        Op::mma(s[m][2 * n], q[d][m], b[0], b[1]);
        Op::mma(s[m][2 * n + 1], q[d][m], b[2], b[3]);
      }
    }
  }
}

template <class Op, class C, int kMembers, bool kVector>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    forward_pairs_kernel(const __grid_constant__ FlashsciForwardParams p,
                         const __grid_constant__ ForwardPlan plan,
                         const __grid_constant__ PairsPlan pairs) {
  using T = Tile<C::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<PairsStorage<C, kMembers>*>(shared_memory);

  const PairsPlace place(blockIdx.x, kMembers, p, plan, pairs);
  const uint32_t slot = blockIdx.x % plan.tiles;
  const int tile_row = (p.window_right >= 0 ? plan.tiles - 1 - slot : slot) * C::kBlockQ;
  const int seq_q = p.seq_q, seq_k = p.seq_k;

  const uint32_t head_k = place.head / static_cast<uint32_t>(p.heads_q / p.heads_k);
  const auto* q = static_cast<const uint16_t*>(p.q) + place.offset(p.q_strides, place.head) +
                  tile_row * p.q_strides.row;
  const auto* k = static_cast<const uint16_t*>(p.k) + place.offset(p.k_strides, head_k);
  const auto* v = static_cast<const uint16_t*>(p.v) + place.offset(p.v_strides, head_k);
  const FlashsciPairStrides& bias_strides = p.pairs.bias_strides;
  const FlashsciPairStrides& mask_strides = p.pairs.mask_strides;
  const auto* bias = static_cast<const unsigned char*>(p.pairs.bias);
  if (bias != nullptr)
    bias += place.offset(bias_strides, place.head) * (p.pairs.bias_is_fp32 ? 4 : 2);
  const uint8_t* mask = p.pairs.mask;
  if (mask != nullptr) mask += place.offset(mask_strides, place.head);

  const int warp = ptx::redux_max(threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int warp_row = tile_row + warp * C::kRows;
  const Window window(p.window_left, p.window_right, p.lower_right != 0, seq_q, seq_k);

  // As in forward_kernel: key tiles that any row of this CTA sees, and what this warp sees of them.
  const int last_row = min(tile_row + C::kBlockQ, seq_q) - 1;
  const int keys_begin = window.begin(tile_row), keys_end = window.end(last_row);
  const int first_tile = keys_begin / C::kBlockK;
  const int end_tile =
      keys_begin < keys_end ? (keys_end + C::kBlockK - 1) / C::kBlockK : first_tile;
  const int warp_last_row = min(warp_row + C::kRows, seq_q) - 1;
  const int seen_begin = window.begin(warp_row);
  const int seen_end = warp_row < seq_q ? window.end(warp_last_row) : 0;
  const int full_begin = window.begin(warp_last_row), full_end = window.end(warp_row);

  using Storage = PairsStorage<C, kMembers>;
  constexpr int kStageTiles = Storage::kKeys / C::kBlockK;
  constexpr int kTileBytes = C::kBlockK * T::kRowBytes;
  constexpr int kQBytes = C::kBlockQ * T::kRowBytes;
  const uint32_t q_tile = ptx::shared_address(shared.q);
  const uint32_t k_tile = ptx::shared_address(shared.k);
  const uint32_t v_tile = ptx::shared_address(shared.v);
  const uint32_t shown_tile = ptx::shared_address(shared.shown);
  const uint32_t q_start =
      q_tile + warp * C::kRows * T::kRowBytes + T::offset(lane % 16, lane / 16);
  const uint32_t k_lane = T::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const uint32_t v_lane = T::offset(lane % 16, lane / 16);

  const auto load_stage = [&](int to, int first_key) {
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      if (r >= place.count) break;
      const int slot = to * kMembers + r;
      const int keys = seq_k - first_key;
      load_tile<Storage::kKeys, C::kHeadDim, C::kThreads, kVector, true, true>(
          k_tile + slot * kStageTiles * kTileBytes,
          k + r * pairs.k_step + first_key * p.k_strides.row, p.k_strides.row, keys, p.head_dim,
          p.copy_bytes);
      load_tile<Storage::kKeys, C::kHeadDim, C::kThreads, kVector, true, true>(
          v_tile + slot * kStageTiles * kTileBytes,
          v + r * pairs.v_step + first_key * p.v_strides.row, p.v_strides.row, keys, p.head_dim_v,
          p.copy_bytes);
      if (pairs.key_mask)
        load_key_mask<Storage::kKeys>(shown_tile + slot * Storage::kKeys,
                                      mask + r * pairs.mask_step + first_key * mask_strides.column,
                                      mask_strides.column, pairs.vector_mask != 0, keys);
    }
  };

  struct Rows {
    float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment]
    float offset[C::kM][2];            // [m16, row g or g + 8], what exponents are relative to
    float row_sum[C::kM][2];           // this lane's part of the sum
  } rows[kMembers];
#pragma unroll
  for (int r = 0; r < kMembers; ++r) {
    clear(rows[r].o);
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
      rows[r].offset[m][0] = rows[r].offset[m][1] = kNoKey;
      rows[r].row_sum[m][0] = rows[r].row_sum[m][1] = 0.f;
    }
  }
  constexpr bool kKeepQ = C::kHeadDim * kMembers <= 64;
  constexpr int kKeptQ = kKeepQ ? C::kHeadDim / 16 : 1;
  uint32_t q_kept[kMembers][kKeptQ][C::kM][4];  // Q [kRows, kHeadDim] of each member
  uint32_t raw[C::kM][2][C::kN / 2][4];         // [m16, row g or g + 8, 16 keys, this lane's four]
  clear_bias<C>(raw);

  // One turn before the first tile only starts loads.
#pragma unroll 1
  for (int tile = first_tile < end_tile ? end_tile : -1; tile >= first_tile; --tile) {
    if (tile >= end_tile - 1 || (tile + 1) % kStageTiles == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // stage n has landed; nobody reads stage n + 1 any more
      const int next = (tile == end_tile ? tile - 1 + kStageTiles : tile) / kStageTiles - 1;
      if (next >= first_tile / kStageTiles) load_stage(next % 2, next * Storage::kKeys);
      if (tile == end_tile) {
#pragma unroll
        for (int r = 0; r < kMembers; ++r)
          if (r < place.count)
            load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, kVector, true>(
                q_tile + r * kQBytes, q + r * pairs.q_step, p.q_strides.row, seq_q - tile_row,
                p.head_dim, p.copy_bytes);
      } else if (kKeepQ && tile == end_tile - 1) {
#pragma unroll
        for (int i = 0; i < kMembers * kKeptQ * C::kM; ++i)
          ptx::ldmatrix_x4(q_kept[i / (kKeptQ * C::kM)][i / C::kM % kKeptQ][i % C::kM],
                           T::pair_address(q_start, i / C::kM % kKeptQ) +
                               i / (kKeptQ * C::kM) * kQBytes + i % C::kM * 16 * T::kRowBytes);
      }
      ptx::cp_async_commit();
    }

    const int first_key = tile * C::kBlockK;
    const bool active = first_key < seen_end && first_key + C::kBlockK > seen_begin;
    const int row = warp_row + opaque(lane) / 4;
    float c[C::kM][C::kN][4];  // what the scores start from
    if (active) {
      const bool whole = first_key + C::kBlockK <= seq_k;
      convert_bias<Op, C>(c, raw,
                          bias == nullptr              ? kNoBias
                          : p.pairs.bias_is_fp32       ? kFloats
                          : pairs.vector_bias && whole ? kPairsOf16
                                                       : kOneOf16,
                          pairs.bias_factor);
      if (mask != nullptr && !pairs.key_mask)
        hide_pairs<C>(c, mask, mask_strides, pairs.vector_mask != 0 && whole, row,
                      first_key + lane % 4 * 4, seq_q, seq_k);
    }
#pragma unroll
    for (int r = 0; r < kMembers; ++r) {
      const int from = (tile / kStageTiles % 2 * kMembers + r) * kStageTiles + tile % kStageTiles;
      uint32_t words[C::kN / 2];  // bytes of the key mask
      bool any_shown = active && r < place.count, any_hidden = false;
      if (any_shown && pairs.key_mask)
        read_key_mask<C>(words, shown_tile + from * C::kBlockK, any_shown, any_hidden);
      float s[C::kM][C::kN][4];  // [m16, n8 of keys, fragment]: scores, then P
      if (any_shown) {
        const uint32_t k_start = k_tile + k_lane + from * kTileBytes;
        const auto multiply = [&] {
          if constexpr (kKeepQ)
            multiply_kept_qk<Op, C>(s, q_kept[r], k_start);
          else
            multiply_qk<Op, C>(s, q_start + r * kQBytes, k_start);
        };
        if (plan.score_mode == kScaled) {
          copy_scores<C>(s, c);
          multiply();
        } else {
          clear(s);
          multiply();
          scale_scores<C>(s, plan);
          add_scores<C>(s, c);
        }
      }
      if (r == kMembers - 1) {
        clear_bias<C>(raw);  // lest the old one has to be kept beside the scores
        if (bias != nullptr && tile > first_tile)
          load_bias<C>(raw, bias, bias_strides, p.pairs.bias_is_fp32 != 0,
                       pairs.vector_bias && first_key <= seq_k, row,
                       first_key - C::kBlockK + lane % 4 * 4, seq_q, seq_k);
      }
      if (any_shown) {
        if (any_hidden) hide_keys<C>(s, words);
        if (first_key < full_begin || first_key + C::kBlockK > full_end)
          mask_scores<true>(s, window, row, first_key + lane % 4 * 4);
        online_softmax_lazily(s, rows[r].o, rows[r].offset, rows[r].row_sum, plan.exp_scale);
        multiply_pv<Op, C>(rows[r].o, s, v_tile + v_lane + from * kTileBytes);
      }
    }
  }

  if (warp_row >= seq_q) return;
  const PairsPlace home(opaque(blockIdx.x), kMembers, p, plan, pairs);
  auto* out = static_cast<uint16_t*>(p.out) + home.offset(p.out_strides, home.head) +
              warp_row * p.out_strides.row;
  float* lse =
      p.lse + ((home.batch0 * p.batch1 + home.batch1) * p.heads_q + home.head) * p.seq_q + warp_row;
#pragma unroll
  for (int r = 0; r < kMembers; ++r) {
    if (r >= home.count) break;
    write_output<Op, C>(rows[r].o, rows[r].offset, rows[r].row_sum,
                        q_tile + r * kQBytes + warp * C::kRows * T::kRowBytes,
                        out + r * pairs.out_step, lse + r * pairs.lse_step, p.out_strides.row,
                        seq_q - warp_row, p.head_dim_v, plan);
  }
}

template <class Op, class C, int kMembers, bool kVector>
cudaError_t launch_pairs_tiling(const FlashsciForwardParams& p, PairsPlan pairs,
                                cudaStream_t stream) {
  using Storage = PairsStorage<C, kMembers>;
  constexpr int kKeys = Storage::kKeys;
  static_assert(sizeof(Storage) ==
                    ((C::kBlockQ + 4 * kKeys) * C::kHeadDim * 2 + 2 * kKeys) * kMembers +
                        (2 * kKeys * kMembers % 128 != 0 ? 128 - 2 * kKeys * kMembers % 128 : 0),
                "the plan has no padding");
  static_assert(sizeof(Storage) <= kSharedBudget, "over the budget of the tile preset");
  const int64_t tiles = (int64_t{p.seq_q} + C::kBlockQ - 1) / C::kBlockQ;
  pairs.groups = (pairs.members + kMembers - 1) / kMembers;
  const int64_t blocks =
      tiles * p.heads_q * p.batch0 * p.batch1 / std::max(pairs.members, 1u) * pairs.groups;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX || p.batch0 * p.batch1 > INT32_MAX) return cudaErrorInvalidValue;
  ForwardPlan plan = plan_of(p, tiles);
  // The scale stays inside the exponential, and the bias is divided by it, unless that could
  // overflow: units of the scores are then those of the exponential.
  if (plan.score_mode == kScaled && !(p.scale > 1e-4f && plan.exp_scale <= 1.f))
    plan.score_mode = kLinear;
  if (plan.score_mode == kScaled) {
    pairs.bias_factor = 1.f / p.scale;
  } else {
    plan.score_inner *= plan.score_mode == kLinear ? kLog2e : 1.f;
    plan.score_outer *= kLog2e;
    plan.exp_scale = 1.f;
    pairs.bias_factor = kLog2e;
  }
  plan.lse_scale = 1.f / kLog2e;  // offsets are powers of two
  return launch_kernel<forward_pairs_kernel<Op, C, kMembers, kVector>, sizeof(Storage),
                       C::kThreads>(p.device, blocks, stream, p, plan, pairs);
}

template <class Op, int kHeadDim>
cudaError_t launch_pairs_padded(const FlashsciForwardParams& p, const PairsPlan& pairs,
                                cudaStream_t stream) {
  const bool vector =
      p.copy_bytes >= 16 && p.head_dim % kChunkElements == 0 && p.head_dim_v % kChunkElements == 0;
  using Tiles = PairsTiles<kHeadDim>;
  if (!vector) return launch_pairs_tiling<Op, Tiles, 1, false>(p, pairs, stream);
  if constexpr (kHeadDim <= 64)
    if (pairs.shares) return launch_pairs_tiling<Op, Tiles, 2, true>(p, pairs, stream);
  return launch_pairs_tiling<Op, Tiles, 1, true>(p, pairs, stream);
}

// All but what depends on the tile shape.
inline PairsPlan pairs_plan_of(const FlashsciForwardParams& p) {
  const FlashsciPairStrides &bias = p.pairs.bias_strides, &mask = p.pairs.mask_strides;
  PairsPlan pairs{};
  const auto every4 = [](const FlashsciPairStrides& s) {
    return s.column == 1 && (s.batch0 | s.batch1 | s.head | s.row) % 4 == 0;
  };
  pairs.vector_bias =
      every4(bias) &&
      reinterpret_cast<uintptr_t>(p.pairs.bias) % (p.pairs.bias_is_fp32 ? 16 : 8) == 0;
  pairs.vector_mask = every4(mask) && reinterpret_cast<uintptr_t>(p.pairs.mask) % 4 == 0;
  pairs.key_mask = p.pairs.mask != nullptr && mask.row == 0;

  // The members of a block differ in the dimension of most members along which the bias, and a mask
  // of pairs, is the same.
  const bool bias_plane = p.pairs.bias != nullptr && bias.row != 0;
  const bool mask_plane = p.pairs.mask != nullptr && mask.row != 0;
  const bool one_to_one = p.heads_k == p.heads_q || p.heads_k == 1;
  const int64_t sizes[3] = {p.batch0, p.batch1, p.heads_q};
  const bool shared[3] = {!(bias_plane && bias.batch0) && !(mask_plane && mask.batch0),
                          !(bias_plane && bias.batch1) && !(mask_plane && mask.batch1),
                          !(bias_plane && bias.head) && !(mask_plane && mask.head) && one_to_one};
  int dim = 2;
  for (int i = 0; i < 3; ++i) {
    if (!shared[i] || sizes[i] < 2 || !(bias_plane || mask_plane)) continue;
    if (!pairs.shares || sizes[i] > sizes[dim]) dim = i;
    pairs.shares = 1;
  }
  pairs.shared_dim = dim;
  pairs.members = static_cast<uint32_t>(sizes[dim]);
  const auto step = [&](const auto& strides) {
    return dim == 0 ? strides.batch0 : dim == 1 ? strides.batch1 : strides.head;
  };
  pairs.q_step = step(p.q_strides), pairs.out_step = step(p.out_strides);
  pairs.k_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.k_strides);
  pairs.v_step = dim == 2 && p.heads_k == 1 ? 0 : step(p.v_strides);
  pairs.mask_step = p.pairs.mask != nullptr ? step(mask) : 0;
  pairs.lse_step = p.seq_q * (dim == 2 ? 1 : p.heads_q * (dim == 1 ? 1 : p.batch1));

  return pairs;
}

// Dense problems with a bias or a mask, any strides.
template <class Op>
cudaError_t launch_forward_pairs(const FlashsciForwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q != nullptr) return cudaErrorNotSupported;
  const PairsPlan pairs = pairs_plan_of(p);
  const int width = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  if (width <= 32) return launch_pairs_padded<Op, 32>(p, pairs, stream);
  if (width <= 64) return launch_pairs_padded<Op, 64>(p, pairs, stream);
  if (width <= 96) return launch_pairs_padded<Op, 96>(p, pairs, stream);
  if (width <= 128) return launch_pairs_padded<Op, 128>(p, pairs, stream);
  if (width <= 192) return launch_pairs_padded<Op, 192>(p, pairs, stream);
  if (width <= 256) return launch_pairs_padded<Op, 256>(p, pairs, stream);
  return cudaErrorInvalidValue;
}

}  // namespace flashsci::sm80
