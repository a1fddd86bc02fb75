// Host side: CUtensorMap of a [B0, B1, H, rows, columns] tensor, without linking libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../core/rehearsal.h"
#include "../include/flashsci.h"

namespace flashsci::sm90 {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static std::atomic<void*> known{nullptr};
  void* function = known.load(std::memory_order_relaxed);
  if (function == nullptr) {
    cudaDriverEntryPointQueryResult status;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &status) != cudaSuccess ||
        status != cudaDriverEntryPointSuccess)
      return nullptr;
    known.store(function, std::memory_order_relaxed);
  }
  return reinterpret_cast<EncodeTiled>(function);
}

// The innermost four dims and strides (elements) that TMA walks in addition to the head dimension.
struct MapDims {
  int64_t size[4];    // rows, heads, batch1, batch0
  int64_t stride[4];  // the same, in elements
};

inline MapDims dense_dims(const FlashsciStrides& s, int64_t rows, int64_t heads, int64_t batch1,
                          int64_t batch0) {
  return {{rows, heads, batch1, batch0}, {s.row, s.head, s.batch1, s.batch0}};
}

// A packed [H, T, D] tensor cut exactly at any row by one more dimension: the box of `len` <=
// box_rows rows from `row` on is at (box_rows - len, row + len - box_rows, head), since its rows
// exceed the first dimension from len on. It cannot end before row box_rows of the tensor.
inline MapDims cut_dims(const FlashsciStrides& s, int64_t rows, int64_t heads, int box_rows) {
  return {{box_rows, rows < box_rows ? 1 : rows - box_rows + 1, heads, 1},
          {s.row, s.row, s.head, 0}};
}

struct MapElement {
  CUtensorMapDataType type;
  int bytes;
};
inline constexpr MapElement kBfloat16 = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
inline constexpr MapElement kFloat16 = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
inline constexpr MapElement kFloat32 = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
inline constexpr MapElement kByte = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

// Boxes of box_columns (32, 64 or 128 bytes: the swizzle; others: none), box_rows, and box_next of
// the dimension after these; zeros beyond the tensor. Not supported: a base that is not 16-byte
// aligned, strides that are not multiples of 16 bytes or reach 2^40.
inline cudaError_t encode_map(CUtensorMap* map, const void* base, const MapElement& element,
                              int columns, const MapDims& dims, int box_columns, int box_rows,
                              int box_next = 1) {
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0) return cudaErrorNotSupported;
  cuuint64_t size[5] = {static_cast<cuuint64_t>(columns)};
  cuuint64_t stride[4];
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(box_columns),
                             static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_next),
                             1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    // The stride of a single row is never used.
    const int64_t bytes = dims.size[i] > 1 ? dims.stride[i] * element.bytes : 16;
    if (bytes % 16 != 0 || bytes < 0 || bytes >= int64_t{1} << 40) return cudaErrorNotSupported;
    if (dims.size[i] < 1 || dims.size[i] > int64_t{1} << 31) return cudaErrorNotSupported;
    size[i + 1] = static_cast<cuuint64_t>(dims.size[i]);
    stride[i] = static_cast<cuuint64_t>(bytes);
  }
  if (rehearsing()) return cudaSuccess;
  const EncodeTiled encode = encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  const int span = box_columns * element.bytes;
  const CUtensorMapSwizzle swizzle = span == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : span == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                     : span == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                  : CU_TENSOR_MAP_SWIZZLE_NONE;
  const auto write = [&] {
    return encode(map, element.type, 5, const_cast<void*>(base), size, stride, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = write();
  int device;
  // The first call of a thread: the runtime binds the context by itself, the driver does not.
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE &&
      cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess)
    result = write();
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace flashsci::sm90
