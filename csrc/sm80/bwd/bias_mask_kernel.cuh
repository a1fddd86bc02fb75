// The backward of kernel.cuh with a bias or a mask, and with rows that take no 16-byte copies.
//
// Maths     as there, with the bias added to S and -inf where the mask hides; dS is also the
//           gradient of a bias that has a place for every pair.
// Roles     as there. Keys are dealt to the rows of a warp so that a lane has neighbours
//           (bias_mask.cuh).
// Shared    as there, and where everything is: the loop has no registers for pointers
//           (scheduler.cuh).
// Pipeline  as there; the bias and a mask of keys come one step ahead, in registers.
// Limits    Registers: docs/kernels/sm80_backward.md.
#pragma once
#include <cstddef>

#include "../../core/poison.cuh"
#include "../../ptx/red.cuh"
#include "bias_mask.cuh"
#include "kernel.cuh"
#include "scheduler.cuh"

namespace flashsci::sm80::bwd {

template <class C>
struct BackwardBiasMaskShared {
  BackwardShared<C> tiles;
  KeyTileWork work;
};

// A tile of K or V, its rows as row_of_key deals them; once per CTA.
template <class C>
__device__ __forceinline__ void load_keys(uint32_t tile, const uint16_t* __restrict__ global,
                                          int64_t row_stride, int rows_valid, int cols_valid,
                                          int copy_bytes, bool vector) {
  using T = Tile<C::kHeadDim>;
#pragma unroll 4
  for (int i = threadIdx.x; i < C::kBlockK * T::kChunks; i += C::kThreads) {
    const int key = i / T::kChunks, chunk = i % T::kChunks;
    const uint32_t target = tile + T::offset(row_of_key<C::kM>(key), chunk);
    const uint16_t* source = global + key * row_stride + chunk * kChunkElements;
    const int columns = key < rows_valid ? cols_valid - chunk * kChunkElements : 0;
    poison_chunk(target);
    if (vector)
      ptx::cp_async_16(target, source, columns > 0);
    else
      load_chunk(target, source, min(columns, kChunkElements), copy_bytes);
  }
}

template <class Op, class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks)
    backward_bias_mask_kernel(const __grid_constant__ FlashsciBackwardParams p,
                              const __grid_constant__ BackwardPlan plan, uint32_t tiles) {
  using T = Tile<C::kHeadDim>;
  using TS = Tile<C::kBlockQ>;  // of P^T and dS^T
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardBiasMaskShared<C>*>(shared_memory);
  poison_block(&shared, sizeof(shared));

  const int warp = ptx::redux_max(threadIdx.x / 32);
  // Shuffled, so that it is kept: the special register takes long to read.
  const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  if (warp == 0) shared.work.template find<C>(p, plan, tiles);
  __syncthreads();
  if (plan.writes_dq && shared.work.zero_rows > 0) {
    for (int member = 0; member < plan.group; ++member)
      zero_rows(shared.work.dq + member * p.dq_strides.head, p.dq_strides.row,
                shared.work.zero_rows, p.head_dim, C::kThreads);
  }
  if (shared.work.keys <= 0) return;

  const int queries = ptx::redux_max(shared.work.queries);
  const int keys = ptx::redux_max(shared.work.keys);
  const int first_tile = ptx::redux_max(shared.work.first_tile);
  const int end_tile = ptx::redux_max(shared.work.end_tile);
  const Window window(ptx::redux_max(shared.work.before), ptx::redux_max(shared.work.after), keys);
  const bool any = first_tile < end_tile;
  const int warp_k = warp / C::kWarpsQ, warp_q = warp % C::kWarpsQ;
  const int role = C::kRoles == 2 ? warp_q % 2 : 0, dim_part = warp_q / C::kRoles;
  const int tile_key = ptx::redux_max(shared.work.tile_key);
  const int warp_key = tile_key + warp_k * C::kKeys;

  using Tiles = BackwardShared<C>;
  constexpr int kFromK = offsetof(Tiles, v) - offsetof(Tiles, k);        // from K to V
  constexpr int kFromQ = offsetof(Tiles, dout) - offsetof(Tiles, q);     // from Q to dO
  constexpr int kFromDs = (C::kRoles - 1) * C::kBlockK * TS::kRowBytes;  // from dS^T to P^T
  const uint32_t k_tile = ptx::shared_address(shared.tiles.k);
  const uint32_t q_tile = k_tile + offsetof(Tiles, q);
  const uint32_t ds_tile = k_tile + offsetof(Tiles, products);
  const uint32_t statistics_tile = k_tile + offsetof(Tiles, statistics);
  const uint32_t work = k_tile + offsetof(BackwardBiasMaskShared<C>, work);
  constexpr int kStageBytes = C::kBlockQ * T::kRowBytes;
  const auto advance = [&](int& member, int& query_tile) {
    const uint64_t ends = ptx::ld_shared_u64(work + offsetof(KeyTileWork, first_tile));
    const bool last = query_tile + 1 == static_cast<int>(ends >> 32);
    query_tile = last ? static_cast<int>(ends) : query_tile + 1;
    member += last;
  };
  const bool vector = plan.vector != 0;

  const auto load = [&](uint32_t target, const uint16_t* source, int64_t row_stride, int rows_valid,
                        int columns) {
    if (vector)
      load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, true, true>(target, source, row_stride,
                                                                  rows_valid, columns, 16);
    else
      load_tile<C::kBlockQ, C::kHeadDim, C::kThreads, false, true>(
          target, source, row_stride, rows_valid, columns, p.copy_bytes);
  };
  const auto load_queries = [&](int member, int query_tile, int stage) {
    const int row = query_tile * C::kBlockQ;
    load(q_tile + stage * kStageBytes,
         kept<const uint16_t>(work + offsetof(KeyTileWork, q)) + member * p.q_strides.head +
             row * p.q_strides.row,
         p.q_strides.row, queries - row, p.head_dim);
    load(q_tile + kFromQ + stage * kStageBytes,
         kept<const uint16_t>(work + offsetof(KeyTileWork, dout)) + member * p.dout_strides.head +
             row * p.dout_strides.row,
         p.dout_strides.row, p.dout != nullptr ? queries - row : 0, p.head_dim_v);
    const int thread = opaque(threadIdx.x);
    if (thread < C::kBlockQ) {
      const uint32_t target = statistics_tile + (stage * C::kBlockQ + thread) * 8;
      if (row + thread < queries)
        ptx::cp_async_small<8>(target,
                               kept<const float2>(work + offsetof(KeyTileWork, statistics)) +
                                   member * int64_t{p.seq_q} + row + thread,
                               8);
      else  // no probability, whatever the scores of rows that do not exist
        ptx::st_shared(target, make_uint2(__float_as_uint(-INFINITY), 0));
    }
  };

  float sums[C::kSums][C::kM][2 * C::kChunkPairs]
            [4];  // dV and dK, or one of them: [m16, n8, fragment]
#pragma unroll
  for (int i = 0; i < C::kSums; ++i) set_zero(sums[i]);

  if (any) {
    load_keys<C>(k_tile, shared.work.k, p.k_strides.row, keys - tile_key, p.head_dim, p.copy_bytes,
                 vector);
    load_keys<C>(k_tile + kFromK, shared.work.v, p.v_strides.row, keys - tile_key, p.head_dim_v,
                 p.copy_bytes, vector);
    if (C::kStages == 2) load_queries(0, first_tile, 0);
    ptx::cp_async_commit();
  }

  // Where this lane's fragments of P^T and dS^T go: key lane / 4, query lane % 4 * 2.
  const uint32_t products_out =
      ds_tile + warp_k * C::kKeys * TS::kRowBytes + TS::offset(lane / 4, 0) + lane % 4 * 4;
  const int dq_warp_q = warp / C::kDqWarpsD, dq_warp_d = warp % C::kDqWarpsD;

  const auto bias_of = [&](int member) {
    return kept<const unsigned char>(work + offsetof(KeyTileWork, bias)) +
           member * p.bias_mask.bias_strides.head * (p.bias_mask.bias_is_fp32 ? 4 : 2);
  };
  const auto mask_of = [&](int member) {
    return kept<const uint8_t>(work + offsetof(KeyTileWork, mask)) +
           member * p.bias_mask.mask_strides.head;
  };
  BiasMaskAhead<Op, C::kM, C::kN> ahead;
  const auto load_ahead = [&](int member, int query) {
    ahead.load(p.bias_mask, plan, bias_of(member), mask_of(member), query + lane % 4 * 2,
               warp_key + lane / 4 * (2 * C::kM), member < plan.group ? queries : 0,
               member < plan.group ? keys : 0);
  };
  load_ahead(any ? 0 : plan.group, first_tile * C::kBlockQ + warp_q * C::kQueries);

  int stage = 0;
#pragma unroll 1
  for (int member = 0, query_tile = first_tile; any && member < plan.group;) {
    if constexpr (C::kStages == 1) {
      __syncthreads();  // nobody reads the tile before
      load_queries(member, query_tile, 0);
      ptx::cp_async_commit();
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // this stage has landed; nobody reads the other one, P or dS any more
    if constexpr (C::kStages == 2) {
      int next_member = member, next_tile = query_tile;
      advance(next_member, next_tile);
      if (next_member < plan.group) load_queries(next_member, next_tile, stage ^ 1);
      ptx::cp_async_commit();
    }

    const int tile_query = query_tile * C::kBlockQ;
    const uint32_t q_stage = q_tile + stage * kStageBytes;
#pragma unroll 1
    for (int step = warp_q * C::kQueries; step < (warp_q + 1) * C::kQueries; step += C::kStep) {
      const int query = tile_query + step;
      // Some of these queries see some of this warp's keys; all see all.
      const int last_query = min(query + C::kStep, queries) - 1;
      const int last_key = min(warp_key + C::kKeys, keys) - 1;
      const bool active =
          query < queries && window.begin(query) <= last_key && window.end(last_query) > warp_key;
      const bool full =
          window.begin(last_query) <= warp_key && window.end(query) >= warp_key + C::kKeys;
      uint32_t p16[C::kN / 2][C::kM][4], ds16[C::kN / 2][C::kM][4];
      if (active) {
        float s[C::kM][C::kN][4];   // S^T, then P^T
        float dp[C::kM][C::kN][4];  // dP^T - delta, then dS^T
        // opaque: no address is worth a register through the loop.
        const uint32_t k_left =
            k_tile + warp_k * C::kKeys * T::kRowBytes + lane_by_rows<C::kHeadDim>(opaque(lane));
        const uint32_t right = q_stage + lane_by_chunks<C::kHeadDim>(lane) + step * T::kRowBytes;
        const uint32_t statistics =
            statistics_tile + (stage * C::kBlockQ + step) * 8 + lane % 4 * 16;
        ahead.start(s, p.bias_mask, plan);
        multiply_rows<Op, C::kHeadDim>(s, k_left, right);
#pragma unroll
        for (int n = 0; n < C::kN; ++n) {
          const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
          for (int m = 0; m < C::kM; ++m) {
            dp[m][n][0] = dp[m][n][2] = x.y;
            dp[m][n][1] = dp[m][n][3] = x.w;
          }
        }
        multiply_rows<Op, C::kHeadDim>(dp, k_left + kFromK, right + kFromQ);
        if (plan.score_mode == kSoftcap)
          apply_softcap(s, dp, plan);
        else if (plan.score_mode == kLinear)
          scale_linear(s, plan.score_inner);
        const int key = warp_key + lane / 4 * (2 * C::kM), column = query + lane % 4 * 2;
        ahead.apply_rest(s, p.bias_mask, plan, bias_of(member), mask_of(member), column, key,
                         queries, keys);
        if (!full) mask_transposed(s, window, opaque(key), column);
#pragma unroll
        for (int n = 0; n < C::kN; ++n) {
          const float4 x = load_statistics(statistics + n * 64);
#pragma unroll
          for (int m = 0; m < C::kM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              s[m][n][e] =
                  ptx::ex2_approx(fmaf(s[m][n][e], plan.exp_scale, e % 2 == 0 ? x.x : x.z));
            }
          }
        }
        if (any_large_column<C::kN>(statistics)) limit_probabilities(s);
#pragma unroll
        for (int i = 0; i < C::kM * C::kN * 4; ++i)
          dp[i / (4 * C::kN)][i / 4 % C::kN][i % 4] *= s[i / (4 * C::kN)][i / 4 % C::kN][i % 4];
        if (plan.writes_bias) {
          unsigned char* dbias = kept<unsigned char>(work + offsetof(KeyTileWork, dbias)) +
                                 member * p.dbias_strides.head * (p.bias_mask.bias_is_fp32 ? 4 : 2);
          store_bias_gradient<Op>(dp, dbias, p.bias_mask.bias_is_fp32 != 0, plan.dbias_vector != 0,
                                  p.dbias_strides.row, column, key, queries, keys);
        }
        pack<Op>(p16, s);
        pack<Op>(ds16, dp);
      } else {
#pragma unroll
        for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i)
          p16[i / (4 * C::kM)][i / 4 % C::kM][i % 4] = ds16[i / (4 * C::kM)][i / 4 % C::kM][i % 4] =
              0;
      }
#pragma unroll
      for (int i = 0; i < C::kN / 2 * C::kM * 4; ++i) {
        const int k = i / (4 * C::kM), m = i / 4 % C::kM, part = i % 4;
        const uint32_t target = ((products_out ^ (step * 2)) ^ ((2 * k + part / 2) * kChunkBytes)) +
                                (m * 16 + part % 2 * 8) * TS::kRowBytes;
        ptx::st_shared(target, ds16[k][m][part]);
        if (C::kRoles == 2 && (C::kDimSplit > 1 || role == 1))
          ptx::st_shared(target + kFromDs, p16[k][m][part]);
      }
      if (active) {
        if constexpr (C::kRoles == 1) {
          const Span<C::kHeadDim, C::kChunkPairs> right(
              q_stage + step * T::kRowBytes + lane_by_rows<C::kHeadDim>(lane), 0);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k)
            multiply_16<Op>(sums[0], p16[k], right, kFromQ + k * 16 * T::kRowBytes);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k)
            multiply_16<Op>(sums[C::kSums - 1], ds16[k], right, k * 16 * T::kRowBytes);
        } else {
          const Span<C::kHeadDim, C::kChunkPairs> right(q_stage + (role == 0 ? kFromQ : 0) +
                                                             step * T::kRowBytes +
                                                             lane_by_rows<C::kHeadDim>(lane),
                                                         dim_part);
#pragma unroll
          for (int k = 0; k < C::kN / 2; ++k) {
            uint32_t a[C::kM][4];
#pragma unroll
            for (int i = 0; i < C::kM * 4; ++i)
              a[i / 4][i % 4] = role == 0 ? p16[k][i / 4][i % 4] : ds16[k][i / 4][i % 4];
            multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
          }
        }
      }
      {
        int next_member = member, next_query = query + C::kStep;
        if (step + C::kStep >= (warp_q + 1) * C::kQueries) {
          int next_tile = query_tile;
          advance(next_member, next_tile);
          next_query = next_tile * C::kBlockQ + warp_q * C::kQueries;
        }
        load_ahead(next_member, next_query);
      }
    }
    __syncthreads();  // dS and P are written

    // The queries that other warps of the group had.
    if constexpr (C::kRoles == 2) {
      const uint32_t left = ds_tile + (role == 0 ? kFromDs : 0) +
                            warp_k * C::kKeys * TS::kRowBytes + lane_by_rows<C::kBlockQ>(lane);
#pragma unroll 1
      for (int other = 1; other < C::kWarpsQ; ++other) {
        const int from = (warp_q ^ other) * C::kQueries;
        const Span<C::kHeadDim, C::kChunkPairs> right(q_stage + (role == 0 ? kFromQ : 0) +
                                                           from * T::kRowBytes +
                                                           lane_by_rows<C::kHeadDim>(lane),
                                                       dim_part);
#pragma unroll
        for (int k = 0; k < C::kQueries / 16; ++k) {
          uint32_t a[C::kM][4];
#pragma unroll
          for (int m = 0; m < C::kM; ++m)
            ptx::ldmatrix_x4(a[m], (left ^ (from * 2 + k * 32)) + m * 16 * TS::kRowBytes);
          multiply_16<Op>(sums[0], a, right, k * 16 * T::kRowBytes);
        }
      }
    }

    if (plan.adds_dq || plan.writes_dq) {
      float dq[C::kDqM][2 * C::kDqPairs][4];
      set_zero(dq);
      const uint32_t left = ds_tile + lane_by_chunks<C::kBlockQ>(opaque(lane));
      const Span<C::kHeadDim, C::kDqPairs> right(k_tile + lane_by_rows<C::kHeadDim>(opaque(lane)),
                                                 dq_warp_d);
#pragma unroll
      for (int k = 0; k < C::kBlockK / 16; ++k) {
        uint32_t a[C::kDqM][4];  // dS [16 kDqM queries, 16 keys]
#pragma unroll
        for (int m = 0; m < C::kDqM; ++m)
          ptx::ldmatrix_x4_trans(
              a[m], (left ^ ((dq_warp_q * C::kDqM + m) * 32)) + k * 16 * TS::kRowBytes);
        multiply_16<Op>(dq, a, right, k * 16 * T::kRowBytes);
      }
      if (plan.writes_dq) {
        const int row = tile_query + dq_warp_q * C::kDqM * 16;
        uint16_t* target = kept<uint16_t>(work + offsetof(KeyTileWork, dq)) +
                           member * p.dq_strides.head + row * p.dq_strides.row;
        store_rows_direct<Op>(dq, p.scale, target, p.dq_strides.row, queries - row,
                              dq_warp_d * C::kDqPairs * 16, p.head_dim, plan.vector_dq);
      } else {
        const int64_t slot = int64_t{member} * plan.query_slots + query_tile;
        float* target = kept<float>(work + offsetof(KeyTileWork, dq_sums)) +
                        slot * (C::kBlockQ * C::kHeadDim) + warp * C::kDqValues * 32 +
                        opaque(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < C::kDqValues; ++i)
          ptx::red_add(target + i * 32,
                       dq[i / (8 * C::kDqPairs)][i / 4 % (2 * C::kDqPairs)][i % 4]);
      }
    }
    advance(member, query_tile);
    if (C::kStages == 2) stage ^= 1;
  }

  // The tiles of K and V become those of dK and dV.
  __syncthreads();
  const int rows = keys - warp_key, row = warp_key - tile_key;
  const int chunk = dim_part * C::kChunkPairs * 2;
  if (p.dv != nullptr && (C::kRoles == 1 || role == 0))
    store_gradient<Op, C::kHeadDim, true>(sums[0], 1.f, k_tile + kFromK + row * T::kRowBytes, chunk,
                                          shared.work.dv + row * p.dv_strides.row, p.dv_strides.row,
                                          rows, p.head_dim_v, plan.vector_dv);
  if (p.dk != nullptr && (C::kRoles == 1 || role == 1))
    store_gradient<Op, C::kHeadDim, true>(sums[C::kSums - 1], p.scale, k_tile + row * T::kRowBytes,
                                          chunk, shared.work.dk + row * p.dk_strides.row,
                                          p.dk_strides.row, rows, p.head_dim, plan.vector_dk);
}

}  // namespace flashsci::sm80::bwd
