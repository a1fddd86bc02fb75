// flashsci::cuda_paged_attention: checks and launch. Bad input must raise an exception for every
// caller.
#include "../include/flashsci_paged.h"

#include "overlap.h"
#include "rehearse.h"

namespace {

using namespace flashsci::bindings;

// A unit; generation 0 ends a list of them.
template <class Params>
struct Kernels {
  int generation;
  int (*launch)(const Params*, FlashsciStream);
  int64_t (*workspace)(const Params*);
};

#define UNIT(generation, unit) {generation, flashsci_##unit, flashsci_##unit##_workspace}

// The units of a dtype of q, newest generation first.
const Kernels<FlashsciPagedParams>* kernels_of(int32_t dtype) {
  static const Kernels<FlashsciPagedParams> half[] = {
#ifdef FLASHSCI_HAVE_SM90_PAGED_FP16
      UNIT(90, paged_sm90_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_PAGED_FP16
      UNIT(80, paged_sm80_fp16),
#endif
      {}};
  static const Kernels<FlashsciPagedParams> brain[] = {
#ifdef FLASHSCI_HAVE_SM90_PAGED_BF16
      UNIT(90, paged_sm90_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_PAGED_BF16
      UNIT(80, paged_sm80_bf16),
#endif
      {}};
  static const Kernels<FlashsciPagedParams> none[] = {{}};
  return dtype == dtypes().half ? half : dtype == dtypes().brain ? brain : none;
}

// The same for caches of 8-bit floats.
const Kernels<FlashsciPaged8Params>* kernels8_of(int32_t dtype) {
  static const Kernels<FlashsciPaged8Params> half[] = {
#ifdef FLASHSCI_HAVE_SM90_PAGED8_FP16
      UNIT(90, paged8_sm90_fp16),
#endif
#ifdef FLASHSCI_HAVE_SM80_PAGED8_FP16
      UNIT(80, paged8_sm80_fp16),
#endif
      {}};
  static const Kernels<FlashsciPaged8Params> brain[] = {
#ifdef FLASHSCI_HAVE_SM90_PAGED8_BF16
      UNIT(90, paged8_sm90_bf16),
#endif
#ifdef FLASHSCI_HAVE_SM80_PAGED8_BF16
      UNIT(80, paged8_sm80_bf16),
#endif
      {}};
  static const Kernels<FlashsciPaged8Params> none[] = {{}};
  return dtype == dtypes().half ? half : dtype == dtypes().brain ? brain : none;
}

// Launches the newest generation that runs on the device and takes the call. call: that of params,
// whose workspace is still to be allocated. generation: the only one to try, 0 for any.
template <class Params>
int launch(const Kernels<Params>* kernels, const Params& params, FlashsciPagedParams& call,
           int64_t generation) {
  const int capability = describe(call.device).capability;
  for (; kernels->generation != 0; ++kernels) {
    const int unit = kernels->generation;
    if (generation != 0 && generation != unit) continue;
    if (unit == 90 ? capability / 10 != 9 : capability < unit) continue;
    const int64_t bytes[] = {kernels->workspace(&params)};
    Tensor workspace = empty_contiguous(1, bytes, dtypes().byte, call.device);
    call.workspace = workspace.mutable_data_ptr();
    const int error = kernels->launch(&params, current_stream(call.device));
    if (error != cudaErrorNotSupported) return error;
  }
  return cudaErrorNotSupported;
}

void check_tensor(const Tensor& x, const char* name, int device, int32_t dtype, int64_t rank) {
  check_given(x, name);
  FLASHSCI_CHECK(is_on(x, device), name, " must be on the device of q");
  FLASHSCI_CHECK(dtype_of(x) == dtype, name, " has another dtype than these kernels take");
  FLASHSCI_CHECK(x.dim() == rank, name, " must have ", rank, " dims, got ", shape_of(x));
  FLASHSCI_CHECK(x.size(rank - 1) <= 1 || x.stride(rank - 1) == 1, "the last dim of ", name,
                 " must be contiguous");
}

int32_t int32_of(int64_t value, const char* what) {
  FLASHSCI_CHECK(value >= 0 && value <= FLASHSCI_MAX_SEQ, what, " must be 0 to 2^29, got ", value);
  return static_cast<int32_t>(value);
}

// A side of a window, which int32 holds.
int32_t side(int64_t bound) {
  return static_cast<int32_t>(std::clamp<int64_t>(bound, -1, std::numeric_limits<int32_t>::max()));
}

void check_numbers(double scale, double softcap, int64_t window_left, int64_t window_right) {
  FLASHSCI_CHECK(std::isfinite(static_cast<float>(scale)), "scale must be finite, got ", scale);
  FLASHSCI_CHECK(softcap >= 0 && std::isfinite(static_cast<float>(softcap)),
                 "softcap must be >= 0 and finite, got ", softcap);
  FLASHSCI_CHECK(window_left >= -1 && window_right >= -1,
                 "window_left and window_right must be >= 0, or -1 for unbounded, got ",
                 window_left, " and ", window_right);
}

// out shares memory with no tensor that is read (null: absent), nor elements of it with each other.
void check_apart(const Tensor& out,
                 std::initializer_list<std::pair<const char*, const Tensor*>> read) {
  if (rehearsing()) return;  // nothing is written
  FLASHSCI_CHECK(!folds(out), "out is written, and elements of it share memory; give a new tensor");
  for (const auto& [name, x] : read)
    FLASHSCI_CHECK(x == nullptr || !share_memory(out, *x), "out shares memory with ", name,
                   ", which is read while out is written; give out memory of its own, or ", name,
                   ".clone()");
}

Tensor cuda_paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& block_table, const Tensor& seqused_k,
                            const Tensor& cu_seqlens_q, const std::optional<Tensor>& sink,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale, const Tensor& out,
                            int64_t /*max_seqlen_q*/, double scale, double softcap,
                            int64_t window_left, int64_t window_right, bool return_lse,
                            int64_t generation) {
  check_given(q, "q"), check_given(k_cache, "k_cache");
  FLASHSCI_CHECK(rehearsing() || q.is_cuda(), "q must be a CUDA tensor");
  const int device = rehearsing() ? 0 : q.get_device_index();
  const int32_t dtype = dtype_of(q);
  const int32_t cache_dtype = dtype_of(k_cache);
  const bool eight_bits = cache_dtype == dtypes().e4m3 || cache_dtype == dtypes().e5m2;
  FLASHSCI_CHECK(eight_bits || (!k_scale.has_value() && !v_scale.has_value()),
                 "these kernels have no scales for a 16-bit cache");
  check_tensor(q, "q", device, dtype, 3);
  check_tensor(k_cache, "k_cache", device, eight_bits ? cache_dtype : dtype, 4);
  check_tensor(v_cache, "v_cache", device, eight_bits ? cache_dtype : dtype, 4);
  check_tensor(out, "out", device, dtype, 3);
  check_tensor(block_table, "block_table", device, dtypes().int32, 2);
  check_tensor(seqused_k, "seqused_k", device, dtypes().int32, 1);
  check_tensor(cu_seqlens_q, "cu_seqlens_q", device, dtypes().int32, 1);
  FLASHSCI_CHECK(is_contiguous(block_table), "block_table must be contiguous");
  const std::string shapes = shape_of(q) + ", " + shape_of(k_cache) + ", " + shape_of(v_cache);
  for (int i = 0; i < 3; ++i)
    FLASHSCI_CHECK(k_cache.size(i) == v_cache.size(i) && k_cache.size(i) > 0,
                   "the caches must have the same pages, rows and heads, at least one: ", shapes);
  FLASHSCI_CHECK(q.size(2) == k_cache.size(3),
                 "q and k_cache must have the same head dim: ", shapes);
  FLASHSCI_CHECK(q.size(1) % k_cache.size(2) == 0,
                 "the heads of q must be a multiple of those of the caches: ", shapes);
  FLASHSCI_CHECK(q.size(2) >= 1 && v_cache.size(3) >= 1, "head dims must be at least 1: ", shapes);
  FLASHSCI_CHECK(
      out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) == v_cache.size(3),
      "out must be [T, Hq, Dv], got ", shape_of(out), " for ", shapes);
  const int64_t sequences = block_table.size(0);
  FLASHSCI_CHECK(
      block_table.size(1) > 0 && seqused_k.size(0) == sequences &&
          cu_seqlens_q.size(0) == sequences + 1,
      "block_table, seqused_k and cu_seqlens_q must be [N, pages], [N] and [N + 1], got ",
      shape_of(block_table), ", ", shape_of(seqused_k), ", ", shape_of(cu_seqlens_q));
  check_numbers(scale, softcap, window_left, window_right);
  if (sink.has_value()) {
    check_tensor(*sink, "sink", device, dtypes().single, 1);
    FLASHSCI_CHECK(sink->size(0) == q.size(1), "sink must have a logit for each head of q");
  }
  for (const auto& [name, scale] : {std::pair{"k_scale", &k_scale}, {"v_scale", &v_scale}})
    if (scale->has_value())
      FLASHSCI_CHECK(is_on(**scale, device) && dtype_of(**scale) == dtypes().single &&
                         (*scale)->dim() == 2 && (*scale)->size(0) == sequences &&
                         (*scale)->size(1) == k_cache.size(2),
                     name, " must be float32 [N, Hk] on the device of q, got ", shape_of(**scale));

  check_apart(out, {{"q", &q},
                    {"k_cache", &k_cache},
                    {"v_cache", &v_cache},
                    {"block_table", &block_table},
                    {"seqused_k", &seqused_k},
                    {"cu_seqlens_q", &cu_seqlens_q},
                    {"sink", sink.has_value() ? &*sink : nullptr},
                    {"k_scale", k_scale.has_value() ? &*k_scale : nullptr},
                    {"v_scale", v_scale.has_value() ? &*v_scale : nullptr}});

  const OnDevice on_device(device);
  const int64_t lse_shape[] = {return_lse ? q.size(1) : 0, q.size(0)};
  Tensor lse = empty_contiguous(return_lse ? 2 : 1, lse_shape, dtypes().single, device);
  if (q.size(0) == 0 || q.size(1) == 0) return lse;
  FlashsciPaged8Params params{};
  FlashsciPagedParams& p = params.call;
  p.q = address_of(q);
  p.k_cache = address_of(k_cache);
  p.v_cache = address_of(v_cache);
  p.out = out.mutable_data_ptr();
  p.lse = return_lse ? static_cast<float*>(lse.mutable_data_ptr()) : nullptr;
  p.block_table = static_cast<const int32_t*>(address_of(block_table));
  p.seqused_k = static_cast<const int32_t*>(address_of(seqused_k));
  p.cu_seqlens_q = static_cast<const int32_t*>(address_of(cu_seqlens_q));
  p.sink = sink.has_value() ? static_cast<const float*>(address_of(*sink)) : nullptr;
  p.q_row = q.stride(0), p.q_head = q.stride(1);
  p.out_row = out.stride(0), p.out_head = out.stride(1);
  p.k_page = k_cache.stride(0), p.k_row = k_cache.stride(1), p.k_head = k_cache.stride(2);
  p.v_page = v_cache.stride(0), p.v_row = v_cache.stride(1), p.v_head = v_cache.stride(2);
  p.tokens = int32_of(q.size(0), "tokens"), p.sequences = int32_of(sequences, "sequences");
  p.heads_q = int32_of(q.size(1), "heads"), p.heads_k = int32_of(k_cache.size(2), "heads");
  p.pages = int32_of(k_cache.size(0), "pages");
  p.page = int32_of(k_cache.size(1), "rows of a page");
  p.columns = int32_of(block_table.size(1), "pages of a sequence");
  p.head_dim = int32_of(q.size(2), "head dims");
  p.head_dim_v = int32_of(v_cache.size(3), "head dims");
  p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
  p.window_left = side(window_left), p.window_right = side(window_right);
  p.device = device;
  int error;
  if (eight_bits) {
    if (k_scale.has_value()) {
      params.k_scale = static_cast<const float*>(address_of(*k_scale));
      params.k_scale_sequence = k_scale->stride(0), params.k_scale_head = k_scale->stride(1);
    }
    if (v_scale.has_value()) {
      params.v_scale = static_cast<const float*>(address_of(*v_scale));
      params.v_scale_sequence = v_scale->stride(0), params.v_scale_head = v_scale->stride(1);
    }
    params.e5m2 = cache_dtype == dtypes().e5m2;
    error = launch(kernels8_of(dtype), params, p, generation);
  } else {
    error = launch(kernels_of(dtype), p, p, generation);
  }
  FLASHSCI_CHECK(
      error != cudaErrorNotSupported, "paged_attention: no kernel serves this call (", shapes,
      ") in this build (", flashsci_build_info(),
      "); they are for compute capability 8.0 and newer, queries in float16 and bfloat16, caches "
      "in their "
      "dtype or in 8-bit floats, head dims that are multiples of 8 up to 256, pages of multiples "
      "of 16 rows, and tensors whose addresses and strides are multiples of 16 bytes; use "
      "backend=\"triton\"");
  check_cuda(static_cast<cudaError_t>(error), "paged_attention: launch failed");
  return lse;
}

// The kernels that the op above would launch, as `rehearse` names them.
std::string cuda_paged_attention_kernels(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& seqused_k, const Tensor& cu_seqlens_q, const std::optional<Tensor>& sink,
    const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, const Tensor& out,
    int64_t max_seqlen_q, double scale, double softcap, int64_t window_left, int64_t window_right,
    bool return_lse, int64_t generation, int64_t capability, int64_t processors,
    int64_t shared_per_sm, int64_t shared_per_block) {
  return rehearse(capability, processors, shared_per_sm, shared_per_block, [&] {
    cuda_paged_attention(q, k_cache, v_cache, block_table, seqused_k, cu_seqlens_q, sink, k_scale,
                         v_scale, out, max_seqlen_q, scale, softcap, window_left, window_right,
                         return_lse, generation);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flashsci, CUDA, m) {
  m.impl("cuda_paged_attention", TORCH_BOX(&cuda_paged_attention));
}

STABLE_TORCH_LIBRARY_IMPL(flashsci, CompositeExplicitAutograd, m) {
  m.impl("cuda_paged_attention_kernels", TORCH_BOX(&cuda_paged_attention_kernels));
}
