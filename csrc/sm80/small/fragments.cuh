// Rows of one head in the registers of a warp, and products of them.
//
// Lane l, g = l / 4 and t = l % 4, has columns 16 u + 4 t ... + 3 of rows 8 i + g: its loads and
// stores are 8 or 16 bytes, and rows need no shared memory. The fragments of mma want other columns
// in a lane; but terms of a sum may come in any order, and columns of a result have the order of
// its operand. If rows are summed over, blocks of 8 x 8 are transposed between lanes.
//
// Sums are float[4] tiles as in ptx/mma_*.cuh: rows g, g + 8 and columns 2 t, 2 t + 1.
#pragma once
#include <cstdint>

#include "../../ptx/global.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/mma.cuh"
#include "config.cuh"

namespace flashsci::sm80::small {

// Threads per block, and the number of blocks that must fit a multiprocessor's registers: with more
// blocks, some registers would spill; with fewer, too many warps would wait at a time. Without a
// number of blocks the compiler has more freedom.
struct Threads {
  int of_block, blocks = 0;
};

// Operands of 16 bits. Op: core/dtype_*.cuh.
template <class Op_>
struct Products16 {
  using Op = Op_;
  using Element = uint16_t;
  using Row = uint2;  // four columns of a row
  static constexpr bool kWeighted = false;
  static constexpr Threads forward_threads(int blocks, int units) {
    if (units == 1 && blocks == 4) return {384, 2};
    return {blocks * units < 16 ? 512 : 384};
  }
  static constexpr Threads backward_threads(int blocks, int units, bool staged) {
    if (units == 1 && blocks == 2) return {288, 4};
    if (units == 1 && blocks == 4) return staged ? Threads{320, 2} : Threads{256, 2};
    if (units == 1) return staged ? Threads{256, 3} : Threads{320, 2};
    if (units == 2 && blocks == 3 && staged) return {320, 2};
    return {blocks <= 3 ? 512 : 384};
  }
  struct Sum {
    float c[4] = {};
    __device__ __forceinline__ float operator[](int i) const { return c[i]; }
  };
  // A left operand, [m16, n8, row g or g + 8]: columns 2 t, 2 t + 1.
  template <int kBlocks>
  struct Left {
    uint32_t pair[(kBlocks + 1) / 2][kBlocks][2];

    __device__ __forceinline__ explicit Left(const Scores<kBlocks>& c) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          pair[i / 2][n][i % 2] = Op::pack2(c[i / 2][n][i % 2 * 2], c[i / 2][n][i % 2 * 2 + 1]);
    }
    __device__ __forceinline__ void transpose() {
      const Left from = *this;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          pair[n / 2][i][n % 2] = ptx::movmatrix_trans(from.pair[i / 2][n][i % 2]);
    }
    // Zeros beyond the last block.
    __device__ __forceinline__ uint32_t at(int m, int n, int half) const {
      return 2 * m + half < kBlocks && n < kBlocks ? pair[m][n < kBlocks ? n : 0][half] : 0;
    }
  };

  // C += A B^T over 16 columns; rows g and g + 8 of A.
  static __device__ __forceinline__ void multiply_transposed(Sum& sum, const Row& a0, const Row& a1,
                                                             const Row& b) {
    const uint32_t a[4] = {a0.x, a1.x, a0.y, a1.y};
    Op::mma(sum.c, a, b.x, b.y);
  }
  // C += A B for 16 columns of B: columns 4 t, 4 t + 1 of a row g in sum[..][0], the others in [1].
  template <int kBlocks>
  static __device__ __forceinline__ void multiply(Sum (&sum)[(kBlocks + 1) / 2][2],
                                                  const Left<kBlocks>& left,
                                                  const Row (&b)[kBlocks]) {
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      const bool two = n + 1 < kBlocks;
      const Row& next = b[two ? n + 1 : n];
      const uint32_t x0 = ptx::movmatrix_trans(b[n].x), y0 = ptx::movmatrix_trans(b[n].y);
      const uint32_t x1 = two ? ptx::movmatrix_trans(next.x) : 0;
      const uint32_t y1 = two ? ptx::movmatrix_trans(next.y) : 0;
#pragma unroll
      for (int m = 0; m < (kBlocks + 1) / 2; ++m) {
        const uint32_t a[4] = {left.at(m, n, 0), left.at(m, n, 1), left.at(m, n + 1, 0),
                               left.at(m, n + 1, 1)};
        Op::mma(sum[m][0].c, a, x0, x1);
        Op::mma(sum[m][1].c, a, y0, y1);
      }
    }
  }

  static __device__ __forceinline__ Row row_of(float x, float y, float z, float w) {
    return {Op::pack2(x, y), Op::pack2(z, w)};
  }
  static __device__ __forceinline__ float dot(const Row& a, const Row& b) {
    const auto low = [](uint32_t x) { return Op::to_float(static_cast<uint16_t>(x)); };
    const auto high = [](uint32_t x) { return Op::to_float(static_cast<uint16_t>(x >> 16)); };
    return fmaf(low(a.x), low(b.x), high(a.x) * high(b.x)) +
           fmaf(low(a.y), low(b.y), high(a.y) * high(b.y));
  }
};

// fp32 operands: three products of TF32 numbers, high and low parts of 11 bits. They have fp32's
// range, and need no scales, unlike fp16 halves.
struct Products32 {
  struct Op {  // type of a bias that is not fp32: there is none
    static __device__ __forceinline__ float to_float(uint16_t) { return 0.f; }
    static __device__ __forceinline__ uint32_t pack2(float, float) { return 0; }
  };
  using Element = float;
  using Row = float4;
  static constexpr bool kWeighted = false;
  static constexpr Threads forward_threads(int blocks, int units) {
    return units == 1 && blocks == 4 ? Threads{320, 2} : Threads{384};
  }
  static constexpr Threads backward_threads(int blocks, int units, bool) {
    return {units == 2 ? 256 : units > 2 ? 384 : blocks <= 3 ? 512 : 384};
  }
  // Tensor cores round sums towards zero: the small products have separate sums.
  struct Sum {
    float c[4] = {}, small[4] = {};
    __device__ __forceinline__ float operator[](int i) const { return c[i] + small[i]; }
  };
  template <int kBlocks>
  struct Left {
    Scores<kBlocks> x;

    __device__ __forceinline__ explicit Left(const Scores<kBlocks>& c) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks * 2; ++n)
          x[i / 2][n / 2][i % 2 * 2 + n % 2] = c[i / 2][n / 2][i % 2 * 2 + n % 2];
    }
    __device__ __forceinline__ void transpose() {
      const Left from = *this;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const auto& pair = from.x[i / 2][n];
          const float2 y = transposed(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
          x[n / 2][i][n % 2 * 2] = y.x, x[n / 2][i][n % 2 * 2 + 1] = y.y;
        }
    }
    __device__ __forceinline__ float at(int m, int n, int i) const {
      return 2 * m + i / 2 < kBlocks ? x[m][n][i] : 0.f;
    }
  };

  // x = high + low: high is rounded to 11 bits, low is truncated by TF32; the error is 2^-23 of x.
  template <int kCount>
  struct Parts {
    uint32_t high[kCount], low[kCount];
    __device__ __forceinline__ void set(int i, float x) {
      high[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
      low[i] = __float_as_uint(x - __uint_as_float(high[i]));
    }
  };
  static __device__ __forceinline__ Parts<4> left_of(float x, float y, float z, float w) {
    Parts<4> a;
    a.set(0, x), a.set(1, y), a.set(2, z), a.set(3, w);
    return a;
  }
  static __device__ __forceinline__ void multiply_parts(Sum& sum, const Parts<4>& a, float x,
                                                        float y) {
    Parts<2> b;
    b.set(0, x), b.set(1, y);
    ptx::mma_m16n8k8_tf32(sum.small, a.low, b.high);
    ptx::mma_m16n8k8_tf32(sum.small, a.high, b.low);
    ptx::mma_m16n8k8_tf32(sum.c, a.high, b.high);
  }
  // In a block of 8 x 8, columns 2 t, 2 t + 1 of row g become rows 2 t, 2 t + 1 of column g.
  static __device__ __forceinline__ float2 transposed(float x, float y) {
    const uint32_t a = __float_as_uint(x), b = __float_as_uint(y);
    const uint32_t low = ptx::movmatrix_trans(__byte_perm(a, b, 0x5410));
    const uint32_t high = ptx::movmatrix_trans(__byte_perm(a, b, 0x7632));
    return {__uint_as_float(__byte_perm(low, high, 0x5410)),
            __uint_as_float(__byte_perm(low, high, 0x7632))};
  }

  static __device__ __forceinline__ void multiply_transposed(Sum& sum, const Row& a0, const Row& a1,
                                                             const Row& b) {
    multiply_parts(sum, left_of(a0.x, a1.x, a0.y, a1.y), b.x, b.y);
    multiply_parts(sum, left_of(a0.z, a1.z, a0.w, a1.w), b.z, b.w);
  }
  template <int kBlocks>
  static __device__ __forceinline__ void multiply(Sum (&sum)[(kBlocks + 1) / 2][2],
                                                  const Left<kBlocks>& left,
                                                  const Row (&b)[kBlocks]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float2 b0 = transposed(b[n].x, b[n].y), b1 = transposed(b[n].z, b[n].w);
#pragma unroll
      for (int m = 0; m < (kBlocks + 1) / 2; ++m) {
        const Parts<4> a =
            left_of(left.at(m, n, 0), left.at(m, n, 2), left.at(m, n, 1), left.at(m, n, 3));
        multiply_parts(sum[m][0], a, b0.x, b0.y);
        multiply_parts(sum[m][1], a, b1.x, b1.y);
      }
    }
  }

  static __device__ __forceinline__ Row row_of(float x, float y, float z, float w) {
    return make_float4(x, y, z, w);
  }
  static __device__ __forceinline__ float dot(const Row& a, const Row& b) {
    return fmaf(a.x, b.x, a.y * b.y) + fmaf(a.z, b.z, a.w * b.w);
  }
};

// The same for key weights in the place of a bias: separate kernels, since weights would take
// registers from the others.
struct WeightedProducts32 : Products32 {
  static constexpr bool kWeighted = true;
};

// This lane's rows of a matrix: 8 i + g. Rows past the last repeat the last, since their products
// do not count: hidden keys, queries without probabilities.
struct LaneRows {
  int first, count;
  __device__ __forceinline__ explicit LaneRows(int count_)
      : first(threadIdx.x % 32 / 4), count(count_) {}
  __device__ __forceinline__ int clamped(int i) const { return min(first + i * 8, count - 1); }
  __device__ __forceinline__ bool has(int i) const { return first + i * 8 < count; }
};

// put(row, columns) of the 16 columns of sums, times a factor for each row.
template <class P, class S, class Factor, class Put>
__device__ __forceinline__ void store_rows(const typename P::Sum (&x)[S::kTiles][2],
                                           const LaneRows& rows, Factor&& factor, Put&& put) {
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
    const auto& y = x[i / 2];
    const int j = i % 2 * 2;
    const float f = factor(i);
    if (rows.has(i))
      put(rows.first + i * 8,
          P::row_of(y[0][j] * f, y[0][j + 1] * f, y[1][j] * f, y[1][j + 1] * f));
  }
}

// A matrix of one head in memory as this lane sees it. A head spans less than 2^31 bytes.
template <class P, class S>
struct HeadRows {
  static constexpr bool kShared = false;
  using Row = typename P::Row;
  char* data;  // column 4 t of the first row
  int stride;  // bytes
  int columns;
  const LaneRows& rows;

  // offset: bytes from the start of the tensor to this head.
  __device__ __forceinline__ HeadRows(const void* start, int64_t offset, const Steps& steps,
                                      const LaneRows& rows_, int columns_)
      : data(static_cast<char*>(const_cast<void*>(start)) +
             (offset + threadIdx.x % 4 * sizeof(Row))),
        stride(static_cast<int>(steps.row)),
        columns(columns_ - static_cast<int>(threadIdx.x % 4 * 4)),
        rows(rows_) {}
  __device__ __forceinline__ HeadRows(const void* start, const Steps& steps, const Head& place,
                                      uint32_t head, const LaneRows& rows_, int columns_)
      : HeadRows(start, place.offset(steps, head), steps, rows_, columns_) {}

  __device__ __forceinline__ Row* at(int row, int unit) const {
    return reinterpret_cast<Row*>(data + int64_t{row} * stride) + unit * 4;
  }
  __device__ __forceinline__ bool inside(int unit) const {
    return S::kWhole || unit * 16 < columns;
  }
  // The 16 columns of a unit; zeros beyond the last column.
  __device__ __forceinline__ void load(Row (&x)[S::kBlocks], int unit) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      if constexpr (!S::kWhole) x[i] = Row{};
      if (inside(unit)) ptx::ld_row(x[i], at(rows.clamped(i), unit));
    }
  }
  template <class Factor>
  __device__ __forceinline__ void store(const typename P::Sum (&x)[S::kTiles][2], int unit,
                                        Factor&& factor) const {
    store_rows<P, S>(x, rows, factor, [&](int row, const Row& y) {
      if (inside(unit)) *at(row, unit) = y;
    });
  }
};

// A matrix of one head in registers, for several products.
template <class P, class S>
struct HeldRows {
  static constexpr bool kShared = true;  // no load waits for memory
  typename P::Row x[S::kUnits][S::kBlocks];

  template <class Rows>
  __device__ __forceinline__ explicit HeldRows(const Rows& from) {
#pragma unroll
    for (int u = 0; u < S::kUnits; ++u) from.load(x[u], u);
  }
  __device__ __forceinline__ void load(typename P::Row (&to)[S::kBlocks], int unit) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) to[i] = x[unit][i];
  }
};

// Whether all rows of a matrix are in registers at the same time.
template <class P, class S>
inline constexpr bool kHoldsRows = sizeof(typename P::Row) * S::kBlocks * S::kUnits <= 128;

// Scores, or other values per pair, of all rows: C = A B^T. Rows are loaded ahead as registers
// allow; `meanwhile` issues its loads after the first of them. kUnroll: units whose loads may be
// early. Rows: HeadRows or StagedRows.
template <class P, class S, int kUnroll, class Rows, class Meanwhile>
__device__ __forceinline__ void multiply_heads(Scores<S::kBlocks>& c, const Rows& a, const Rows& b,
                                               Meanwhile&& meanwhile) {
  constexpr int kBlocks = S::kBlocks, kLast = kBlocks - 1;
  constexpr bool kTogether = kHoldsRows<P, S>;
  constexpr int kUnits = kTogether ? S::kUnits : 1;
  typename P::Row x[kUnits][kBlocks], y[kUnits][kBlocks];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      a.load(x[u], first + u);
      b.load(y[u], first + u);
    }
  };
  if (kTogether) load(0);
  meanwhile();
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    typename P::Sum sum[kBlocks];
#pragma unroll(kTogether ? S::kUnits : kUnroll)
    for (int u = 0; u < S::kUnits; ++u) {
      if (!kTogether) load(u);
      const auto& rows = x[kTogether ? u : 0];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        P::multiply_transposed(
            sum[n], rows[2 * m],
            2 * m < kLast ? rows[2 * m < kLast ? 2 * m + 1 : 0] : typename P::Row{},
            y[kTogether ? u : 0][n]);
    }
#pragma unroll
    for (int i = 0; i < kBlocks * 4; ++i) c[m][i / 4][i % 4] = sum[i / 4][i % 4];
  }
}

}  // namespace flashsci::sm80::small
