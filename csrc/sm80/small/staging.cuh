// Rows of neighbouring heads on their way through shared memory.
//
// A warp that loads rows of its own head asks for 32 or 64 bytes of each of 8 rows at a time: two to four
// times for every line of memory. Here all threads of a block copy what its heads have of a row, 16
// bytes each, neighbours side by side, and every warp takes its head from there. Results go from
// registers to memory.
#pragma once
#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "fragments.cuh"

namespace flashsci::sm80::small {

// Matrices of a head in shared memory; forward has the first three.
enum Matrix { kQ, kK, kV, kDout, kOut };
inline constexpr int kOfForward = 3, kOfBackward = 5;

// Bytes of a row of a head, where its shape says how many columns there are.
template <class P, class S>
inline constexpr int kRowBytes = S::kWhole ? S::kUnits * 16 * sizeof(typename P::Element) : 0;

// Which rows go through shared memory: those of 128 bytes wherever heads lie, those of 64 bytes where heads
// lie inside rows ([.., S, H, D]), but for the fp32 forward of at most 24 rows. That one and all of 32
// bytes take longer by this way.
template <class P, class S, int kMatrices>
inline constexpr bool kStages =
    kRowBytes<P, S> == 128 ||
    (kRowBytes<P, S> == 64 &&
     !(kMatrices == kOfForward && sizeof(typename P::Element) == 4 && S::kBlocks <= 3));

// A matrix of one head in shared memory as this lane sees it.
template <class P, class S>
struct StagedRows {
  static constexpr bool kShared = true;
  const unsigned char* data;  // column 4 t of the first row
  int pitch;                  // bytes
  const LaneRows& rows;

  // The 16 columns of a unit.
  __device__ __forceinline__ void load(typename P::Row (&x)[S::kBlocks], int unit) const {
    using Row = typename P::Row;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i)
      x[i] = reinterpret_cast<const Row*>(data + rows.clamped(i) * pitch)[unit * 4];
  }
};

// Shared memory is [head, matrix, row, padding]. Rows and heads are odd numbers of units, what lanes of
// equal t load at a time: eight lanes side by side are in different banks, of rows as of heads.
template <class P, class S, int kMatrices>
struct Stage {
  using Element = typename P::Element;
  static constexpr int kUnit = 4 * sizeof(typename P::Row), kPitch = (S::kUnits | 1) * kUnit;
  static constexpr int kPieces = kRowBytes<P, S> / 16;  // of a row of a head
  static constexpr int kStep = 32 / kPieces;            // rows that all threads copy at a time

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

  // Begins to copy a matrix of all heads of the block.
  __device__ __forceinline__ void fetch(Matrix matrix, const void* tensor,
                                        const FlashsciStrides& strides, int rows) const {
    const char* from = static_cast<const char*>(tensor) +
                       (first.offset(strides, first.head + head) + column) * sizeof(Element);
    const int step = static_cast<int>(strides.row) * static_cast<int>(sizeof(Element));
#pragma unroll
    for (uint32_t i = 0; i < S::kBlocks * 8; i += kStep) {
      const int at = static_cast<int>(row + i);
      if (at < rows)
        ptx::cp_async_16(piece + matrix * size + i * kPitch, from + int64_t{at} * step, true);
    }
  }
  // Until all threads have what they fetched, but for their last kPending groups.
  template <int kPending>
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait<kPending>();
    __syncthreads();
  }
  // Of this warp's head.
  __device__ __forceinline__ StagedRows<P, S> rows_of(Matrix matrix, const LaneRows& rows) const {
    const int at = threadIdx.x / 32 * head_size + matrix * size;
    return {data + at + threadIdx.x % 4 * sizeof(typename P::Row), kPitch, rows};
  }
};

}  // namespace flashsci::sm80::small
