// Tensor cores of sm_90a on the host: wgmma with operands of 16 and of 8 bits, mma.sync on fp16, and
// the instructions that move 8x8 matrices between registers and shared memory.
//
// A product runs as late as its wait allows, or when it is issued (`early`): a kernel that changes
// operands or reads sums too soon has wrong results with one of the two. A product rounds its sums
// to fp32 once. It is an error if a descriptor does not fit tiles that TMA writes, if rows of an
// 8x8 matrix share banks, and if more than `most_products` of 8-bit floats are summed without leaving
// the tensor core, which keeps 14 bits of them.
#pragma once
#include <cmath>

#include "copy_engine.h"

namespace emulation {

// --- 16-bit floats: bf16 ("brain") or fp16

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To same;
  std::memcpy(&same, &x, sizeof(x));
  return same;
}
inline uint16_t to_16(float x, bool brain) {
  if (!brain) return bits_as<uint16_t>(static_cast<_Float16>(x));
  const auto bits = bits_as<uint32_t>(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
inline float from_16(uint16_t bits, bool brain) {
  if (brain) return bits_as<float>(uint32_t{bits} << 16);
  static const std::vector<float> floats = [] {  // of all bits: a conversion is slow
    std::vector<float> made(1 << 16);
    for (size_t i = 0; i < made.size(); ++i)
      made[i] = static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(i)));
    return made;
  }();
  return floats[bits];
}
inline uint32_t to_pair(float low, float high, bool brain) {
  return to_16(low, brain) | static_cast<uint32_t>(to_16(high, brain)) << 16;
}

// --- 8-bit floats: e4m3

inline float from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10)
                              : std::ldexp(static_cast<float>(mantissa), -9);
  return x & 0x80 ? -size : size;
}
// To nearest, ties to even; what is too large becomes the largest.
inline uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const float size = std::min(std::fabs(x), 448.f);
  int low = 0, high = 0x7e;  // not above `size`, not below: their floats grow with them
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (from_e4m3(middle) <= size ? low : high) = middle;
  }
  const float down = size - from_e4m3(low), up = from_e4m3(high) - size;
  const int nearest = up < down || (up == down && high % 2 == 0) ? high : low;
  return nearest | (x < 0 ? 0x80 : 0);
}
inline const std::array<float, 256>& e4m3_floats() {  // of all bytes: a conversion is slow
  static const std::array<float, 256> floats = [] {
    std::array<float, 256> made;
    for (int i = 0; i < 256; ++i) made[i] = from_e4m3(static_cast<uint8_t>(i));
    return made;
  }();
  return floats;
}

// --- products

// A matrix in shared memory, in lines as long as the swizzle. A line is along k; transposed, it is
// one k of neighbouring rows of A or columns of B, and those beyond it are in further blocks.
struct Operand {
  uint32_t start, block_bytes, group_bytes;  // from a block to the next, from 8 rows to the next
  uint32_t row_bytes;
  bool transposed, brain;

  explicit Operand(uint64_t descriptor, bool transposed = false, bool brain = false)
      : start(block->window + ((descriptor & 0x3fff) << 4)),
        block_bytes((descriptor >> 16 & 0x3fff) << 4),
        group_bytes((descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed),
        brain(brain) {
    const int swizzle = descriptor >> 62;
    check(swizzle != 0 && (descriptor >> 49 & 7) == 0, "a descriptor that TMA's tiles do not have");
    row_bytes = 256 >> swizzle;
  }
  // `count` bytes that lie side by side wherever they are swizzled to.
  const unsigned char* find(uint32_t row, uint32_t byte, int count) const {
    check(transposed || start % row_bytes + byte < row_bytes, "a row longer than its swizzle");
    check(byte < row_bytes || block_bytes >= 8 * row_bytes, "the next columns are nowhere");
    const uint32_t place = start + byte / row_bytes * block_bytes + byte % row_bytes +
                           row / 8 * group_bytes + row % 8 * row_bytes;
    return at(swizzled(place, row_bytes), count, count);
  }
  // Elements 0 .. 15 along k of row (or column) `index`; of 8 bits 0 .. 31.
  void read(float (&x)[16], int index) const {
    const int together = transposed ? 1 : 8;
    for (int k = 0; k < 16; k += together) {
      const auto* from = find(transposed ? k : index, (transposed ? index : k) * 2, 2 * together);
      for (int i = 0; i < together; ++i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        x[k + i] = from_16(bits, brain);
      }
    }
  }
  void read(float (&x)[32], int index) const {
    for (int k = 0; k < 32; k += 16) {
      const auto* from = find(index, k, 16);
      for (int i = 0; i < 16; ++i) x[k + i] = e4m3_floats()[from[i]];
    }
  }
};

// D (+)= A B, a warpgroup's 64 rows, kN columns, kK products a sum. Lane l of a warp has rows l / 4
// and l / 4 + 8 of 16 of D and, of every 8 columns, 2 (l % 4) and the next. Each lane computes what
// it has.
template <int kN, int kK>
void multiply(float (&d)[kN / 2], const float (&a)[2][kK], const Operand& b, bool accumulate) {
  for (int n = 0; n < kN / 8; ++n)
    for (int i = 0; i < 2; ++i) {
      float column[kK];
      b.read(column, n * 8 + lane() % 4 * 2 + i);
      for (int half = 0; half < 2; ++half) {
        float& sum = d[n * 4 + half * 2 + i];
        double found = accumulate ? sum : 0.0;
        for (int k = 0; k < kK; ++k) found += double{a[half][k]} * column[k];
        sum = static_cast<float>(found);
      }
    }
}
// This lane's rows of A in shared memory.
template <int kK>
void read_rows(float (&x)[2][kK], const Operand& a) {
  const int row = threadIdx.x / 32 % 4 * 16 + lane() / 4;
  for (int half = 0; half < 2; ++half) a.read(x[half], row + half * 8);
}

inline void issue(Work product) {
  if (early)
    product();
  else
    thread->products.push_back(std::move(product));
}

}  // namespace emulation

namespace flashsci::ptx {

inline void wgmma_fence() {}
template <class T>
void schedule_fence(T) {}
inline void wgmma_commit() {
  thread->product_groups.push_back(std::move(thread->products));
  thread->products.clear();
}
template <int kPending>
void wgmma_wait() {
  for (; thread->product_groups.size() > kPending; thread->product_groups.pop_front())
    for (const Work& product : thread->product_groups.front()) product();
}
template <int kCount>
void wgmma_tie(float (&)[kCount]) {}

template <int kN, bool kBrain>
struct Wgmma16 {
  // A in shared memory.
  template <int kTransB>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    issue([=, &d] {
      float x[2][16];
      read_rows(x, Operand(a, false, kBrain));
      multiply<kN>(d, x, Operand(b, kTransB, kBrain), accumulate);
    });
  }
  // A in registers, distributed as D is. They are read when the product runs.
  template <int kTransB>
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    issue([=, &d, &a] {
      const auto all = exchange(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
      float x[2][16];
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 16; ++k) {
          const uint32_t pair = all[lane() / 4 * 4 + k % 8 / 2][k / 8 * 2 + half];
          x[half][k] = from_16(pair >> k % 2 * 16 & 0xffff, kBrain);
        }
      multiply<kN>(d, x, Operand(b, kTransB, kBrain), accumulate);
    });
  }
};
template <int kN>
using WgmmaBf16 = Wgmma16<kN, true>;
template <int kN>
using WgmmaF16 = Wgmma16<kN, false>;

// Of 8-bit floats: no operand is transposed. Register i of A has row i % 2 * 8 + l / 4 and columns
// i / 2 * 16 + 4 (l % 4) and the three after it.
inline int most_products = 128;  // of 8-bit floats in one sum

template <int kN>
struct Qgmma {
  static void count(const float* d, bool accumulate) {
    int& sum = thread->sums[d];
    sum = accumulate ? sum + 32 : 32;
    check(sum <= most_products, "a longer sum of products of 8-bit floats in the tensor core");
  }
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    count(d, accumulate);
    issue([=, &d] {
      float x[2][32];
      read_rows(x, Operand(a));
      multiply<kN>(d, x, Operand(b), accumulate);
    });
  }
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    count(d, accumulate);
    issue([=, &d, &a] {
      const auto all = exchange(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
      float x[2][32];
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 32; ++k) {
          const uint32_t four = all[lane() / 4 * 4 + k % 16 / 4][k / 16 * 2 + half];
          x[half][k] = e4m3_floats()[four >> k % 4 * 8 & 0xff];
        }
      multiply<kN>(d, x, Operand(b), accumulate);
    });
  }
};
template <int kRowBytes>
uint64_t qgmma_descriptor(uint32_t address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return (address >> 4 & 0x3fff) | uint64_t{1} << 16 | uint64_t{kRowBytes * 8 >> 4} << 32 |
         uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
}

// The fields of a descriptor are those that Operand reads; see csrc/ptx/wgmma.cuh.
inline uint64_t wgmma_descriptor(uint32_t address, uint32_t block_bytes, uint32_t group_bytes) {
  return (address >> 4 & 0x3fff) | uint64_t{block_bytes >> 4} << 16 | uint64_t{group_bytes >> 4} << 32 |
         uint64_t{1} << 62;
}
inline uint64_t wgmma_descriptor_span64(uint32_t address) {
  return (address >> 4 & 0x3fff) | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 | uint64_t{2} << 62;
}

// mma.sync: see csrc/ptx/mma.cuh for what each lane holds.
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         bool bf16) {
  const auto rows = exchange(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
  const auto columns = exchange(std::array<uint32_t, 2>{b0, b1});
  const auto element = [&](uint32_t pair, int k) { return from_16(pair >> k % 2 * 16, bf16); };
  for (int e = 0; e < 4; ++e) {
    double sum = c[e];
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2, column = lane() % 4 * 2 + e % 2;
      sum += double{element(rows[lane() / 4 * 4 + t][k / 8 * 2 + e / 2], k)} *
             element(columns[column * 4 + t][k / 8], k);
    }
    c[e] = static_cast<float>(sum);
  }
}
inline void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(c, a, b0, b1, false);
}
inline void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16(c, a, b0, b1, true);
}

// TF32 operands: the upper 19 bits count. See csrc/ptx/mma.cuh.
inline void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const auto rows = exchange(std::array<uint32_t, 4>{a[0], a[1], a[2], a[3]});
  const auto columns = exchange(std::array<uint32_t, 2>{b[0], b[1]});
  const auto element = [](uint32_t x) { return double{bits_as<float>(x & 0xffffe000u)}; };
  for (int e = 0; e < 4; ++e) {
    double sum = c[e];
    for (int k = 0; k < 8; ++k) {
      const int t = k % 4, column = lane() % 4 * 2 + e % 2;
      sum += element(rows[lane() / 4 * 4 + t][k / 4 * 2 + e / 2]) *
             element(columns[column * 4 + t][k / 4]);
    }
    c[e] = static_cast<float>(sum);
  }
}

// --- conversions

inline uint32_t cvt_bf16x2(float low, float high) { return to_pair(low, high, true); }
inline uint32_t cvt_f16x2(float low, float high) { return to_pair(low, high, false); }
inline float cvt_f32_f16(uint16_t x) { return from_16(x, false); }
inline float2 cvt_f32_f16x2(uint32_t x) {
  return {from_16(x & 0xffff, false), from_16(x >> 16, false)};
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  const float2 x = cvt_f32_f16x2(a), y = cvt_f32_f16x2(b);
  return to_pair(x.x * y.x, x.y * y.y, false);
}
inline uint32_t max_abs_f16x2(uint32_t a, uint32_t b) {
  const float2 x = cvt_f32_f16x2(a), y = cvt_f32_f16x2(b);
  return to_pair(std::fmax(std::fabs(x.x), std::fabs(y.x)),
                 std::fmax(std::fabs(x.y), std::fabs(y.y)), false);
}
inline uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
  return to_e4m3(x0) | to_e4m3(x1) << 8 | to_e4m3(x2) << 16 | uint32_t{to_e4m3(x3)} << 24;
}
inline uint2 cvt_f16x4_e4m3(uint32_t word) {
  const auto wide = [&](int i) { return e4m3_floats()[word >> 8 * i & 0xff]; };
  return {to_pair(wide(0), wide(1), false), to_pair(wide(2), wide(3), false)};
}
inline uint2 cvt_f16x4_e5m2(uint32_t word) {  // the upper half of an fp16
  const auto wide = [&](int i) { return (word >> 8 * i & 0xff) << (8 + i % 2 * 16); };
  return {wide(0) | wide(1), wide(2) | wide(3)};
}

// --- matrices of 8 rows of 16 bytes; lane 8 m + r gives the address of row r of matrix m

// Calls move(m, i, place) for both elements that the lane has of each of four matrices.
template <class Move>
void for_each_element(uint32_t address, bool transposed, const Move& move) {
  const auto rows = exchange(address);
  for (int m = 0; m < 4; ++m) {
    uint32_t banks = 0, all_equal = 1;
    for (int row = 0; row < 8; ++row) {
      banks |= 1u << (rows[m * 8 + row] / 16 % 8);
      all_equal &= rows[m * 8 + row] == rows[m * 8];
    }
    check(banks == 0xff || all_equal, "rows of a matrix that collide");
    for (int i = 0; i < 2; ++i) {
      const int outer = lane() / 4, inner = lane() % 4 * 2 + i;
      const uint32_t row = rows[m * 8 + (transposed ? inner : outer)];
      move(m, i, at(row, 16, 16) + (transposed ? outer : inner) * 2);
    }
  }
}
inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  for_each_element(address, transposed, [&](int m, int i, const unsigned char* from) {
    std::memcpy(reinterpret_cast<char*>(&r[m]) + i * 2, from, 2);
  });
  __syncwarp();  // one instruction: no lane writes there before all have read
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  load_matrices(r, address, true);
}
inline uint32_t movmatrix_trans(uint32_t x) {
  const auto all = exchange(x);
  const int row = lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](int r, int c) { return all[r * 4 + c / 2] >> c % 2 * 16 & 0xffff; };
  return element(column, row) | element(column + 1, row) << 16;
}
inline void store_matrices(uint32_t address, const uint32_t (&r)[4], bool transposed) {
  for_each_element(address, transposed, [&](int m, int i, unsigned char* to) {
    std::memcpy(to, reinterpret_cast<const char*>(&r[m]) + i * 2, 2);
  });
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  store_matrices(address, {r0, r1, r2, r3}, false);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  store_matrices(address, r, true);
}

}  // namespace flashsci::ptx
