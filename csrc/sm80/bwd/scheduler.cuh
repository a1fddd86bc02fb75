// The work of a CTA that owns keys. If the main loop has no register to spare for pointers, the
// first warp finds it and keeps it in shared memory.
#pragma once
#include "../../core/alibi.cuh"
#include "../../core/ragged_bias.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::sm80::bwd {

// The keys of a tile and the queries that may see them, by slot of the grid.
template <class C>
struct KeyTile {
  const TileCoord place;
  int tile, segment = 0;  // index in the sequence, and the sequence's index, see varlen.cuh
  int first_key = 0, first_query = 0;  // where the sequence begins
  int keys, queries;                   // of the sequence
  int zero_rows = 0;                   // queries without keys, whose dq this CTA writes

  __device__ __forceinline__ KeyTile(const FlashsciBackwardParams& p, uint32_t tiles)
      : place(blockIdx.x, tiles, p.heads_k, p),
        tile(static_cast<int>(place.tile)),
        keys(p.seq_k),
        queries(p.seq_q) {
    if (p.cu_seqlens_q != nullptr) {
      const TileOfSequence found = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q,
                                                         p.num_seqs, p.seq_k, p.seq_q);
      tile = found.tile, segment = found.segment;
      first_key = found.first_q, keys = found.seq_q;
      first_query = found.first_k, queries = found.seq_k;
      if (segment == 0 || segment > p.num_seqs) {  // rows of no sequence
        queries = 0;
        first_query = segment_begin(p.cu_seqlens_q, segment, p.num_seqs, p.seq_q);
        zero_rows = segment_begin(p.cu_seqlens_q, segment + 1, p.num_seqs, p.seq_q) - first_query;
      }
    }
    if (keys <= 0 && queries > 0) zero_rows = queries;
    if (tile != 0) zero_rows = 0;
  }
  __device__ __forceinline__ int tile_key() const { return tile * C::kBlockK; }
  __device__ __forceinline__ bool exists() const { return tile >= 0 && tile_key() < keys; }
  // The place of the first query tile in dq_sums.
  __device__ __forceinline__ int first_slot() const { return first_query / C::kBlockQ + segment; }
};

// Query tiles [begin, end) that see any key of a tile; all of them if dq is written with dk.
template <class C>
struct SeeingTiles {
  int begin, end;

  __device__ __forceinline__ SeeingTiles(const KeyTile<C>& keys, const Window& window, bool all) {
    int begin_query = 0, end_query = keys.queries;
    if (!all) {
      begin_query = window.first_query(keys.tile_key());
      end_query = window.end_query(min(keys.tile_key() + C::kBlockK, keys.keys) - 1, keys.queries);
    }
    begin = begin_query / C::kBlockQ;
    end = begin_query < end_query ? (end_query + C::kBlockQ - 1) / C::kBlockQ : begin;
  }
};

// Pointers are those of the first query head of the key head, at the first query of its sequence or
// at the first key of the tile.
struct alignas(128) KeyTileWork {
  const uint16_t* q;          // [member, queries, D]
  const uint16_t* dout;       // [member, queries, Dv]
  const float2* statistics;   // [member, queries]
  const uint16_t* k;          // [keys, D]
  const uint16_t* v;          // [keys, Dv]
  uint16_t* dq;               // [member, queries, D]
  uint16_t* dk;               // [keys, D]
  uint16_t* dv;               // [keys, Dv]
  float* dq_sums;             // [member, query tile, kBlockQ * kHeadDim]
  const unsigned char* bias;  // [member, queries, keys]
  const uint8_t* mask;        // [member, queries, keys]
  unsigned char* dbias;       // [member, queries, keys]
  int before, after;          // the window, see window.cuh
  int keys, queries;          // of the sequence; keys 0: there is no tile
  int first_tile, end_tile;   // query tiles: SeeingTiles
  int tile_key;               // first key of the tile in its sequence
  int zero_rows;              // queries without keys, whose dq is written here

  // Called by one whole warp.
  template <class C>
  __device__ __forceinline__ void find(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                                       uint32_t tiles) {
    KeyTile<C> found(p, tiles);
    int64_t start = 0;  // of the sequence, in a ragged bias
    if (has_ragged_bias(p)) {
      start =
          ragged_start(p.bias_mask, found.segment - 1, found.first_key, found.queries, found.keys);
      if (start < 0) {  // no query sees a key
        if (found.tile == 0) found.zero_rows = found.queries;
        found.queries = 0;
      }
    }
    const Window window(p.window_left, p.window_right, p.lower_right != 0, found.queries,
                        found.keys);
    const SeeingTiles<C> seeing(found, window, plan.writes_dq != 0);
    if (threadIdx.x != 0) return;
    const TileCoord& place = found.place;
    const int first_query = found.first_query, first_key = found.first_key + found.tile_key();
    const uint32_t head = place.head * plan.group;
    const int64_t batch_head = static_cast<int64_t>(place.batch) * p.heads_q + head;
    const auto at = [&](const void* data, const FlashsciStrides& strides, uint32_t of_head,
                        int row) {
      return static_cast<const uint16_t*>(data) + place.offset(strides, of_head) +
             row * strides.row;
    };
    const auto into = [&](void* data, const FlashsciStrides& strides, uint32_t of_head, int row) {
      return static_cast<uint16_t*>(data) + place.offset(strides, of_head) + row * strides.row;
    };
    q = at(p.q, p.q_strides, head, first_query);
    dout = at(p.dout, p.dout_strides, head, first_query);
    statistics = plan.statistics + batch_head * p.seq_q + first_query;
    k = at(p.k, p.k_strides, place.head, first_key);
    v = at(p.v, p.v_strides, place.head, first_key);
    dq = into(p.dq, p.dq_strides, head, first_query);
    dk = into(p.dk, p.dk_strides, place.head, first_key);
    dv = into(p.dv, p.dv_strides, place.head, first_key);
    dq_sums = plan.dq_sums +
              (batch_head * plan.query_slots + found.first_slot()) * (C::kBlockQ * C::kHeadDim);
    const int size = p.bias_mask.bias_is_fp32 ? 4 : 2;
    bias = static_cast<const unsigned char*>(p.bias_mask.bias) +
           (place.offset(p.bias_mask.bias_strides, head) + start) * size;
    if (has_slopes(p.bias_mask) && p.cu_seqlens_q != nullptr)  // never read if of no sequence
      bias += (found.segment - 1) * p.bias_mask.bias_strides.batch0 * size;
    mask = p.bias_mask.mask + place.offset(p.bias_mask.mask_strides, head);
    dbias =
        static_cast<unsigned char*>(p.dbias) + (place.offset(p.dbias_strides, head) + start) * size;
    before = window.before, after = window.after;
    tile_key = found.tile_key();
    keys = found.exists() ? found.keys : 0;
    queries = found.queries;
    first_tile = seeing.begin;
    end_tile = seeing.end;
    zero_rows = found.zero_rows;
  }
};

// A pointer of the record, by its shared address: read at each use, never kept.
template <class T>
__device__ __forceinline__ T* kept(uint32_t address) {
  return reinterpret_cast<T*>(ptx::ld_shared_u64(address));
}

}  // namespace flashsci::sm80::bwd
