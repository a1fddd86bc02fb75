// The end of a tile: sums of warps with different keys are added and written. If rows are few, a
// separate warp does that while the others work on the next tile.
#pragma once
#include <cstdint>

#include "../../ptx/math.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../softmax.cuh"
#include "warp_tile.cuh"

namespace flashsci::paged {

enum NamedBarrier { kComputing = 1 };  // 0 is __syncthreads

// The lse (in powers of two) of a row with one more logit, and the factor of its output.
__device__ __forceinline__ float2 with_logit(float lse, float logit) {
  const float top = fmaxf(lse, logit);
  if (top == -INFINITY) return make_float2(-INFINITY, 0.f);
  const float own = ptx::ex2_approx(lse - top), sum = own + ptx::ex2_approx(logit - top);
  return make_float2(top + ptx::lg2_approx(sum), own / sum);
}

// Writes rows: of a whole tile to out and lse, of a partial tile to the workspace.
template <class Op, class C>
struct Writer {
  const Args& a;
  const Rows& rows;
  const float v_scale;
  const bool whole;
  const int64_t piece;
  __device__ __forceinline__ Writer(const Args& a_, const Rows& rows_, float v_scale_)
      : a(a_),
        rows(rows_),
        v_scale(v_scale_),
        whole(rows.tile.block == 0 && rows.tile.last == rows.tile.slot.blocks),
        piece(piece_of(blockIdx.x, rows.tile.block == 0)) {}

  // Writes four columns of row r. offset, sum: of its softmax; x: of P V, not normalised.
  __device__ __forceinline__ void write(int r, int column, float4 x, float offset,
                                        float sum) const {
    float factor = sum == 0.f ? 0.f : ptx::rcp_approx(sum) * v_scale;
    float lse = sum == 0.f ? -INFINITY : offset + ptx::lg2_approx(sum);
    if (whole) {
      const int token = rows.token_of(r), head = rows.head_of(r);
      if (a.p.sink != nullptr) {
        const float2 both = with_logit(lse, __ldg(a.p.sink + head) * kLog2e);
        lse = both.x, factor *= both.y;
      }
      auto* out = static_cast<uint16_t*>(a.p.out) + token * a.p.out_row + head * a.p.out_head;
      if (column < a.p.head_dim_v)
        *reinterpret_cast<uint2*>(out + column) = make_uint2(Op::pack2(x.x * factor, x.y * factor),
                                                             Op::pack2(x.z * factor, x.w * factor));
      if (column == 0 && a.p.lse != nullptr)
        a.p.lse[int64_t{head} * a.p.tokens + token] = lse * kLn2;
    } else {
      const int64_t place = piece * kRows + r;
      *reinterpret_cast<float4*>(a.plan.partial_out + place * C::kHeadDim + column) =
          make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
      if (column == 0) a.plan.partial_lse[place] = lse;
    }
  }
};

// A lane has eighths 2t and 2t + 1 of a box's columns; an eighth is kFours times four columns. A
// part of the sums has kOfPart fours of each eighth.
template <class C>
struct Eighth {
  static constexpr int kFours = C::kColumns / 32, kOfPart = C::kSumColumns / 32;
  static constexpr int kParts = kFours / kOfPart;
  // The first of the four columns of a box at this place in a part.
  static __device__ __forceinline__ int column(int part, int place) {
    return (place / kOfPart * kFours + part * kOfPart + place % kOfPart) * 4;
  }
};

// The largest number of rows of a tile that one warp merges: rows of all columns that fit in the
// memory of 16 rows of kSumColumns.
template <class C>
inline constexpr int kFewRows = kWarpRows * C::kSumColumns * C::kSlices / C::kHeadDim < 8
                                    ? kWarpRows * C::kSumColumns * C::kSlices / C::kHeadDim
                                    : 8;

// Places of 4 columns of a row of the sums: lanes that store, or load, together have no bank
// conflicts. part_place is for a part of a box; row_place for all columns of a warp, where rows are
// few.
template <class C>
__device__ __forceinline__ float4* part_place(Storage<C>& shared, int warp, int row, int four) {
  return reinterpret_cast<float4*>(shared.sums[warp][row]) +
         (four ^ (four / 8 | row % 2 * (C::kSumColumns / 32)));
}
template <class C>
__device__ __forceinline__ float4* row_place(Storage<C>& shared, int warp, int row, int four) {
  return reinterpret_cast<float4*>(shared.sums[warp]) + row * (C::kHeadDim / C::kSlices / 4) +
         (four ^ row);
}

// Stores a warp's sums of a part of one box's columns, for its first 8 rows or all. place(row,
// four): the address of four columns of the part.
template <int kHalves, class Op, class Format, class C, class Place>
__device__ __forceinline__ void leave_sums(const WarpTile<Op, Format, C>& warp_tile, int box,
                                           int sums, const Place& place) {
  using E = Eighth<C>;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = warp_tile.g + half * 8;
    if (warp_tile.tier * kWarpRows + row >= warp_tile.rows.rows) continue;
#pragma unroll
    for (int i = 0; i < 2 * E::kOfPart; ++i) {
      const int first = (box * E::kFours + sums * E::kOfPart + i % E::kOfPart) * 4;
      const auto sum = [&](int j) { return warp_tile.o[first + j][half * 2 + i / E::kOfPart]; };
      *place(row, warp_tile.t * 2 * E::kOfPart + i) = make_float4(sum(0), sum(1), sum(2), sum(3));
    }
  }
}

template <class Op, class Format, class C>
__device__ __forceinline__ void leave_statistics(const WarpTile<Op, Format, C>& warp_tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(warp_tile.statistics.sum[half]);
    if (warp_tile.t == 0)
      warp_tile.shared.statistics[warp_tile.warp][warp_tile.g + half * 8] =
          make_float2(warp_tile.statistics.row_max_log2[half], sum);
  }
}

// Stores all columns of few rows.
template <class Op, class Format, class C>
__device__ __forceinline__ void leave_all(const WarpTile<Op, Format, C>& warp_tile) {
#pragma unroll
  for (int i = 0; i < C::kBoxes / C::kSlices * Eighth<C>::kParts; ++i) {
    const int box = i / Eighth<C>::kParts, sums = i % Eighth<C>::kParts;
    leave_sums<1>(warp_tile, box, sums, [&](int row, int place) {
      const int column = box * C::kColumns + Eighth<C>::column(sums, place);  // in the slice
      return row_place(warp_tile.shared, warp_tile.warp, row, column / 4);
    });
  }
  leave_statistics(warp_tile);
}

// Merges rows [first, end) of a tile of few rows; run by one warp.
template <class Op, class C>
__device__ __forceinline__ void merge_rows(Storage<C>& shared, const Writer<Op, C>& writer,
                                           int first, int end) {
  constexpr int kFours = C::kHeadDim / 4, kOfSlice = kFours / C::kSlices;
  constexpr int kRowLanes = kKeyWarps<C>;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (; first < end; first += 32 / kRowLanes) {
    // Each lane has the statistics of one warp for one row.
    const float2 own = shared.statistics[lane % kRowLanes][min(first + lane / kRowLanes, end - 1)];
    float offset = own.x;
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2)
      offset = fmaxf(offset, __shfl_xor_sync(0xffffffffu, offset, step));
    const float weight = ptx::ex2_approx(own.x - offset);
    float sum = weight * own.y;
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll 1
    for (int i = 0; i < min(end - first, 32 / kRowLanes); ++i) {
      const float row_offset = __shfl_sync(0xffffffffu, offset, i * kRowLanes);
      const float row_sum = __shfl_sync(0xffffffffu, sum, i * kRowLanes);
#pragma unroll 1
      for (int four = lane; four < kFours + lane; four += 32) {
        const int slice = four % kFours / kOfSlice;
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int warp = 0; warp < kKeyWarps<C>; ++warp) {
          const float other = __shfl_sync(0xffffffffu, weight, i * kRowLanes + warp);
          const float4 part =
              *row_place(shared, slice * kKeyWarps<C> + warp, first + i, four % kOfSlice);
          x.x = fmaf(other, part.x, x.x), x.y = fmaf(other, part.y, x.y);
          x.z = fmaf(other, part.z, x.z), x.w = fmaf(other, part.w, x.w);
        }
        if (four < kFours) writer.write(first + i, four * 4, x, row_offset, row_sum);
      }
    }
  }
}

// Few rows of the last tile: the computing warps merge them, since no other work is left.
template <class Op, class Format, class C>
__device__ __forceinline__ void gather_few(const WarpTile<Op, Format, C>& warp_tile,
                                           float v_scale) {
  const Writer<Op, C> writer(warp_tile.args, warp_tile.rows, v_scale);
  leave_all(warp_tile);
  ptx::barrier_sync(kComputing, kComputingThreads);
  merge_rows(warp_tile.shared, writer, warp_tile.warp,
             min(warp_tile.warp + 1, warp_tile.rows.rows));
}

// The merging warp: tile after tile. It also records the tile whose end belongs to another CTA.
template <class Op, class C>
__device__ __forceinline__ void merge(Storage<C>& shared, const Args& a, const Runs& runs) {
  uint32_t handed = 0;
#pragma unroll 1
  for (uint32_t tiles = 0;; ++tiles) {
    const uint32_t stage = tiles % C::kQStages;
    C::Isa::wait(shared.q_full[stage], tiles / C::kQStages & 1);
    const Rows rows(a, shared.tiles[stage]);
    const Writer<Op, C> writer(a, rows, shared.v_scale[stage]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) C::Isa::arrive(shared.q_empty[stage]);
    const Tile& tile = rows.tile;
    if (!tile.more) {
      Cut cut = {-1};
      if (!writer.whole && tile.block == 0)
        cut = {runs.cta_of(tile.begin + tile.slot.blocks - 1), tile.head, tile.slot.first_q,
               tile.slot.first_row, rows.rows};
      if (threadIdx.x % 32 == 0) a.plan.cuts[blockIdx.x] = cut;
      return;
    }
    if (rows.rows > kFewRows<C>) continue;
    C::Isa::wait(shared.sums_full, handed++ & 1);
    merge_rows(shared, writer, 0, rows.rows);
    __syncwarp();
    if (threadIdx.x % 32 == 0) C::Isa::arrive(shared.sums_empty);
  }
}

// More rows, some columns at a time, merged by the computing warps themselves.
template <class Op, class C>
__device__ __forceinline__ void write_part(Storage<C>& shared, const Writer<Op, C>& writer, int box,
                                           int sums) {
  constexpr int kFours = C::kSumColumns / 4;
  const Rows& rows = writer.rows;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows.rows * kFours * C::kSlices; i += kComputingThreads) {
    const int slice = i / kFours % C::kSlices, four = i % kFours;
    const int r = i / (kFours * C::kSlices), row = r % kWarpRows;
    // Warps of other rows are read too, with no weight: no load waits for a branch.
    const auto has_row = [&](int warp) { return (warp & (rows.tiers - 1)) == r / kWarpRows; };
    float2 statistics[kKeyWarps<C>];
    float4 parts[kKeyWarps<C>];
#pragma unroll
    for (int warp = 0; warp < kKeyWarps<C>; ++warp) {
      statistics[warp] = shared.statistics[warp][row];
      parts[warp] = *part_place(shared, slice * kKeyWarps<C> + warp, row, four);
    }
    float offset = kUninitializedMax, sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kKeyWarps<C>; ++warp)
      if (has_row(warp)) offset = fmaxf(offset, statistics[warp].x);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int warp = 0; warp < kKeyWarps<C>; ++warp) {
      if (!has_row(warp)) continue;
      const float weight = ptx::ex2_approx(statistics[warp].x - offset);
      const float4 part = parts[warp];
      sum = fmaf(weight, statistics[warp].y, sum);
      x.x = fmaf(weight, part.x, x.x), x.y = fmaf(weight, part.y, x.y);
      x.z = fmaf(weight, part.z, x.z), x.w = fmaf(weight, part.w, x.w);
    }
    const int column = (slice * (C::kBoxes / C::kSlices) + box) * C::kColumns;
    writer.write(r, column + Eighth<C>::column(sums, four), x, offset, sum);
  }
}

template <class Op, class Format, class C>
__device__ __forceinline__ void gather(const WarpTile<Op, Format, C>& warp_tile, float v_scale) {
  const Writer<Op, C> writer(warp_tile.args, warp_tile.rows, v_scale);
  leave_statistics(warp_tile);
#pragma unroll
  for (int i = 0; i < C::kBoxes / C::kSlices * Eighth<C>::kParts; ++i) {
    const int box = i / Eighth<C>::kParts, sums = i % Eighth<C>::kParts;
    leave_sums<2>(warp_tile, box, sums, [&](int row, int place) {
      return part_place(warp_tile.shared, warp_tile.warp, row, place);
    });
    ptx::barrier_sync(kComputing, kComputingThreads);
    write_part(warp_tile.shared, writer, box, sums);
    ptx::barrier_sync(kComputing, kComputingThreads);  // the old contents have been read
  }
}

}  // namespace flashsci::paged
