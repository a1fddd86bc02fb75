// Causal and window masks. Query i sees key j iff j - i - shift lies in [-left, right], shift = Sk
// - Sq for the lower-right alignment, else 0. All arithmetic fits 32 bits: S <= 2^29, left, right
// <= 2^30.
#pragma once
#include <cmath>
#include <cstdint>

#include "smem_tile.cuh"

namespace flashsci {

struct Window {
  int before;  // query i sees keys from i + before on
  int after;   // ... up to and without i + after
  int seq_k;

  __device__ __forceinline__ Window(int left, int right, bool lower_right, int seq_q, int seq_k_)
      : seq_k(seq_k_) {
    constexpr int kUnbounded = 1 << 30;
    const int shift = lower_right ? seq_k_ - seq_q : 0;
    before = shift - (left < 0 ? kUnbounded : min(left, kUnbounded));
    after = shift + (right < 0 ? kUnbounded - 1 : min(right, kUnbounded - 1)) + 1;
  }

  __device__ __forceinline__ Window(int before_, int after_, int seq_k_)
      : before(before_), after(after_), seq_k(seq_k_) {}

  // Keys [begin, end) that query i sees; none if begin >= end.
  __device__ __forceinline__ int begin(int i) const { return max(i + before, 0); }
  __device__ __forceinline__ int end(int i) const { return min(i + after, seq_k); }

  // Queries [first_query, end_query) of seq_q that see key j < seq_k; none if first >= end.
  __device__ __forceinline__ int first_query(int j) const { return max(j - after + 1, 0); }
  __device__ __forceinline__ int end_query(int j, int seq_q) const {
    return min(j - before, seq_q - 1) + 1;
  }
};

// Scores of keys outside [begin(i), end(i)) become -inf. row: this lane's first query row; column:
// the key of its first score. kInterleaved: see core/smem_tile.cuh.
template <bool kInterleaved = false, int kM, int kN>
__device__ __forceinline__ void mask_scores(float (&s)[kM][kN][4], const Window& window, int row,
                                            int column) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + m * 16 + half * 8;
      const int begin = window.begin(i) - column, end = window.end(i) - column;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = key_of_score<kInterleaved>(n, e);
          if (j < begin || j >= end) s[m][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace flashsci
