// A warp's share of a tile of paged attention: 16 rows, and some of the keys.
#pragma once
#include <cstdint>

#include "../../ptx/shared.cuh"
#include "../lazy_softmax.cuh"
#include "config.cuh"
#include "format.cuh"
#include "load_q.cuh"

namespace flashsci::paged {

// A tile's rows, shared by its warps, and the keys that they see.
struct Rows {
  const Tile tile;
  const int group;  // query heads of a head of K and V
  const Window window;
  const int rows;                // in the tile
  const int first_key, end_key;  // range of keys that some row sees
  const int tiers;               // of 16 rows: 1, 2 or 4; warps belong to them in turn

  __device__ __forceinline__ Rows(const Args& a, const Tile& tile_)
      : tile(tile_),
        group(a.group),
        window(a.p.window_left, a.p.window_right, true, tile.slot.seq_q, tile.slot.seq_k),
        rows(min(kRows, tile.slot.seq_q * group - tile.slot.first_row)),
        first_key(window.begin(query_of(0))),
        end_key(window.end(query_of(rows - 1))),
        tiers(rows <= kWarpRows       ? 1
              : rows <= 2 * kWarpRows ? 2
                                      : 4) {}

  // Row r is a query and one of the heads that share K and V; rows past the last repeat the last.
  __device__ __forceinline__ int pair_of(int r) const {
    return tile.slot.first_row + min(r, rows - 1);
  }
  __device__ __forceinline__ int query_of(int r) const { return pair_of(r) / group; }
  __device__ __forceinline__ int token_of(int r) const { return tile.slot.first_q + query_of(r); }
  __device__ __forceinline__ int head_of(int r) const {
    return tile.head * group + pair_of(r) % group;
  }
};

// Lane l, g = l / 4, t = l % 4. Any column of K may be any k of a product, as long as Q has the
// same order; likewise any column of V may be any n. So a lane reads neighbouring bytes: of K's
// rows g and g + 8 a quarter of each box, 4 bytes of it for a product; of V's rows 2t, 2t + 1, 2t +
// 8 and 2t + 9 an eighth, each column of which is one of the 8 of a product. If boxes are joined,
// consecutive rows are two lines of 128 bytes apart, and swizzles repeat after four rows. A lane
// then has other pieces of K, and each 8 keys another order, so that no two lanes use the same
// bank.
template <class Op, class Format, class C>
struct WarpTile {
  static constexpr int kColumns = C::kColumns, kBoxes = C::kBoxes;
  static constexpr int kPieces = C::kRowBytes / 64;  // of 16 bytes: a lane's in a row of K in a box
  static constexpr int kWords = C::kRowBytes / 32;   // a lane's in a row of V in a box
  static constexpr int kProducts = 4 / Format::kBytes;  // per piece
  using Product = Multiplied<Op, Format>;
  static constexpr int kSteps = C::kHeadDim / 16, kTiles = C::kHeadDim / C::kSlices / 8;

  Storage<C>& shared;
  const Args& args;
  const Rows& rows;
  const uint32_t q_stage;
  const int warp, slice;        // slice: of the columns of V
  const int tier, part, parts;  // this warp's part among the parts of the keys
  const int g, t;
  const bool busy;  // its tier has rows
  const int query[2];
  ScorePlan scores;

  RowStatistics statistics;
  float o[kTiles][4];
  uint32_t q[C::kKeepsQ ? kSteps : 1][4];
  float q_unit[2];

  __device__ __forceinline__ WarpTile(Storage<C>& shared_, const Args& args_, const Rows& rows_,
                                      uint32_t q_stage_, int warp_)
      : shared(shared_),
        args(args_),
        rows(rows_),
        q_stage(q_stage_),
        warp(warp_),
        slice(warp / kKeyWarps<C>),
        tier(warp % kKeyWarps<C> & (rows.tiers - 1)),
        part(warp % kKeyWarps<C> / rows.tiers),
        parts(kKeyWarps<C> / rows.tiers),
        g(threadIdx.x % 32 / 4),
        t(threadIdx.x % 4),
        busy(tier * kWarpRows < rows.rows),
        query{rows.query_of(tier * kWarpRows + g), rows.query_of(tier * kWarpRows + g + 8)},
        scores(args.scores),
        statistics{{kUninitializedMax, kUninitializedMax}, {0.f, 0.f}} {
    const float k_scale = shared.k_scale[q_stage];
    (scores.mode == kScaled ? scores.exp_scale : scores.inner) *= k_scale;
    if constexpr (Format::kBytes == 1 && Op::kIsBf16) {
      q_unit[0] = shared.q_units[q_stage][tier * kWarpRows + g];
      q_unit[1] = shared.q_units[q_stage][tier * kWarpRows + g + 8];
    }
    if constexpr (C::kKeepsQ) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q(q[step], step);
    }
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) o[i / 4][i % 4] = 0.f;
  }

  // The key, among 8, that is the n-th of a product.
  static __device__ __forceinline__ int key_of(int n) {
    return C::kJoined ? (n & 4) | (n << 1 & 2 ^ n >> 1 & 2) | n >> 1 & 1 : n;
  }
  // The i-th piece of this lane in a row of K in a box.
  __device__ __forceinline__ int own_piece(int i) const {
    return C::kJoined ? t + i * 4 : t * kPieces + i;
  }
  // Loads the Q operand of a product: four columns of both rows.
  __device__ __forceinline__ void load_q(uint32_t (&fragment)[4], int step) const {
    constexpr int kBoxSteps = kColumns / 16;
    constexpr int kPieceSteps = kBoxSteps / kPieces;
    const int four = step / kBoxSteps * kBoxSteps * 4 +
                     own_piece(step % kBoxSteps / kPieceSteps) * kPieceSteps + step % kPieceSteps;
    const uint4 words = ptx::ld_shared_v4(query_place<C>(shared.q[q_stage], tier, g, four));
    fragment[0] = words.x, fragment[1] = words.y, fragment[2] = words.z, fragment[3] = words.w;
  }

  // S of 16 keys, whose K begins at address k.
  __device__ __forceinline__ void score(float (&s)[8], uint32_t k) const {
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < kBoxes * kPieces; ++i) {
      uint4 words[2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        words[n] = ptx::ld_shared_v4(
            k + cache_place<C>(i / kPieces, key_of(g), own_piece(i % kPieces)) + n * 8 * C::kPitch);

#pragma unroll
      for (int j = 0; j < kProducts; ++j) {
        uint32_t own[4];
        if constexpr (C::kKeepsQ) {
#pragma unroll
          for (int e = 0; e < 4; ++e) own[e] = q[i * kProducts + j][e];
        } else {
          load_q(own, i * kProducts + j);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint2 b = Format::keys(words[n], j);
          Product::mma(sum[n], own, b.x, b.y);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      s[e] = sum[e / 4][e % 4];
      if constexpr (Format::kBytes == 1 && Op::kIsBf16) s[e] *= q_unit[e >> 1 & 1];
    }
  }

  // The scores of the keys from `key` on become P.
  __device__ __forceinline__ void exponentiate(float (&s)[8], int key) {
    if (scores.mode != kScaled) scale_scores(s, scores);
    const Window& window = rows.window;
    const bool all_seen = key >= window.begin(rows.query_of(rows.rows - 1)) &&
                          key + kChunk <= window.end(rows.query_of(0));
    if (!all_seen) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = query[e >> 1 & 1], j = key + e / 4 * 8 + key_of(t * 2 + (e & 1));
        if (j < window.begin(i) || j >= window.end(i)) s[e] = -INFINITY;
      }
    }
    float alpha[2] = {1.f, 1.f};
    if (softmax_next(s, statistics, alpha, scores.exp_scale)) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) o[i / 4][i % 4] *= alpha[i >> 1 & 1];
    }
  }

  // O += P V of 16 keys. Values of keys that no row sees may be NaN or inf; they are set to 0,
  // since 0 times them must be 0.
  __device__ __forceinline__ void add_values(const float (&s)[8], uint32_t v, int key) {
    const uint32_t p[4] = {Product::pack2(s[0], s[1]), Product::pack2(s[2], s[3]),
                           Product::pack2(s[4], s[5]), Product::pack2(s[6], s[7])};
    const bool all_seen = key >= rows.first_key && key + kChunk <= rows.end_key;
#pragma unroll
    for (int box = 0; box < kBoxes / C::kSlices; ++box) {
      uint32_t words[4][kWords];  // of rows 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t rows_of_8 = v + i / 2 * 8 * C::kPitch;
        load_words(words[i], rows_of_8, slice * (kBoxes / C::kSlices) + box, key_of(t * 2 + i % 2));
      }
      if (!all_seen) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = key + i / 2 * 8 + key_of(t * 2 + i % 2);
          const uint32_t mask = j >= rows.first_key && j < rows.end_key ? ~0u : 0u;
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[i][w] &= mask;
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w)
#pragma unroll
        for (int pair = 0; pair < 2 / Format::kBytes; ++pair) {
          // Two columns, of two rows each.
          const uint2 upper = Format::values(words[0][w], words[1][w], pair);
          const uint2 lower = Format::values(words[2][w], words[3][w], pair);
          const int tile = box * (kColumns / 8) + (w * (2 / Format::kBytes) + pair) * 2;
          Product::mma(o[tile], p, upper.x, lower.x);
          Product::mma(o[tile + 1], p, upper.y, lower.y);
        }
    }
  }
  __device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t from, int box,
                                             int row) const {
    const uint4 found = ptx::ld_shared_v4(from + cache_place<C>(box, row, g));
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  }
  __device__ __forceinline__ void load_words(uint32_t (&words)[2], uint32_t from, int box,
                                             int row) const {
    const uint64_t found = ptx::ld_shared_u64(from + cache_place<C>(box, row, g / 2) + g % 2 * 8);
    words[0] = static_cast<uint32_t>(found), words[1] = static_cast<uint32_t>(found >> 32);
  }

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) C::Isa::arrive(barrier);
  }

  // Computes all blocks of the tile that belong to this CTA.
  __device__ __forceinline__ void run(Turn& turn) {
#pragma unroll 1
    for (int block = rows.tile.block; block < rows.tile.last; ++block, turn.next(args.stages)) {
      const uint32_t stage = turn.stage;
      const int block_key = (rows.tile.slot.first_block + block) * C::kBlockK;
      C::Isa::wait(shared.k_full[stage], turn.parity);
      C::Isa::wait(shared.v_full[stage], turn.parity);
      // If a block has fewer chunks than there are parts, the next block goes to the next parts,
      // also in the next tile: these work on it while the others finish theirs.
      const int first = (part - static_cast<int>(turn.count) * (C::kBlockK / kChunk)) & (parts - 1);
#pragma unroll 1
      for (int row = first * kChunk; row < C::kBlockK; row += parts * kChunk) {
        const int key = block_key + row;
        if (!busy || key >= rows.end_key || key + kChunk <= rows.first_key) continue;
        float s[8];
        score(s, ptx::shared_address(shared.blocks[stage].k) + row * C::kPitch);
        exponentiate(s, key);
        add_values(s, ptx::shared_address(shared.blocks[stage].v) + row * C::kPitch, key);
      }
      release(shared.k_empty[stage]);
      release(shared.v_empty[stage]);
    }
  }
};

}  // namespace flashsci::paged
