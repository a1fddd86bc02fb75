// Backward attention in fp32 for short rows of keys and small heads: all gradients in one pass.
//
// Maths     As kernel.cuh, with five products rather than seven: S^T = K Q^T, dP^T = V dO^T,
//           dV += P^T dO, dK += dS^T Q, dQ += dS K.
// Roles     A CTA owns all keys of one (key head, batch), a warp 32 of them, and goes through the
//           queries in chunks of kQueries, 16 at a time. At any time its warps are at different 16
//           queries, in an order that never changes: dQ is summed up without atomics.
// Shared    Halves of K and V and, of a chunk, of Q and dO, each row with its own power of two;
//           dQ of the chunk: `ShortStorage`.
// Pipeline  None: other CTAs work while one waits. One barrier for every 16 queries.
// Limits    Conversions to halves, three for every score: docs/kernels/sm80_fp32.md.
#pragma once
#include "../../core/poison.cuh"
#include "../../ptx/movmatrix.cuh"
#include "../../ptx/prefetch.cuh"
#include "kernel.cuh"

namespace flashsci::sm80::bwd_fp32 {

// Rows of all four operands have scales of their own. A product that sums over such rows takes them
// into its other factor (P or dS), rows of which get a new scale from what they hold then: rows of
// any size, and hidden keys that hold anything, need no further pass.

template <int kDim_, int kWarps_, int kQueries_, int kMinBlocks_>
struct ShortTile {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kQueries = kQueries_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32, kKeys = kWarps * 32;  // at most; a multiple of 32
  static constexpr int kDimBlocks = kDim / 8;
  static constexpr int kSumStride = kDim + 8;  // of dQ: no bank conflicts
};

template <class C>
struct alignas(128) ShortStorage {
  SplitFp16Tile<C::kKeys, C::kDim> k, v;
  SplitFp16Tile<C::kQueries, C::kDim> q, dout;
  float k_factor[C::kKeys], v_factor[C::kKeys];  // what to multiply the halves of a row by
  float4 queries[C::kQueries];                   // lse in log2 units, delta, factors of Q, of dO
  float dq[C::kQueries * C::kSumStride];
  HeadCoord place[1];   // batch_head is that of the batch alone
  uint32_t first_head;  // of the queries
};

// Keys of a warp: a lane has four neighbours, 4 g ... 4 g + 3, as rows g, g + 8 of both m16 blocks.
__device__ __forceinline__ int place_of_key(int key) {
  return key / 32 * 32 + key % 4 * 8 + key % 32 / 4;
}

// Rows [0, count) of a tensor to halves, zeros from rows_valid and cols_valid on; put(row, factor).
// The factor of a row of zeros is 0: P and dS take it in, and what multiplies such a row (padding)
// must not decide the power of two of its neighbours.
template <class Tile, int kDim, bool kOfKeys, class Put>
__device__ __forceinline__ void load_split_fp16(uint32_t tile, const float* __restrict__ global,
                                                int64_t row_stride, int count, int rows_valid,
                                                int cols_valid, bool vector, Put&& put) {
  constexpr int kParts = kDim / 8;  // threads of a row
  using SplitFp16 = typename Tile::Rows;
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kParts; i += blockDim.x) {
    const int row = i / kParts, part = i % kParts, left = cols_valid - part * 8;
    const float* from = global + row * row_stride + part * 8;
    float x[8] = {};
    if (row < rows_valid) {
      if (vector) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (left <= half * 4) continue;
          const float4 y = __ldg(reinterpret_cast<const float4*>(from) + half);
          x[half * 4] = y.x, x[half * 4 + 1] = y.y, x[half * 4 + 2] = y.z, x[half * 4 + 3] = y.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (e < left) x[e] = __ldg(from + e);
      }
    }
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(x[e]));
#pragma unroll
    for (int step = 1; step < kParts; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const int exponent = scale_exponent(exponent_of(largest));
    const float scale = power_of_two(exponent);
    uint32_t high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e)
      halve_stored(x[2 * e] * scale, x[2 * e + 1] * scale, high[e], low[e]);
    const uint32_t to = tile + SplitFp16::offset(kOfKeys ? place_of_key(row) : row, part);
    ptx::st_shared(to, make_uint4(high[0], high[1], high[2], high[3]));
    ptx::st_shared(to + Tile::kLowBytes, make_uint4(low[0], low[1], low[2], low[3]));
    if (part == 0) put(row, largest == 0.f ? 0.f : power_of_two(-exponent));
  }
}

// Four neighbouring keys of each of two neighbouring queries.
template <class Element, class Vector>
__device__ __forceinline__ void load_four_keys(Vector (&to)[2], const Element* from, int64_t row,
                                               int64_t column, int queries, int keys, bool vector) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const Element* at = from + c * row;
    to[c] = Vector{};
    if (c >= queries) continue;
    if (vector) {
      if (keys > 0) to[c] = __ldg(reinterpret_cast<const Vector*>(at));
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (r < keys) reinterpret_cast<Element*>(&to[c])[r] = __ldg(at + r * column);
    }
  }
}

__device__ __forceinline__ float part(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_short_fp32_kernel(const __grid_constant__ FlashsciBackwardParams p,
                               const __grid_constant__ BackwardFp32Plan plan) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ShortStorage<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));
  using KeyTile = SplitFp16Tile<C::kKeys, C::kDim>;
  using QueryTile = SplitFp16Tile<C::kQueries, C::kDim>;
  const int warp = ptx::redux_max(threadIdx.x / 32), warps = blockDim.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    HeadCoord place(blockIdx.x, 1, p.heads_k, p.batch1);
    place.batch_head /= static_cast<uint32_t>(p.heads_k);
    shared.place[0] = place;
    shared.first_head = place.head * static_cast<uint32_t>(p.heads_q / p.heads_k);
  }
  __syncthreads();
  // The place, read again rather than kept in registers.
  const auto offset_of_keys = [&](const FlashsciStrides& strides) {
    const HeadCoord place = shared.place[opaque(0)];
    return place.offset(strides, place.head);
  };
  const bool three = p.precision == FLASHSCI_TF32X3;
  Window window(p.window_left, p.window_right, p.lower_right != 0, p.seq_q, p.seq_k);
  window.before = ptx::redux_max(window.before);
  window.after = ptx::redux_max(window.after);
  const int first_key = warp * 32, lane_key = first_key + lane / 4 * 4;

  const uint32_t k_tile = ptx::shared_address(&shared.k), v_tile = ptx::shared_address(&shared.v);
  const uint32_t q_tile = ptx::shared_address(&shared.q);
  constexpr int kToV = sizeof(KeyTile), kToDout = sizeof(QueryTile);
  const uint32_t k_start = start_of_a<KeyTile>(k_tile, first_key);
  const int warp_bytes = first_key * KeyTile::Rows::kRowBytes;
  load_split_fp16<KeyTile, C::kDim, true>(
      k_tile, static_cast<const float*>(p.k) + offset_of_keys(p.k_strides), p.k_strides.row,
      blockDim.x, p.seq_k, p.head_dim, plan.vector != 0,
      [&](int row, float factor) { shared.k_factor[row] = factor; });
  load_split_fp16<KeyTile, C::kDim, true>(
      v_tile, static_cast<const float*>(p.v) + offset_of_keys(p.v_strides), p.v_strides.row,
      blockDim.x, p.seq_k, p.head_dim_v, plan.vector != 0,
      [&](int row, float factor) { shared.v_factor[row] = factor; });

  float dk[2][C::kDimBlocks][4], dv[2][C::kDimBlocks][4];  // [m16 of keys, n8 of dims, fragment]
  clear(dk);
  clear(dv);

  const auto find = [&](int member, uint32_t& head) {
    const HeadCoord place = shared.place[opaque(0)];
    head = shared.first_head + member;
    return place;
  };
#pragma unroll 1
  for (int member = ptx::redux_max(p.heads_q / p.heads_k - 1); member >= 0; --member) {
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < static_cast<uint32_t>(p.seq_q); chunk += C::kQueries) {
      const int rows = min(p.seq_q - static_cast<int>(chunk), C::kQueries),
                tiles = (rows + 15) / 16;
      __syncthreads();  // nobody reads the chunk before
      const auto load = [&](uint32_t to, const void* from, const FlashsciStrides& strides,
                            int valid, int columns, auto&& put) {
        uint32_t head;
        const HeadCoord place = find(member, head);
        const int64_t offset = place.offset(strides, head);
        load_split_fp16<QueryTile, C::kDim, false>(
            to, static_cast<const float*>(from) + offset + chunk * strides.row, strides.row,
            tiles * 16, valid, columns, plan.vector != 0, put);
      };
      load(q_tile, p.q, p.q_strides, rows, p.head_dim,
           [&](int row, float factor) { shared.queries[row].z = factor; });
      load(q_tile + kToDout, p.dout, p.dout_strides, p.dout != nullptr ? rows : 0, p.head_dim_v,
           [&](int row, float factor) { shared.queries[row].w = factor; });
      {
        uint32_t head;
        const HeadCoord place = find(member, head);
        const float2* statistics =
            plan.statistics +
            (static_cast<int64_t>(place.batch_head) * p.heads_q + head) * p.seq_q + chunk;
        for (int i = threadIdx.x; i < tiles * 16; i += blockDim.x) {
          const float2 x = i < rows ? __ldg(statistics + i) : make_float2(INFINITY, 0.f);
          shared.queries[i].x = x.x, shared.queries[i].y = x.y;
        }
      }
#pragma unroll 1
      for (int i = threadIdx.x; i < tiles * 16 * C::kSumStride; i += blockDim.x) shared.dq[i] = 0.f;
      __syncthreads();

      const auto pair_offset = [&](const FlashsciScoreStrides& s) {
        uint32_t of;
        const HeadCoord at = find(member, of);
        return BiasMaskOfHead<>::offset(s, at, of);
      };
      const int steps = max(tiles, warps);
      // The bias of 16 queries on its way to the second-level cache, a step ahead.
      const auto prefetch = [&](int tile) {
        const FlashsciScoreStrides& s = p.bias_mask.bias_strides;
        if (!plan.bias_mask.vector_bias || tile >= tiles || lane_key >= p.seq_k) return;
        const int query = chunk + tile * 16 + lane % 4 * 2;
        const float* from =
            static_cast<const float*>(p.bias_mask.bias) + pair_offset(s) + lane_key * s.column;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ptx::prefetch_l2(from + min(query + i / 2 * 8 + i % 2, p.seq_q - 1) * s.row);
      };
      constexpr bool kPrefetch = C::kDim <= 16;  // registers
      if (kPrefetch && p.bias_mask.bias != nullptr) prefetch(warp);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const int tile = step + warp < steps ? step + warp : step + warp - steps;
        if (kPrefetch && p.bias_mask.bias != nullptr) prefetch(tile + 1 < steps ? tile + 1 : 0);
        const int first = chunk + tile * 16, last = min(first + 16, p.seq_q) - 1;
        if (tile < tiles && window.begin(first) < first_key + 32 && window.end(last) > first_key) {
          const int query = first + lane % 4 * 2;  // this lane's first
          const int tile_bytes = tile * 16 * QueryTile::Rows::kRowBytes;
          float s[2][2][4], dp[2][2][4];  // [m16 of keys, n8 of queries, fragment]
          multiply_rows<KeyTile, QueryTile, C::kDim>(
              s, opaque(k_start), start_of_rows<QueryTile>(opaque(q_tile), true) + tile_bytes,
              start_of_rows<QueryTile>(opaque(q_tile), false) + tile_bytes, three);
          multiply_rows<KeyTile, QueryTile, C::kDim>(
              dp, opaque(k_start) + kToV,
              start_of_rows<QueryTile>(opaque(q_tile), true) + tile_bytes + kToDout,
              start_of_rows<QueryTile>(opaque(q_tile), false) + tile_bytes + kToDout, three);
          const float4* queries = shared.queries + tile * 16 + opaque(lane) % 4 * 2;
          const bool partial = window.begin(last) > first_key || window.end(first) < first_key + 32;
          const int keys = p.seq_k - lane_key;  // from this lane's first on
#pragma unroll
          for (int n = 0; n < 2; ++n) {  // one after the other: registers
            const int row = query + n * 8;
            const float4 of[2] = {queries[n * 8], queries[n * 8 + 1]};
            const int here = opaque(lane_key);  // read again rather than kept
            const float4 k_factor = *reinterpret_cast<const float4*>(shared.k_factor + here);
            const float4 v_factor = *reinterpret_cast<const float4*>(shared.v_factor + here);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int m = i / 4, e = i % 4, r = m * 2 + e / 2;
              s[m][n][e] *= part(k_factor, r) * plan.inner * of[e % 2].z;
              dp[m][n][e] = fmaf(dp[m][n][e], part(v_factor, r) * of[e % 2].w, -of[e % 2].y);
            }
            if (plan.cap != 0.f) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                float& x = s[i / 4][n][i % 4];
                float slope;
                x = plan.cap * tanh_accurate(x, slope);
                dp[i / 4][n][i % 4] *= slope;
              }
            }
            if (p.bias_mask.bias != nullptr) {
              const FlashsciScoreStrides& strides = p.bias_mask.bias_strides;
              float4 bias[2];
              load_four_keys(bias,
                             static_cast<const float*>(p.bias_mask.bias) + pair_offset(strides) +
                                 row * strides.row + lane_key * strides.column,
                             strides.row, strides.column, p.seq_q - row, keys,
                             plan.bias_mask.vector_bias != 0);
#pragma unroll
              for (int i = 0; i < 8; ++i)
                s[i / 4][n][i % 4] += part(bias[i % 2], i / 4 * 2 + i % 4 / 2);
            }
            if (p.bias_mask.mask != nullptr) {
              const FlashsciScoreStrides& strides = p.bias_mask.mask_strides;
              uchar4 shown[2];
              load_four_keys(shown,
                             p.bias_mask.mask + pair_offset(strides) + row * strides.row +
                                 lane_key * strides.column,
                             strides.row, strides.column, p.seq_q - row, keys,
                             plan.bias_mask.vector_mask != 0);
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                const int r = i / 4 * 2 + i % 4 / 2;
                if (reinterpret_cast<const uint8_t*>(&shown[i % 2])[r] == 0)
                  s[i / 4][n][i % 4] = -INFINITY, dp[i / 4][n][i % 4] = 0.f;
              }
            }
            if (partial) {
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                const int key = lane_key + i / 4 * 2 + i % 4 / 2;
                if (key < window.begin(row + i % 2) || key >= window.end(row + i % 2))
                  s[i / 4][n][i % 4] = -INFINITY, dp[i / 4][n][i % 4] = 0.f;
              }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              float& x = s[i / 4][n][i % 4];
              x = ptx::ex2_approx(fmaf(x, kLog2e, -of[i % 2].x));
            }
            if (__any_sync(0xffffffffu, is_large(of[0].x) || is_large(of[1].x))) {
#pragma unroll
              for (int i = 0; i < 8; ++i) s[i / 4][n][i % 4] = fminf(s[i / 4][n][i % 4], 1.f);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) dp[i / 4][n][i % 4] *= s[i / 4][n][i % 4];
            if (plan.write_bias) {
              const FlashsciScoreStrides& strides = p.dbias_strides;
              float* target = static_cast<float*>(p.dbias) + pair_offset(strides) +
                              row * strides.row + lane_key * strides.column;
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                if (row + c >= p.seq_q) continue;
                float* to = target + c * strides.row;
                if (plan.vector_dbias) {
                  if (keys > 0)
                    *reinterpret_cast<float4*>(to) =
                        make_float4(dp[0][n][c], dp[0][n][c + 2], dp[1][n][c], dp[1][n][c + 2]);
                } else {
#pragma unroll
                  for (int r = 0; r < 4; ++r)
                    if (r < keys) to[r * strides.column] = dp[r / 2][n][r % 2 * 2 + c];
                }
              }
            }
          }
          float factor[2][2];
          if (p.dv != nullptr) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
              s[i / 8][i / 4 % 2][i % 4] *= queries[i / 4 % 2 * 8 + i % 2].w;
            normalise(s, factor);
            Operand<2, 2> operand;
            operand.take(s, three);
            multiply_dims<QueryTile, C::kDim, 2>(
                dv, operand, start_of_dims<QueryTile>(opaque(q_tile), true) + tile_bytes + kToDout,
                start_of_dims<QueryTile>(opaque(q_tile), false) + tile_bytes + kToDout, factor,
                three);
          }
          if (p.dk != nullptr) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
              s[i / 8][i / 4 % 2][i % 4] =
                  dp[i / 8][i / 4 % 2][i % 4] * queries[i / 4 % 2 * 8 + i % 2].z;
            normalise(s, factor);
            Operand<2, 2> operand;
            operand.take(s, three);
            multiply_dims<QueryTile, C::kDim, 2>(
                dk, operand, start_of_dims<QueryTile>(opaque(q_tile), true) + tile_bytes,
                start_of_dims<QueryTile>(opaque(q_tile), false) + tile_bytes, factor, three);
          }
          if (p.dq != nullptr) {
            // Scales by query, which are columns; then the halves turn into rows of queries.
            float of_column[2][2];
            const float4 k_factor =
                *reinterpret_cast<const float4*>(shared.k_factor + opaque(lane_key));
#pragma unroll
            for (int i = 0; i < 16; ++i)
              dp[i / 8][i / 4 % 2][i % 4] *= part(k_factor, i / 8 * 2 + i % 4 / 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int n = i / 2, c = i % 2;
              float largest = fmaxf(fmaxf(fabsf(dp[0][n][c]), fabsf(dp[0][n][c + 2])),
                                    fmaxf(fabsf(dp[1][n][c]), fabsf(dp[1][n][c + 2])));
#pragma unroll
              for (int step_ = 4; step_ < 32; step_ *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step_));
              const int scale = scale_exponent(exponent_of(largest));
              of_column[n][c] = power_of_two(-scale);
#pragma unroll
              for (int r = 0; r < 4; ++r) dp[r / 2][n][r % 2 * 2 + c] *= power_of_two(scale);
            }
            Operand<1, 4> operand;  // 16 queries x 32 keys
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int m = i / 4, half = i / 2 % 2, n = i % 2;
              uint32_t high, low;
              halve(dp[m][n][half * 2], dp[m][n][half * 2 + 1], high, low);
              operand.high[0][m][half * 2 + n] = ptx::movmatrix_trans(high);
              operand.low[0][m][half * 2 + n] = ptx::movmatrix_trans(low);
            }
            float of_row[1][2], dq[1][C::kDimBlocks][4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const float even = __shfl_sync(0xffffffffu, of_column[n][0], lane / 8);
              const float odd = __shfl_sync(0xffffffffu, of_column[n][1], lane / 8);
              of_row[0][n] = lane / 4 % 2 == 0 ? even : odd;
            }
            clear(dq);
            multiply_dims<KeyTile, C::kDim, 2>(
                dq, operand, start_of_dims<KeyTile>(opaque(k_tile), true) + warp_bytes,
                start_of_dims<KeyTile>(opaque(k_tile), false) + warp_bytes, of_row, three);
            float* sum = shared.dq + (tile * 16 + lane / 4) * C::kSumStride + lane % 4 * 2;
#pragma unroll
            for (int d = 0; d < C::kDimBlocks; ++d) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                auto& to = *reinterpret_cast<float2*>(sum + half * 8 * C::kSumStride + d * 8);
                to.x += dq[0][d][half * 2];
                to.y += dq[0][d][half * 2 + 1];
              }
            }
          }
        }
        __syncthreads();  // the warps change places
      }
      if (p.dq != nullptr) {
        uint32_t head;
        const HeadCoord place = find(member, head);
        float* target =
            static_cast<float*>(p.dq) + place.offset(p.dq_strides, head) + chunk * p.dq_strides.row;
#pragma unroll 1
        for (int i = threadIdx.x; i < min(p.seq_q - static_cast<int>(chunk), C::kQueries) * C::kDim;
             i += blockDim.x) {
          const int row = i / C::kDim, d = i % C::kDim;
          if (d < p.head_dim)
            target[row * p.dq_strides.row + d] = shared.dq[row * C::kSumStride + d] * p.scale;
        }
      }
    }
  }

  // Rows of a lane are neighbours.
  const auto store = [&](const float (&x)[2][C::kDimBlocks][4], void* to,
                         const FlashsciStrides& strides, int columns, float scale) {
    if (to == nullptr) return;
    float* target =
        static_cast<float*>(to) + offset_of_keys(strides) + lane_key * strides.row + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (lane_key + r >= p.seq_k) continue;
#pragma unroll
      for (int i = 0; i < C::kDimBlocks * 2; ++i)
        if (i / 2 * 8 + lane % 4 * 2 + i % 2 < columns)
          target[r * strides.row + i / 2 * 8 + i % 2] = x[r / 2][i / 2][r % 2 * 2 + i % 2] * scale;
    }
  };
  store(dk, p.dk, p.dk_strides, p.head_dim, p.scale);
  store(dv, p.dv, p.dv_strides, p.head_dim_v, 1.f);
}

}  // namespace flashsci::sm80::bwd_fp32
