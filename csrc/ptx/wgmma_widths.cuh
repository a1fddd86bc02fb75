// PTX ISA "wgmma.mma_async" m64nNk16 with a 16-bit type, fp32 accumulator d[N / 2]: warp w, lane l
// of the warpgroup, g = l / 4, t = l % 4: d[i] is row 16 w + g + 8 ((i >> 1) & 1), column 8 (i >>
// 2) + 2 t + (i & 1). A from registers (rs; ss: from shared memory): a[i] is row 16 w + g + 8 (i &
// 1), columns 8 (i >> 1) + 2 t, + 1. accumulate 0: d is overwritten. kTransB 1: B is MN-major.
//
// An instruction names all its registers, and its type: FLASHSCI_WGMMA(Name, "type") makes the
// wrappers Name<N>::ss and ::rs of one type for the widths in use, keys of a block or half of one
// and head dims. wgmma_bf16.cuh and wgmma_f16.cuh have one type each.
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

// One width: `count` accumulators, and i0 ..., the names of the operands after them.
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
