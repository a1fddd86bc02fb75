// The query rows of a CTA and of a warp: the keys they see, and their accumulators.
#pragma once
#include <cmath>

#include "../../core/mask.cuh"
#include "warp_mma.cuh"

namespace flashsci::sm80::fwd {

// Tiles [first, end) of keys that some row of a query tile sees.
template <class C>
struct KeyTiles {
  int first, end;

  __device__ __forceinline__ KeyTiles(const Window& window, int tile_row, int seq_q) {
    const int begin_key = window.begin(tile_row);
    const int end_key = window.end(min(tile_row + C::kBlockQ, seq_q) - 1);
    first = begin_key / C::kBlockK;
    end = begin_key < end_key ? (end_key + C::kBlockK - 1) / C::kBlockK : first;
  }
};

// Some rows of a warp see keys [seen_begin, seen_end), all of them [full_begin, full_end).
template <class C>
struct WarpKeys {
  int seen_begin, seen_end, full_begin, full_end;

  __device__ __forceinline__ WarpKeys(const Window& window, int warp_row, int seq_q) {
    const int last_row = min(warp_row + C::kRows, seq_q) - 1;
    seen_begin = window.begin(warp_row);
    seen_end = warp_row < seq_q ? window.end(last_row) : 0;
    full_begin = window.begin(last_row), full_end = window.end(warp_row);
  }
  // For the tile of keys from `first_key` on: whether some row sees a key; whether some row does
  // not see all.
  __device__ __forceinline__ bool any_seen(int first_key) const {
    return first_key < seen_end && first_key + C::kBlockK > seen_begin;
  }
  __device__ __forceinline__ bool any_hidden(int first_key) const {
    return first_key < full_begin || first_key + C::kBlockK > full_end;
  }
};

// The accumulators of a warp's rows. They are a separate variable: as a member of the thread's
// other state they cost registers, as they do in another order (measured).
template <class C>
struct OutputRows {
  float row_sum[C::kM][2];  // this lane's part of the sum
  float row_max[C::kM][2];  // [m16, row g or g + 8], in units of 1 / exp_scale; stale by <= 2^8
  float o[C::kM][C::kDimBlocks][4];  // [m16, n8 of Dv, fragment], unnormalised

  __device__ __forceinline__ void reset() {
    clear(o);
#pragma unroll
    for (int m = 0; m < C::kM; ++m) {
      row_max[m][0] = row_max[m][1] = -INFINITY;
      row_sum[m][0] = row_sum[m][1] = 0.f;
    }
  }
  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (int i = 0; i < C::kM * C::kDimBlocks * 4; ++i)
      o[i / (4 * C::kDimBlocks)][i / 4 % C::kDimBlocks][i % 4] *= by;
  }
};

}  // namespace flashsci::sm80::fwd
