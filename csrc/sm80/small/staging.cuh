// Rows of neighbouring heads on their way through shared memory.
//
// Where heads lie inside rows, [.., S, H, D], a warp that loads its own asks for 32 or 64 bytes of each
// of 8 lines: two to four times as many requests as lines. Here all threads of a block copy what its
// heads have of a row, 16 bytes each, neighbours side by side; every warp takes its head from there,
// leaves results in the place of what it has read for the last time, and all threads store them.
#pragma once
#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "fragments.cuh"

namespace flashsci::sm80::small {

// Places of a head in shared memory.
enum Matrix { kQ, kK, kV, kDout, kOut };

// Heads that are a line or less; of longer ones a warp has lines of its own.
template <class P, class S>
inline constexpr bool kStages = S::kWhole && S::kUnits * 16 * sizeof(typename P::Element) <= 128;

// Shared memory is [head, matrix, row, padding]. Rows and heads are odd numbers of units, what lanes of
// equal t load at a time: eight lanes side by side are in different banks, of rows as of heads.
template <class P, class S, int kMatrices>
struct Stage {
  using Element = typename P::Element;
  static constexpr int kUnit = 4 * sizeof(typename P::Row), kPitch = (S::kUnits | 1) * kUnit;
  static constexpr int kPieces = S::kUnits * kUnit / 16;  // of a row of a head
  static constexpr int kStep = 32 / kPieces;              // rows that all threads copy at a time

  const Head& first;    // of the block
  int size, head_size;  // bytes of a matrix, and of a head
  unsigned char* data;
  // What this thread copies first: head and row, column, place.
  uint32_t head, row;
  int column;
  uint32_t piece;

  static __host__ __device__ __forceinline__ int head_bytes(int rows) {
    return (kMatrices * rows * (S::kUnits | 1) | 1) * kUnit;
  }

  __device__ __forceinline__ Stage(const HeadPlan& plan, const Head& first_, int rows)
      : first(first_), size(rows * kPitch), head_size(head_bytes(rows)) {
    extern __shared__ unsigned char shared[];
    data = shared;
    row = plan.pieces.divide(threadIdx.x);
    const uint32_t of_row = threadIdx.x - row * plan.pieces.divisor;
    head = of_row / kPieces;
    column = of_row % kPieces * (16 / sizeof(Element));
    piece = ptx::shared_address(data) + head * head_size + row * kPitch + of_row % kPieces * 16;
    poison_block(data, blockDim.x / 32 * head_size);
  }

  // act(16 bytes in shared memory, the same in a tensor) for all that this thread copies.
  template <class Byte, class Act>
  __device__ __forceinline__ void each(Matrix matrix, Byte* tensor, const FlashsciStrides& strides,
                                       int rows, Act&& act) const {
    const int step = static_cast<int>(strides.row) * static_cast<int>(sizeof(Element));
    tensor += (first.offset(strides, first.head + head) + column) * sizeof(Element);
#pragma unroll
    for (uint32_t i = 0; i < S::kBlocks * 8; i += kStep) {
      const int at = static_cast<int>(row + i);
      if (at < rows) act(piece + matrix * size + i * kPitch, tensor + int64_t{at} * step);
    }
  }
  __device__ __forceinline__ void fetch(Matrix matrix, const void* from,
                                        const FlashsciStrides& strides, int rows) const {
    each(matrix, static_cast<const char*>(from), strides, rows,
         [](uint32_t here, const char* there) { ptx::cp_async_16(here, there, true); });
  }
  // After a barrier.
  __device__ __forceinline__ void store(Matrix matrix, void* to, const FlashsciStrides& strides,
                                        int rows) const {
    each(matrix, static_cast<char*>(to), strides, rows, [](uint32_t here, char* there) {
      *reinterpret_cast<uint4*>(there) = ptx::ld_shared_v4(here);
    });
  }
  // Until all threads have what they fetched, but for their last kPending groups.
  template <int kPending>
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait<kPending>();
    __syncthreads();
  }
  // Of this warp's head.
  __device__ __forceinline__ HeadRows<P, S, true> rows_of(Matrix matrix,
                                                          const LaneRows& rows) const {
    return {data + threadIdx.x / 32 * head_size + matrix * size, kPitch, rows};
  }
};

}  // namespace flashsci::sm80::small
