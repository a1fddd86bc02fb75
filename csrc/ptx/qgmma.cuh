// PTX ISA "wgmma.mma_async" m64nNk32 of e4m3, fp32 accumulator d[N / 2]: warp w, lane l of the
// warpgroup, g = l / 4, t = l % 4: d[i] is row 16 w + g + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 t
// + (i & 1). A from registers (rs; ss: from shared memory): byte e of a[i] is row 16 w + g + 8 (i &
// 1), column 16 (i >> 1) + 4 t + e. accumulate 0: d is overwritten. 8-bit operands cannot be
// transposed: the summed dimension is innermost in both. Sums keep about 14 bits, the rest is
// truncated.
//
// Qgmma<N>::ss and ::rs for the widths in use: keys of a block, and 64 columns of V, or 8 more.
#pragma once
#include <cstdint>

#include "wgmma_widths.cuh"

#define FLASHSCI_D36 FLASHSCI_D32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FLASHSCI_NAMES36 FLASHSCI_NAMES32 ", %32, %33, %34, %35"

// One width: `count` accumulators, and i0 ..., the names of the operands after them.
// clang-format off
#define FLASHSCI_QGMMA_WIDTH(N, count, i0, i1, i2, i3, i4, i5)                                     \
  template <>                                                                                      \
  struct Qgmma<N> {                                                                                \
    static __device__ __forceinline__ void ss(float (&d)[count], uint64_t a, uint64_t b,           \
                                              int accumulate) {                                    \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 "                              \
          "{" FLASHSCI_NAMES##count "}, " i0 ", " i1 ", p, 1, 1;\n}\n"                             \
          : FLASHSCI_D##count                                                                      \
          : "l"(a), "l"(b), "r"(accumulate));                                                      \
    }                                                                                              \
    static __device__ __forceinline__ void rs(float (&d)[count], const uint32_t (&a)[4],           \
                                              uint64_t b, int accumulate) {                        \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 "                              \
          "{" FLASHSCI_NAMES##count "}, "                                                          \
          "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1;\n}\n"                                \
          : FLASHSCI_D##count                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                  \
    }                                                                                              \
  };
// clang-format on

namespace flashsci::ptx {

template <int kN>
struct Qgmma;
FLASHSCI_QGMMA_WIDTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FLASHSCI_QGMMA_WIDTH(72, 36, "%36", "%37", "%38", "%39", "%40", "%41")
FLASHSCI_QGMMA_WIDTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")

// Descriptor of a K-major operand whose rows have kRowBytes, the span of its swizzle, in tiles that
// are aligned to 8 rows.
template <int kRowBytes>
__device__ __forceinline__ uint64_t qgmma_descriptor(uint32_t shared) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "swizzles of 128 or 64 bytes");
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         static_cast<uint64_t>(kRowBytes * 8 >> 4) << 32 |
         static_cast<uint64_t>(kRowBytes == 128 ? 1 : 2) << 62;
}

}  // namespace flashsci::ptx
