// What a CTA of kernel.cuh works on, found by its first warp and kept in shared memory: the main
// loop has no register to spare for pointers.
#pragma once
#include "../../ptx/redux.cuh"
#include "../../ptx/shared.cuh"
#include "config.cuh"

namespace flashsci::sm80::bwd {

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
  int first_tile, end_tile;   // query tiles that see keys of the tile
  int tile_key;               // first key of the tile in its sequence
  int zero_rows;              // queries without keys, whose dq is written here

  // By one whole warp.
  template <class C>
  __device__ __forceinline__ void find(const FlashsciBackwardParams& p, const BackwardPlan& plan,
                                       uint32_t tiles) {
    const TileCoord place(blockIdx.x, tiles, p.heads_k, p);
    int tile = static_cast<int>(place.tile), first_slot = 0;
    int first_key = 0, found_keys = p.seq_k, first_query = 0, found_queries = p.seq_q, zeros = 0;
    if (p.cu_seqlens_q != nullptr) {
      const TileOfSequence found = find_tile<C::kBlockK>(place.tile, p.cu_seqlens_k, p.cu_seqlens_q,
                                                         p.num_seqs, p.seq_k, p.seq_q);
      tile = found.tile;
      first_key = found.first_q, found_keys = found.seq_q;
      first_query = found.first_k, found_queries = found.seq_k;
      if (found.segment == 0 || found.segment > p.num_seqs) {  // rows of no sequence
        found_queries = 0;
        first_query = segment_begin(p.cu_seqlens_q, found.segment, p.num_seqs, p.seq_q);
        zeros = segment_begin(p.cu_seqlens_q, found.segment + 1, p.num_seqs, p.seq_q) - first_query;
      }
      first_slot = first_query / C::kBlockQ + found.segment;
    }
    if (found_keys <= 0 && found_queries > 0) zeros = found_queries;
    if (tile != 0) zeros = 0;
    const int first = tile * C::kBlockK;
    const bool exists = tile >= 0 && first < found_keys;

    // All query tiles where dq is written here.
    const Window window(p.window_left, p.window_right, p.lower_right != 0, found_queries,
                        found_keys);
    int begin = 0, end = found_queries;
    if (!plan.writes_dq) {
      begin = window.first_query(first);
      end = window.end_query(min(first + C::kBlockK, found_keys) - 1, found_queries);
    }
    if (threadIdx.x != 0) return;
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
    k = at(p.k, p.k_strides, place.head, first_key + first);
    v = at(p.v, p.v_strides, place.head, first_key + first);
    dq = into(p.dq, p.dq_strides, head, first_query);
    dk = into(p.dk, p.dk_strides, place.head, first_key + first);
    dv = into(p.dv, p.dv_strides, place.head, first_key + first);
    dq_sums =
        plan.dq_sums + (batch_head * plan.query_slots + first_slot) * (C::kBlockQ * C::kHeadDim);
    const int size = p.bias_mask.bias_is_fp32 ? 4 : 2;
    bias = static_cast<const unsigned char*>(p.bias_mask.bias) +
           place.offset(p.bias_mask.bias_strides, head) * size;
    mask = p.bias_mask.mask + place.offset(p.bias_mask.mask_strides, head);
    dbias = static_cast<unsigned char*>(p.dbias) + place.offset(p.dbias_strides, head) * size;
    before = window.before, after = window.after;
    tile_key = first;
    keys = exists ? found_keys : 0;
    queries = found_queries;
    first_tile = begin / C::kBlockQ;
    end_tile = begin < end ? (end + C::kBlockQ - 1) / C::kBlockQ : begin / C::kBlockQ;
    zero_rows = zeros;
  }
};

// A pointer of the record, by its shared address: read where it is used, never kept.
template <class T>
__device__ __forceinline__ T* kept(uint32_t address) {
  return reinterpret_cast<T*>(ptx::ld_shared_u64(address));
}

}  // namespace flashsci::sm80::bwd
