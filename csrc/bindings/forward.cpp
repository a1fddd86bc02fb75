// flashsci::cuda_forward: checks, output allocation, choice of the kernel by device and dtype.
//
// Bad input must be an exception whoever calls: these checks stand between torch.ops and raw
// pointers. A small call costs microseconds, so nothing here asks the driver twice or copies a
// tensor handle.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>

#include "../include/flashsci.h"
#include "stream.h"

namespace {

using torch::stable::Tensor;

constexpr int kMaxRank = 5;
constexpr int kMaxDevices = 64;

#define CHECK(condition, ...) STD_TORCH_CHECK(condition, "flashsci::cuda_forward: ", __VA_ARGS__)

// torch's numbers for the dtypes. (No name here says bf16: a build for Turing has no such symbol at
// all.)
struct Dtypes {
  int32_t half = aoti_torch_dtype_float16(), brain = aoti_torch_dtype_bfloat16(),
          single = aoti_torch_dtype_float32();
};

int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << "[";
  const auto sizes = t.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << "]";
  return text.str();
}

void check_cuda(cudaError_t error, const char* what) {
  CHECK(error == cudaSuccess, what, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
        ")");
}

struct Device {
  int capability;     // major * 10 + minor
  int shared_per_sm;  // bytes
};

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "reading a device attribute");
  return value;
}

// Asked once per device; a lost race only asks again.
Device describe(int device) {
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

// Makes the device current for torch's allocator and for our (static) CUDA runtime; free if it
// already is.
class OnDevice {
 public:
  explicit OnDevice(int device) {
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

  // Bits of every offset a row can have, in bytes: the lowest one set is what rows are aligned to.
  uint64_t alignment_bits() const {
    uint64_t bits = 0;
    for (int i = 0; i < kMaxRank - 1; ++i)
      if (size[i] > 1) bits |= static_cast<uint64_t>(stride[i]) * 2;
    return bits;
  }
};

Tensor empty_strided(int rank, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                     int device) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(rank, sizes, strides, dtype, cuda, device, &handle));
  return Tensor(handle);
}

// flashsci.ops.empty_like_layout: leading dims ordered in memory as q's strides order them.
Tensor empty_like_layout(const Tensor& q, int64_t columns, int32_t dtype, int device) {
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

void check_offsets(const Tensor& cu_seqlens, const char* name, int device) {
  static const int32_t int32 = aoti_torch_dtype_int32();
  CHECK(cu_seqlens.is_cuda() && cu_seqlens.get_device_index() == device, name,
        " must be on the device of q");
  CHECK(dtype_of(cu_seqlens) == int32, name, " must be int32");
  CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 &&
            (cu_seqlens.stride(0) == 1 || cu_seqlens.size(0) == 1),
        name, " must be a contiguous vector of N + 1 offsets, got ", shape_of(cu_seqlens));
}

int32_t clamp_int32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, -1, std::numeric_limits<int32_t>::max()));
}

std::tuple<Tensor, Tensor> cuda_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const std::optional<Tensor>& cu_seqlens_q,
                                        const std::optional<Tensor>& cu_seqlens_k,
                                        int64_t max_seqlen_q, int64_t /*max_seqlen_k*/,
                                        double scale, double softcap, int64_t window_left,
                                        int64_t window_right, bool lower_right) {
  static const Dtypes dtypes;
  CHECK(q.is_cuda() && k.is_cuda() && v.is_cuda(), "q, k and v must be CUDA tensors");
  const int device = q.get_device_index();
  CHECK(k.get_device_index() == device && v.get_device_index() == device,
        "q, k and v must be on one device, got cuda:", device, ", cuda:", k.get_device_index(),
        " and cuda:", v.get_device_index());
  const int32_t dtype = dtype_of(q);
  CHECK(dtype == dtypes.half || dtype == dtypes.brain, "q, k and v must be float16 or bfloat16");
  CHECK(dtype_of(k) == dtype && dtype_of(v) == dtype, "q, k and v must share one dtype");
  const int64_t rank = q.dim();
  CHECK(rank >= 2 && rank <= kMaxRank && k.dim() == rank && v.dim() == rank,
        "q, k and v must have the same number of dims, 2 to 5, got ", shape_of(q), ", ",
        shape_of(k), " and ", shape_of(v));

  const View q_view(q), k_view(k), v_view(v);
  const auto shapes = [&] { return shape_of(q) + ", " + shape_of(k) + ", " + shape_of(v); };
  const int64_t heads_q = q_view.size[2], heads_k = k_view.size[2];
  const int64_t seq_q = q_view.size[3], seq_k = k_view.size[3];
  const int64_t head_dim = q_view.size[4], head_dim_v = v_view.size[4];
  for (int i = 0; i < 2; ++i)
    CHECK(q_view.size[i] == k_view.size[i] && q_view.size[i] == v_view.size[i],
          "the leading dims of q, k and v differ: ", shapes());
  CHECK(heads_k == v_view.size[2] && seq_k == v_view.size[3],
        "k and v must have the same heads and keys: ", shapes());
  CHECK(k_view.size[4] == head_dim, "q and k must have the same head dim: ", shapes());
  CHECK(head_dim >= 1 && head_dim <= FLASHSCI_MAX_HEAD_DIM && head_dim_v >= 1 &&
            head_dim_v <= FLASHSCI_MAX_HEAD_DIM,
        "head dims must be 1 to 256: ", shapes());
  CHECK(heads_q == 0 || (heads_k > 0 && heads_q % heads_k == 0),
        "the heads of q must be a multiple of those of k: ", shapes());
  CHECK(seq_q <= FLASHSCI_MAX_SEQ && seq_k <= FLASHSCI_MAX_SEQ,
        "sequences are limited to 2^29 rows: ", shapes());
  CHECK(heads_q <= std::numeric_limits<int32_t>::max(), "too many heads: ", shapes());
  for (const View* view : {&q_view, &k_view, &v_view})
    CHECK(view->stride[4] == 1 || view->size[4] == 1,
          "the last dim of q, k and v must be contiguous");
  CHECK(softcap >= 0, "softcap must be >= 0, got ", softcap);
  CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
        "cu_seqlens_q and cu_seqlens_k go together");
  int64_t num_seqs = 0;
  if (cu_seqlens_q.has_value()) {
    CHECK(rank == 3, "packed tensors are [heads, tokens, dim], got ", shapes());
    check_offsets(*cu_seqlens_q, "cu_seqlens_q", device);
    check_offsets(*cu_seqlens_k, "cu_seqlens_k", device);
    num_seqs = cu_seqlens_q->size(0) - 1;
    CHECK(cu_seqlens_k->size(0) - 1 == num_seqs,
          "cu_seqlens_q and cu_seqlens_k must have the same length");
    CHECK(num_seqs <= FLASHSCI_MAX_SEQ, "too many sequences");
  }

  const auto [capability, shared_per_sm] = describe(device);
  int (*launcher)(const FlashsciForwardParams*, FlashsciStream) = nullptr;
  if (capability >= 80) {
#ifdef FLASHSCI_HAVE_SM80_FP16
    if (dtype == dtypes.half) launcher = flashsci_forward_sm80_fp16;
#endif
#ifdef FLASHSCI_HAVE_SM80_BF16
    if (dtype == dtypes.brain) launcher = flashsci_forward_sm80_bf16;
#endif
  }
  int (*hopper)(const FlashsciForwardParams*, FlashsciStream) = nullptr;  // tried first on 9.x
  if (capability / 10 == 9) {
#ifdef FLASHSCI_HAVE_SM90_FP16
    if (dtype == dtypes.half) hopper = flashsci_forward_sm90_fp16;
#endif
#ifdef FLASHSCI_HAVE_SM90_BF16
    if (dtype == dtypes.brain) hopper = flashsci_forward_sm90_bf16;
#endif
  }
  CHECK(launcher != nullptr, "no ", dtype == dtypes.half ? "float16" : "bfloat16",
        " kernel for compute capability ", capability / 10, ".", capability % 10,
        " in this build (", flashsci_build_info(),
        "); the forward kernels need 8.0 or newer: use backend=\"triton\" or \"sdpa\"");
  CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch was built without CUDA");

  const OnDevice on_device(device);
  Tensor out = empty_like_layout(q, head_dim_v, dtype, device);
  int64_t lse_sizes[kMaxRank], lse_strides[kMaxRank], step = 1;
  for (int i = static_cast<int>(rank) - 2; i >= 0; --i) {
    lse_sizes[i] = q.size(i);
    lse_strides[i] = step;
    step *= std::max<int64_t>(lse_sizes[i], 1);
  }
  Tensor lse =
      empty_strided(static_cast<int>(rank) - 1, lse_sizes, lse_strides, dtypes.single, device);
  if (q_view.size[0] * q_view.size[1] * heads_q * seq_q == 0) return {out, lse};

  FlashsciForwardParams p{};
  p.q = q.const_data_ptr();
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.cu_seqlens_q = cu_seqlens_q.has_value()
                       ? static_cast<const int32_t*>(cu_seqlens_q->const_data_ptr())
                       : nullptr;
  p.cu_seqlens_k = cu_seqlens_k.has_value()
                       ? static_cast<const int32_t*>(cu_seqlens_k->const_data_ptr())
                       : nullptr;
  p.q_strides = q_view.strides();
  p.k_strides = k_view.strides();
  p.v_strides = v_view.strides();
  p.out_strides = View(out).strides();
  p.batch0 = q_view.size[0];
  p.batch1 = q_view.size[1];
  p.heads_q = static_cast<int32_t>(heads_q);
  p.heads_k = static_cast<int32_t>(heads_k);
  p.seq_q = static_cast<int32_t>(seq_q);
  p.seq_k = static_cast<int32_t>(seq_k);
  p.num_seqs = static_cast<int32_t>(num_seqs);
  p.max_seqlen_q = clamp_int32(max_seqlen_q);
  p.head_dim = static_cast<int32_t>(head_dim);
  p.head_dim_v = static_cast<int32_t>(head_dim_v);
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.window_left = clamp_int32(window_left);
  p.window_right = clamp_int32(window_right);
  p.lower_right = lower_right;
  const uint64_t bits = reinterpret_cast<uint64_t>(p.q) | reinterpret_cast<uint64_t>(p.k) |
                        reinterpret_cast<uint64_t>(p.v) | q_view.alignment_bits() |
                        k_view.alignment_bits() | v_view.alignment_bits() | 16;
  p.copy_bytes = static_cast<int32_t>(bits & -bits);
  p.device = device;
  p.shared_per_sm = shared_per_sm;

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  auto error = cudaErrorNotSupported;
  if (hopper != nullptr) error = static_cast<cudaError_t>(hopper(&p, stream));
  if (error == cudaErrorNotSupported) error = static_cast<cudaError_t>(launcher(&p, stream));
  CHECK(error == cudaSuccess, "launch failed: ", cudaGetErrorName(error), " (",
        cudaGetErrorString(error), ") for ", shapes(), "; built as ", flashsci_build_info());
  return {std::move(out), std::move(lse)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) { m.impl("cuda_forward", TORCH_BOX(&cuda_forward)); }
