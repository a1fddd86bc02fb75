// Tensors and devices as the ops see them: a thin layer over the stable ABI. A small call costs
// microseconds, so nothing here asks the driver twice or copies a tensor handle.
#pragma once
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>

#include "../core/rehearsal.h"
#include "../include/flashsci.h"
#include "stream.h"

namespace flashsci::bindings {

using flashsci::rehearsing;
using torch::stable::Tensor;

inline constexpr int kMaxRank = 5;
inline constexpr int kMaxDevices = 64;

#define FLASHSCI_CHECK(condition, ...) STD_TORCH_CHECK(condition, "flashsci: ", __VA_ARGS__)

// torch's numbers for the dtypes. (No name here says bf16: a build for Turing has no such symbol.)
struct Dtypes {
  int32_t half = aoti_torch_dtype_float16(), brain = aoti_torch_dtype_bfloat16(),
          single = aoti_torch_dtype_float32(), int32 = aoti_torch_dtype_int32(),
          int64 = aoti_torch_dtype_int64(), boolean = aoti_torch_dtype_bool(),
          byte = aoti_torch_dtype_uint8(), e4m3 = aoti_torch_dtype_float8_e4m3fn(),
          e5m2 = aoti_torch_dtype_float8_e5m2();
};

inline const Dtypes& dtypes() {
  static const Dtypes numbers;
  return numbers;
}

inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

inline int size_of(int32_t dtype) {
  return dtype == dtypes().single ? 4 : dtype == dtypes().e4m3 ? 1 : 2;
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << "[";
  const auto sizes = t.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << "]";
  return text.str();
}

// Torch takes None for any tensor of a schema.
inline void check_given(const Tensor& x, const char* name) {
  FLASHSCI_CHECK(x.defined(), name, " must be a tensor, got None");
}

inline void check_cuda(cudaError_t error, const char* what) {
  FLASHSCI_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorName(error), " (",
                 cudaGetErrorString(error), ")");
}

struct Device {
  int capability;     // major * 10 + minor
  int shared_per_sm;  // bytes
};

inline int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "reading a device attribute");
  return value;
}

// Queried once per device; a lost race only repeats the query.
inline Device describe(int device) {
  if (const Rehearsal* described = rehearsal())
    return {described->capability, described->shared_per_sm};
  static std::atomic<uint64_t> known[kMaxDevices];
  const bool cached = device < kMaxDevices;
  uint64_t packed = cached ? known[device].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    const uint64_t capability = attribute_of(device, cudaDevAttrComputeCapabilityMajor) * 10 +
                                attribute_of(device, cudaDevAttrComputeCapabilityMinor);
    packed = capability << 32 | static_cast<uint32_t>(attribute_of(
                                    device, cudaDevAttrMaxSharedMemoryPerMultiprocessor));
    if (cached) known[device].store(packed, std::memory_order_relaxed);
  }
  return {static_cast<int>(packed >> 32), static_cast<int>(packed & 0xffffffffu)};
}

// Makes the device current for torch's allocator and for our (static) CUDA runtime; no cost if it
// already is.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (rehearsing()) return;
    check_cuda(cudaGetDevice(&previous_), "asking for the current device");
    if (previous_ != device) {
      guard_.emplace(device);
      check_cuda(cudaSetDevice(device), "switching the device");
      switched_ = true;
    }
  }
  ~OnDevice() {
    if (switched_) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// A tensor of rank 2 .. 5 seen as [batch0, batch1, heads, rows, columns]; missing dims have size 1.
struct View {
  int64_t size[kMaxRank], stride[kMaxRank];

  explicit View(const Tensor& t) {
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    const int missing = kMaxRank - static_cast<int>(sizes.size());
    for (int i = 0; i < kMaxRank; ++i) {
      size[i] = i < missing ? 1 : sizes[i - missing];
      stride[i] = i < missing ? 0 : strides[i - missing];
    }
  }
  FlashsciStrides strides() const { return {stride[0], stride[1], stride[2], stride[3]}; }

  // Strides of a tensor of which every dim may be broadcast: 0 where the size is 1.
  FlashsciScoreStrides pair_strides() const {
    const auto of = [&](int i) { return size[i] == 1 ? 0 : stride[i]; };
    return {of(0), of(1), of(2), of(3), of(4)};
  }

  // The bits of all offsets of rows, in bytes: the lowest set bit is the alignment of the rows.
  uint64_t alignment_bits(int element_size) const {
    uint64_t bits = 0;
    for (int i = 0; i < kMaxRank - 1; ++i)
      if (size[i] > 1) bits |= static_cast<uint64_t>(stride[i]) * element_size;
    return bits;
  }
};

// Whether a tensor is on this CUDA device; in a rehearsal tensors may be on any device.
inline bool is_on(const Tensor& x, int device) {
  return rehearsing() || (x.is_cuda() && x.get_device_index() == device);
}

// The address of a tensor. Without memory of its own (on "meta") it gets an address with the
// alignment of an allocator.
inline const void* address_of(const Tensor& x) {
  const void* address = x.const_data_ptr();
  return address == nullptr && rehearsing() ? rehearsed_address() : address;
}

inline void* current_stream(int device) {
  if (rehearsing()) return nullptr;
  FLASHSCI_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                 "this torch was built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

inline Tensor empty_strided(int rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                            int device) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  AtenTensorHandle handle;
  if (rehearsing()) {
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_create_tensor_from_blob(rehearsed_address(), rank, sizes, strides, 0, dtype,
                                           aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
  }
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes, strides, dtype, cuda, device, &handle));
#if defined(FLASHSCI_POISON)  // core/poison.cuh: results and workspaces are NaN until written
  int64_t bytes = dtype == dtypes().byte ? 1 : size_of(dtype);
  for (int i = 0; i < rank; ++i) bytes *= sizes[i];
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
  if (bytes > 0)
    check_cuda(
        cudaMemsetAsync(data, 0xff, bytes, static_cast<cudaStream_t>(current_stream(device))),
        "poisoning memory");
#endif
  return Tensor(handle);
}

// flashsci.ops.empty_like_layout: leading dims ordered in memory as q's strides order them.
inline Tensor empty_like_layout(const Tensor& q, int64_t columns, int32_t dtype, int device) {
  const int rank = static_cast<int>(q.dim());
  const auto q_sizes = q.sizes();
  const auto q_strides = q.strides();
  int64_t sizes[kMaxRank], strides[kMaxRank];
  int order[kMaxRank];
  for (int i = 0; i < rank; ++i) {
    sizes[i] = i == rank - 1 ? columns : q_sizes[i];
    order[i] = i;
  }
  for (int i = 1; i < rank - 1; ++i)  // a stable insertion sort by stride, descending
    for (int j = i; j > 0 && q_strides[order[j - 1]] < q_strides[order[j]]; --j)
      std::swap(order[j - 1], order[j]);
  strides[rank - 1] = 1;
  int64_t step = std::max<int64_t>(columns, 1);
  for (int i = rank - 2; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return empty_strided(rank, sizes, strides, dtype, device);
}

// A dense tensor of the shape of another, all dims ordered in memory as its strides order them.
inline Tensor empty_in_order(const Tensor& like, int32_t dtype, int device) {
  const int rank = static_cast<int>(like.dim());
  int64_t strides[kMaxRank], step = 1;
  int order[kMaxRank];
  for (int i = 0; i < rank; ++i) order[i] = i;
  std::stable_sort(order, order + rank,
                   [&](int a, int b) { return like.stride(a) > like.stride(b); });
  for (int i = rank - 1; i >= 0; --i) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(like.size(order[i]), 1);
  }
  return empty_strided(rank, like.sizes().data(), strides, dtype, device);
}

// A dense row-major tensor.
inline Tensor empty_contiguous(int rank, const int64_t* sizes, int32_t dtype, int device) {
  int64_t strides[kMaxRank], step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(rank, sizes, strides, dtype, device);
}

// A row-major tensor whose rows are apart by whole `row_elements`.
inline Tensor empty_pitched(int rank, const int64_t* sizes, int64_t row_elements, int32_t dtype,
                            int device) {
  int64_t strides[kMaxRank];
  int64_t step = (sizes[rank - 1] + row_elements - 1) / row_elements * row_elements;
  strides[rank - 1] = 1;
  for (int i = rank - 2; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(rank, sizes, strides, dtype, device);
}

// A copy of an object, in a tensor on the host that Python keeps.
template <class Object>
Tensor kept_by_python(const Object& object) {
  static_assert(std::is_trivially_copyable_v<Object>);
  const int64_t size = sizeof(Object), stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, dtypes().byte,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor bytes(handle);
  std::memcpy(bytes.mutable_data_ptr(), &object, sizeof(Object));
  return bytes;
}

// Whether rows and everything above them have the strides of a dense row-major tensor; dims of one
// row may have any stride.
inline bool is_contiguous(const Tensor& x) {
  int64_t step = 1;
  for (int i = static_cast<int>(x.dim()) - 1; i >= 0; --i) {
    if (x.size(i) != 1 && x.stride(i) != step) return false;
    step *= std::max<int64_t>(x.size(i), 1);
  }
  return true;
}

}  // namespace flashsci::bindings
