// Tensor cores of sm_90a on the host: wgmma with 16-bit operands, and the instructions that move
// 8x8 matrices between registers and shared memory.
//
// A product runs as late as its wait allows, or when it is issued (`early`): a kernel that changes
// operands or reads sums too soon has wrong results with one of the two. A product rounds its sums
// to fp32 once. It is an error if a descriptor does not fit tiles that TMA writes, and if rows of
// an 8x8 matrix share banks.
#pragma once
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

// --- products

// A matrix in shared memory, in lines as long as the swizzle. A line is along k; transposed, it is
// one k of neighbouring rows of A or columns of B, and those beyond it are in further blocks.
struct Operand {
  uint32_t start, block_bytes, group_bytes;  // from a block to the next, from 8 rows to the next
  uint32_t row_bytes;
  bool transposed, brain;

  Operand(uint64_t descriptor, bool transposed, bool brain)
      : start((descriptor & 0x3fff) << 4),
        block_bytes((descriptor >> 16 & 0x3fff) << 4),
        group_bytes((descriptor >> 32 & 0x3fff) << 4),
        transposed(transposed),
        brain(brain) {
    const int swizzle = descriptor >> 62;
    check(swizzle != 0 && (descriptor >> 49 & 7) == 0, "a descriptor that TMA's tiles do not have");
    row_bytes = 256 >> swizzle;
  }
  // Elements 0 .. 15 along k of row (or column) `index`.
  void read(float (&x)[16], int index) const {
    const int together = transposed ? 1 : 8;  // that lie side by side wherever they are swizzled to
    for (int k = 0; k < 16; k += together) {
      const uint32_t row = transposed ? k : index, byte = (transposed ? index : k) * 2;
      check(transposed || start % row_bytes + byte < row_bytes, "a row longer than its swizzle");
      check(byte < row_bytes || block_bytes >= 8 * row_bytes, "the next columns are nowhere");
      const uint32_t place = start + byte / row_bytes * block_bytes + byte % row_bytes +
                             row / 8 * group_bytes + row % 8 * row_bytes;
      const auto* from = at(swizzled(place, row_bytes), 2 * together, 2 * together);
      for (int i = 0; i < together; ++i) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        x[k + i] = from_16(bits, brain);
      }
    }
  }
};

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

// D (+)= A B, a warpgroup's 64 rows, kN columns, k16. Lane l of a warp has rows l / 4 and l / 4 + 8
// of 16 of D and, of every 8 columns, 2 (l % 4) and the next. Each lane computes what it has.
template <int kN, bool kBrain>
struct Wgmma16 {
  static void multiply(float (&d)[kN / 2], const float (&a)[2][16], const Operand& b,
                       bool accumulate) {
    for (int n = 0; n < kN / 8; ++n)
      for (int i = 0; i < 2; ++i) {
        float column[16];
        b.read(column, n * 8 + lane() % 4 * 2 + i);
        for (int half = 0; half < 2; ++half) {
          float& sum = d[n * 4 + half * 2 + i];
          double found = accumulate ? sum : 0.0;
          for (int k = 0; k < 16; ++k) found += double{a[half][k]} * column[k];
          sum = static_cast<float>(found);
        }
      }
  }
  // A in shared memory.
  template <int kTransB>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    issue([=, &d] {
      const Operand rows(a, false, kBrain);
      const int row = threadIdx.x / 32 % 4 * 16 + lane() / 4;
      float x[2][16];
      for (int half = 0; half < 2; ++half) rows.read(x[half], row + half * 8);
      multiply(d, x, Operand(b, kTransB, kBrain), accumulate);
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
      multiply(d, x, Operand(b, kTransB, kBrain), accumulate);
    });
  }
};
template <int kN>
using WgmmaBf16 = Wgmma16<kN, true>;
template <int kN>
using WgmmaF16 = Wgmma16<kN, false>;

// The fields of a descriptor are those that Operand reads; see csrc/ptx/wgmma.cuh.
inline uint64_t wgmma_descriptor(uint32_t address, uint32_t block_bytes, uint32_t group_bytes) {
  return address >> 4 | uint64_t{block_bytes >> 4} << 16 | uint64_t{group_bytes >> 4} << 32 |
         uint64_t{1} << 62;
}
inline uint64_t wgmma_descriptor_span64(uint32_t address) {
  return address >> 4 | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 | uint64_t{2} << 62;
}

// --- conversions

inline uint32_t cvt_bf16x2(float low, float high) { return to_pair(low, high, true); }
inline uint32_t cvt_f16x2(float low, float high) { return to_pair(low, high, false); }
inline float cvt_f32_f16(uint16_t x) { return from_16(x, false); }

// --- matrices of 8 rows of 16 bytes; lane 8 m + r gives the address of row r of matrix m

// Calls move(m, i, place) for both elements that the lane has of each of four matrices.
template <class Move>
void for_each_element(uint32_t address, bool transposed, const Move& move) {
  const auto rows = exchange(address);
  for (int m = 0; m < 4; ++m) {
    uint32_t banks = 0;
    for (int row = 0; row < 8; ++row) banks |= 1u << (rows[m * 8 + row] / 16 % 8);
    check(banks == 0xff, "rows of a matrix that collide");
    for (int i = 0; i < 2; ++i) {
      const int outer = lane() / 4, inner = lane() % 4 * 2 + i;
      const uint32_t row = rows[m * 8 + (transposed ? inner : outer)];
      move(m, i, at(row, 16, 16) + (transposed ? outer : inner) * 2);
    }
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  for_each_element(address, false, [&](int m, int i, const unsigned char* from) {
    std::memcpy(reinterpret_cast<char*>(&r[m]) + i * 2, from, 2);
  });
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
