// Rows of neighbouring heads on their way through shared memory.
//
// A warp that loads rows of its own head reads 32 or 64 bytes of each of 8 rows at a time: two to
// four requests for every line of memory. Here all threads of a block copy the rows of all its
// heads, 16 bytes each, in memory order, and every warp takes its head from shared memory.
// Gradients of rows of 32 bytes leave the same way, others from registers. Rows of 128 bytes are
// whole lines: a warp copies its own, and waits for no other.
#pragma once
#include "../../core/poison.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/shared.cuh"
#include "fragments.cuh"

namespace flashsci::sm80::small {

// Bytes of a row of a head, if its shape fixes the number of columns.
template <class P, class S>
inline constexpr int kRowBytes = S::kWhole ? S::kUnits * 16 * sizeof(typename P::Element) : 0;

// Whether rows go through shared memory: those of 128 bytes for any strides of heads, those of 32
// and 64 bytes if heads are inside rows ([.., S, H, D]).
template <class P, class S>
inline constexpr bool kStages = kRowBytes<P, S> >= 32 && kRowBytes<P, S> <= 128;

// Whether results do, too. kOperands: per direction, kOfForward or kOfBackward.
template <class P, class S, int kOperands>
inline constexpr bool kStagesResults =
    kRowBytes<P, S> == 32 && (kOperands == kOfBackward || S::kBlocks == 4);

// The place of results before they leave: that of an operand that their warp has read for the last
// time.
__device__ __forceinline__ constexpr Matrix place_of(Matrix result) {
  return result == kDv ? kV : result == kDk ? kOut : kQ;
}

// A matrix of one head in shared memory as this lane sees it. kWhole: rows past the last exist, as
// zeros.
template <class P, class S, bool kWhole>
struct StagedRows {
  static constexpr bool kShared = true;
  unsigned char* data;  // column 4 t of the first row
  int pitch;            // bytes
  const LaneRows& rows;

  // The 16 columns of a unit.
  __device__ __forceinline__ void load(typename P::Row (&x)[S::kBlocks], int unit) const {
    using Row = typename P::Row;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i)
      x[i] = reinterpret_cast<const Row*>(data + (kWhole ? rows.first + i * 8 : rows.clamped(i)) *
                                                     pitch)[unit * 4];
  }
  template <class Factor>
  __device__ __forceinline__ void store(const typename P::Sum (&x)[S::kTiles][2], int unit,
                                        Factor&& factor) const {
    using Row = typename P::Row;
    store_rows<P, S>(x, rows, factor, [&](int row, const Row& y) {
      reinterpret_cast<Row*>(data + row * pitch)[unit * 4] = y;
    });
  }
};

// Whether the number of heads that fit a block is one of two constants, for tensors with equal
// strides, so that the compiler knows the places in shared memory. This frees registers that the
// backward lacks, except in 16 bits with at most 16 rows, and those of the forward of many short
// rows. Otherwise (0) strides are free, and the room is for the block's heads.
template <class P, class S, int kOperands>
inline constexpr bool kRoomIsFixed =
    kOperands == kOfBackward
        ? kRowBytes<P, S> < 128 && (S::kBlocks >= 3 || sizeof(typename P::Element) == 4)
        : kStagesResults<P, S, kOfForward>;
inline constexpr int kFewHeads = 4;

// Shared memory is [matrix, row, head, padding], followed by statistics. A row has the order of
// memory, so that the copies of one request to the second-level cache are neighbours. Rows are odd
// numbers of units (the data that lanes of equal t load at a time), so that eight neighbouring
// lanes use different banks.
template <class P, class S, int kOperands, int kRoom>
struct Stage {
  static constexpr int kUnit = 4 * sizeof(typename P::Row);
  static constexpr int kPieces = kRowBytes<P, S> / 16;  // per row of a head
  static constexpr int kStep = 32 / kPieces;            // rows that all threads copy at a time
  static constexpr int kCopies = (S::kBlocks * 8 + kStep - 1) / kStep;  // per thread and matrix
  static constexpr bool kOwn = kRowBytes<P, S> == 128;  // a warp copies rows of its head
  // Whether a matrix has all rows of a tile, with zeros past the last: not for rows of 128 bytes,
  // which are many, nor if the backward has no fixed room.
  static constexpr bool kWhole = !kOwn && (kOperands == kOfForward || kRoom > 0);
  // Rows of a matrix that has `rows` rows in memory.
  static __host__ __device__ constexpr int rows_of_matrix(int rows) {
    return kWhole ? kCopies * kStep : rows;
  }
  // Per warp.
  static constexpr int kStatisticsBytes = kOperands == kOfBackward ? kMostRows * sizeof(float2) : 0;
  // Bytes from row to row.
  static __host__ __device__ constexpr int pitch_of(int heads) {
    return (heads * S::kUnits | 1) * kUnit;
  }

  const HeadPlan& plan;
  const Head& first;  // the block's first head
  unsigned char* data;
  // This thread's first copy: head, row and byte of it, place in shared memory.
  uint32_t head, row, column, piece;

  // Bytes from the start of a tensor to this thread's first copy.
  struct Offsets {
    uint64_t of[kCopies];
  };

  __device__ __forceinline__ int pitch() const { return kRoom > 0 ? pitch_of(kRoom) : plan.pitch; }
  __device__ __forceinline__ int matrix_bytes() const {
    return kRoom > 0 ? pitch_of(kRoom) * rows_of_matrix(0) : plan.matrix;
  }

  __device__ __forceinline__ Stage(const HeadPlan& plan_, const Head& first_)
      : plan(plan_), first(first_) {
    extern __shared__ unsigned char shared[];
    data = shared;
    uint32_t of_row;
    if constexpr (kOwn) {
      row = threadIdx.x % 32 / kPieces;
      of_row = threadIdx.x / 32 * kPieces + threadIdx.x % kPieces;
    } else {
      row = plan.pieces.divide(threadIdx.x);
      of_row = threadIdx.x - row * plan.pieces.divisor;
    }
    head = of_row / kPieces;
    column = of_row % kPieces * 16;
    piece = row * pitch() + of_row * 16;
    poison_block(data, kOperands * matrix_bytes() + blockDim.x / 32 * kStatisticsBytes);
  }
  // The statistics of this warp's head.
  __device__ __forceinline__ float2* statistics() const {
    return reinterpret_cast<float2*>(data + kOperands * matrix_bytes() +
                                     threadIdx.x / 32 * kStatisticsBytes);
  }

  __device__ __forceinline__ Offsets offsets(Matrix matrix) const {
    const Steps& steps = plan.of[matrix];
    const uint64_t from = static_cast<uint64_t>(first.offset(steps, first.head + head)) + column;
    Offsets at;
#pragma unroll
    for (uint32_t i = 0; i < kCopies; ++i) at.of[i] = from + uint64_t{row + i * kStep} * steps.row;
    return at;
  }
  // Starts to copy a matrix of all heads of the block.
  __device__ __forceinline__ void fetch(const Offsets& at, Matrix matrix, const void* tensor,
                                        int rows) const {
    visit(at, matrix, [&](uint32_t of_row, uint64_t bytes, uint32_t place) {
      const uint32_t to = ptx::shared_address(data) + place;
      const void* from = static_cast<const char*>(tensor) + bytes;
      const bool is_there = of_row < static_cast<uint32_t>(rows);
      if constexpr (kWhole)
        ptx::cp_async_16(to, from, is_there);
      else
        ptx::cp_async_16_if(is_there, to, from);
    });
  }
  // The same for the next matrix. kSameStrides: plan.same_strides; as an `if` of this
  // function it would cost what it saves, since the compiler computes both and selects.
  template <bool kSameStrides>
  __device__ __forceinline__ void fetch_next(Offsets& at, Matrix matrix, const void* tensor,
                                             int rows) const {
    if constexpr (kOwn || !kSameStrides) at = offsets(matrix);
    fetch(at, matrix, tensor, rows);
  }
  // Copies a result of all heads to memory.
  __device__ __forceinline__ void release(const Offsets& at, Matrix result, void* tensor,
                                          int rows) const {
    if (tensor == nullptr) return;
    visit(at, place_of(result), [&](uint32_t of_row, uint64_t bytes, uint32_t place) {
      if (of_row < static_cast<uint32_t>(rows))
        *reinterpret_cast<uint4*>(static_cast<char*>(tensor) + bytes) =
            *reinterpret_cast<const uint4*>(data + place);
    });
  }
  template <bool kSameStrides>
  __device__ __forceinline__ void release_next(Offsets& at, Matrix result, void* tensor,
                                               int rows) const {
    if constexpr (!kSameStrides) at = offsets(result);
    release(at, result, tensor, rows);
  }
  // Waits for this warp's head, except for the data of each thread's last kPending groups.
  template <int kPending>
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait<kPending>();
    if constexpr (kOwn)
      __syncwarp();
    else
      __syncthreads();
  }
  // Calls act(row, bytes from the start of a tensor, place in shared memory) for this thread's
  // copies.
  template <class Act>
  __device__ __forceinline__ void visit(const Offsets& at, Matrix matrix, Act&& act) const {
#pragma unroll
    for (uint32_t i = 0; i < kCopies; ++i)
      act(row + i * kStep, at.of[i], piece + matrix * matrix_bytes() + i * kStep * pitch());
  }
  // The rows of this warp's head.
  __device__ __forceinline__ StagedRows<P, S, kWhole> rows_of(Matrix matrix,
                                                              const LaneRows& rows) const {
    const int at = threadIdx.x / 32 * (S::kUnits * kUnit) + matrix * matrix_bytes();
    return {data + at + threadIdx.x % 4 * sizeof(typename P::Row), pitch(), rows};
  }
};

}  // namespace flashsci::sm80::small
