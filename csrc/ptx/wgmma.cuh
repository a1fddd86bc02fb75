// PTX ISA "wgmma" (sm_90a): products of a warpgroup, their order and matrix descriptors.
//
// Accumulator d[N / 2] in fp32: warp w, lane l of the warpgroup, g = l / 4, t = l % 4: d[i] is row
// 16 w + g + 8 ((i >> 1) & 1), column 8 (i >> 2) + 2 t + (i & 1). accumulate 0: d is overwritten.
// A from registers (rs; ss: from shared memory), see the products.
//
// An instruction names all its registers, and its type: macros make the wrappers Name<N>::ss and
// ::rs for the widths in use.
#pragma once
#include <cstdint>

// Registers d[0] ... d[N / 2 - 1] as operands, and their names.
#define FLASHSCI_D8(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLASHSCI_D16 FLASHSCI_D8(0), FLASHSCI_D8(8)
#define FLASHSCI_D24 FLASHSCI_D16, FLASHSCI_D8(16)
#define FLASHSCI_D32 FLASHSCI_D24, FLASHSCI_D8(24)
#define FLASHSCI_D48 FLASHSCI_D32, FLASHSCI_D8(32), FLASHSCI_D8(40)
#define FLASHSCI_D64 FLASHSCI_D48, FLASHSCI_D8(48), FLASHSCI_D8(56)
#define FLASHSCI_D96 \
  FLASHSCI_D64, FLASHSCI_D8(64), FLASHSCI_D8(72), FLASHSCI_D8(80), FLASHSCI_D8(88)
#define FLASHSCI_D128 \
  FLASHSCI_D96, FLASHSCI_D8(96), FLASHSCI_D8(104), FLASHSCI_D8(112), FLASHSCI_D8(120)
#define FLASHSCI_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHSCI_NAMES24 FLASHSCI_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHSCI_NAMES32 FLASHSCI_NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHSCI_NAMES48 \
  FLASHSCI_NAMES32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHSCI_NAMES64 \
  FLASHSCI_NAMES48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHSCI_NAMES96                                                             \
  FLASHSCI_NAMES64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHSCI_NAMES128                                                    \
  FLASHSCI_NAMES96                                                           \
  ", %96, %97, %98, %99"                                                     \
  ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123" \
  ", %124, %125, %126, %127"
#define FLASHSCI_D36 FLASHSCI_D32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FLASHSCI_NAMES36 FLASHSCI_NAMES32 ", %32, %33, %34, %35"

// One width of a 16-bit type: `count` accumulators, and i0 ..., the names of the operands after them.
// clang-format off
#define FLASHSCI_WGMMA_WIDTH(Name, type, N, count, i0, i1, i2, i3, i4, i5, i6)                     \
  template <>                                                                                      \
  struct Name<N> {                                                                                 \
    template <int kTransB>                                                                         \
    static __device__ __forceinline__ void ss(float (&d)[count], uint64_t a, uint64_t b,           \
                                              int accumulate) {                                    \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " i2 ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " "                      \
          "{" FLASHSCI_NAMES##count "}, " i0 ", " i1 ", p, 1, 1, 0, " i3 ";\n}\n"                  \
          : FLASHSCI_D##count                                                                      \
          : "l"(a), "l"(b), "r"(accumulate), "n"(kTransB));                                        \
    }                                                                                              \
    template <int kTransB>                                                                         \
    static __device__ __forceinline__ void rs(float (&d)[count], const uint32_t (&a)[4],           \
                                              uint64_t b, int accumulate) {                        \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, " i5 ", 0;\n"                                          \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " "                      \
          "{" FLASHSCI_NAMES##count "}, "                                                          \
          "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1, " i6 ";\n}\n"                        \
          : FLASHSCI_D##count                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));    \
    }                                                                                              \
  };

#define FLASHSCI_WGMMA(Name, type)                                                                 \
  template <int kN>                                                                                \
  struct Name;                                                                                     \
  FLASHSCI_WGMMA_WIDTH(Name, type, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")        \
  FLASHSCI_WGMMA_WIDTH(Name, type, 48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")        \
  FLASHSCI_WGMMA_WIDTH(Name, type, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")        \
  FLASHSCI_WGMMA_WIDTH(Name, type, 96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")        \
  FLASHSCI_WGMMA_WIDTH(Name, type, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")       \
  FLASHSCI_WGMMA_WIDTH(Name, type, 192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")    \
  FLASHSCI_WGMMA_WIDTH(Name, type, 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
// clang-format on

// One width of e4m3: `count` accumulators, and i0 ..., the names of the operands after them.
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

// Before the first wgmma, and after ordinary writes to its accumulators or A registers.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Wait until at most kPending of the newest groups are in flight. Follow it with wgmma_tie.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Ties accumulators to this point: the wait does not name them, so reads might move above it. It
// emits no instruction.
template <int kCount>
__device__ __forceinline__ void wgmma_tie(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// ptxas moves nothing across a branch, in particular no wgmma_wait above the code before it. x: a
// value >= 0 that the preceding code computes.
__device__ __forceinline__ void schedule_fence(float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@!p bra.uni PASSED;\n"
      "nanosleep.u32 1;\nPASSED:\n}\n" ::"f"(x)
      : "memory");
}

// The same; x: a value >= 0 that is the same in all lanes.
__device__ __forceinline__ void schedule_fence(int x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.s32 p, %0, 0;\n@!p bra.uni PASSED;\n"
      "nanosleep.u32 1;\nPASSED:\n}\n" ::"r"(x)
      : "memory");
}

// Descriptor of an operand in 128-byte swizzle, 1024-byte aligned tiles as TMA writes them: K-major
// tiles have group_bytes (SBO) from 8 rows to the next; MN-major ones also block_bytes (LBO) from
// 64 columns to the next.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t block_bytes,
                                                     uint32_t group_bytes) {
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) |
         static_cast<uint64_t>((block_bytes >> 4) & 0x3fff) << 16 |
         static_cast<uint64_t>((group_bytes >> 4) & 0x3fff) << 32 | uint64_t{1} << 62;
}

// Descriptor of an operand in 64-byte swizzle: boxes of 32 16-bit columns as TMA writes them, 512
// bytes aligned. K-major: 32 bytes on is the next k16 step. MN-major (32 columns): 1024 bytes on.
__device__ __forceinline__ uint64_t wgmma_descriptor_span64(uint32_t shared) {
  constexpr uint64_t kGroupBytes = 512;  // from 8 rows to the next
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         (kGroupBytes >> 4) << 32 | uint64_t{2} << 62;
}

// Descriptor of a K-major operand whose rows have kRowBytes, the span of its swizzle, in tiles that
// are aligned to 8 rows.
template <int kRowBytes>
__device__ __forceinline__ uint64_t qgmma_descriptor(uint32_t shared) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "swizzles of 128 or 64 bytes");
  return static_cast<uint64_t>((shared & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         static_cast<uint64_t>(kRowBytes * 8 >> 4) << 32 |
         static_cast<uint64_t>(kRowBytes == 128 ? 1 : 2) << 62;
}

// WgmmaF16<N>, WgmmaBf16<N>: m64nNk16 with 16-bit operands; keys of a block or half of one, and head
// dims. A from registers: a[i] is row 16 w + g + 8 (i & 1), columns 8 (i >> 1) + 2 t, + 1. kTransB 1:
// B is MN-major.
FLASHSCI_WGMMA(WgmmaF16, "f16")
FLASHSCI_WGMMA(WgmmaBf16, "bf16")

// Qgmma<N>: m64nNk32 of e4m3; keys of a block, and 64 columns of V, or 8 more. A from registers: byte
// e of a[i] is row 16 w + g + 8 (i & 1), column 16 (i >> 1) + 4 t + e. 8-bit operands cannot be
// transposed: the summed dimension is innermost in both. Sums keep about 14 bits, the rest is
// truncated.
template <int kN>
struct Qgmma;
FLASHSCI_QGMMA_WIDTH(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
FLASHSCI_QGMMA_WIDTH(72, 36, "%36", "%37", "%38", "%39", "%40", "%41")
FLASHSCI_QGMMA_WIDTH(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")

}  // namespace flashsci::ptx
