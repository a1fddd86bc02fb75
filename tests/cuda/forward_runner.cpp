// Standalone check of the forward launchers, without Python or torch: for compute-sanitizer and
// profilers. Every generation and dtype that is linked in and runs on the device takes every case.
//
//   tools/kernels/build_manual.sh   builds build/manual/forward_runner beside the library
//   compute-sanitizer --tool memcheck|initcheck|synccheck|racecheck build/manual/forward_runner
//
// Every case is drawn from a fixed seed, placed in buffers of exactly the size it needs (so that
// memcheck sees one byte too far), and compared with a naive fp64 loop. Exit code: the number of
// failed cases.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "runner.h"

namespace {

// A bias or mask of shape [B, H, Sq, Sk] with size 1 along what it is broadcast over.
struct Pair {
  bool given = false;
  bool batch = false, head = false, row = false, column = false;  // has these dims
  bool transposed = false;                                        // columns before rows in memory
  bool fp32 = false;
};

struct Case {
  const char* name;
  int batch, heads_q, heads_k, seq_q, seq_k, dim, dim_v;
  int left = -1, right = -1;
  bool lower_right = false;
  float softcap = 0.f, scale = 0.f;  // 0: 1 / sqrt(dim)
  bool heads_inside = false;         // [B, S, H, D] in memory
  std::vector<int> lens_q, lens_k;   // packed
  Pair bias = {}, mask = {};
  float hidden = 0.f;   // the bias of the last third of the keys: a mask as a number
  bool padded = false;  // rows of zeros
};

FlashsciScoreStrides pair_strides(const Case& c, const Pair& pair) {
  const int64_t rows = pair.row ? c.seq_q : 1, columns = pair.column ? c.seq_k : 1;
  const int64_t plane = rows * columns;
  return {pair.batch ? plane * (pair.head ? c.heads_q : 1) : 0, 0, pair.head ? plane : 0,
          !pair.row         ? 0
          : pair.transposed ? 1
                            : columns,
          !pair.column      ? 0
          : pair.transposed ? rows
                            : 1};
}

int64_t pair_size(const Case& c, const Pair& pair) {
  return !pair.given ? 0
                     : int64_t{pair.batch ? c.batch : 1} * (pair.head ? c.heads_q : 1) *
                           (pair.row ? c.seq_q : 1) * (pair.column ? c.seq_k : 1);
}

using Launcher = int (*)(const FlashsciForwardParams*, FlashsciStream);
using Sizer = int64_t (*)(const FlashsciForwardParams*);

struct Unit {
  const char* name;
  int capability;  // the least that runs it; sm90 needs exactly 9.x
  Precision precision;
  Launcher launch;
  Sizer workspace = nullptr;
};

const Unit kUnits[] = {
#ifdef FLASHSCI_HAVE_SM75_FWD_FP16
    {"sm75", 75, kFp16, flashsci_forward_sm75_fp16},
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_FP16
    {"sm80", 80, kFp16, flashsci_forward_sm80_fp16},
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_BF16
    {"sm80", 80, kBf16, flashsci_forward_sm80_bf16},
#endif
#ifdef FLASHSCI_HAVE_SM80_FWD_FP32
    {"sm80", 80, kFp32, flashsci_forward_sm80_fp32},
#endif
#ifdef FLASHSCI_HAVE_SM90_FWD_FP16
    {"sm90", 90, kFp16, flashsci_forward_sm90_fp16},
    {"sm90 with workspace", 90, kFp16, flashsci_forward_sm90_fp16,
     flashsci_forward_sm90_fp16_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM90_FWD_BF16
    {"sm90", 90, kBf16, flashsci_forward_sm90_bf16},
    {"sm90 with workspace", 90, kBf16, flashsci_forward_sm90_bf16,
     flashsci_forward_sm90_bf16_workspace},
#endif
};

bool run(const Unit& unit, const Case& c) {
  const Precision& t = unit.precision;
  const auto rounded = [&](float x) { return t.bytes == 4 ? x : t.decode(t.encode(x)); };
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&](int heads, int seq, int dim) {
    Numbers x(int64_t{c.batch} * heads * seq * dim);
    for (auto& e : x) e = rounded(normal(random));
    const FlashsciStrides s = layout(heads, seq, dim, c.heads_inside);
    for (int i = 0; i < c.batch * heads * seq; ++i) {
      const int row = i % seq, head = i / seq % heads, batch = i / seq / heads;
      if (c.padded && is_padding(row, seq)) std::fill_n(&x[at(s, batch, head, row)], dim, 0.f);
    }
    return x;
  };
  const Numbers q = draw(c.heads_q, c.seq_q, c.dim), k = draw(c.heads_k, c.seq_k, c.dim),
                v = draw(c.heads_k, c.seq_k, c.dim_v);
  const FlashsciStrides lq = layout(c.heads_q, c.seq_q, c.dim, c.heads_inside),
                        lk = layout(c.heads_k, c.seq_k, c.dim, c.heads_inside),
                        lv = layout(c.heads_k, c.seq_k, c.dim_v, c.heads_inside),
                        lo = layout(c.heads_q, c.seq_q, c.dim_v, c.heads_inside);
  const size_t rows = size_t{1} * c.batch * c.heads_q * c.seq_q;
  std::vector<int32_t> cu_q{0}, cu_k{0};
  for (int n : c.lens_q) cu_q.push_back(cu_q.back() + n);
  for (int n : c.lens_k) cu_k.push_back(cu_k.back() + n);

  // A tenth of the bias is -inf, a quarter of the mask hidden.
  std::uniform_real_distribution<float> uniform;
  std::vector<float> bias(pair_size(c, c.bias));
  for (auto& e : bias) {
    e = normal(random);
    if (!c.bias.fp32) e = rounded(e);
    if (uniform(random) < 0.1f) e = -INFINITY;
  }
  if (c.hidden != 0.f)
    for (size_t i = 0; i < bias.size(); ++i)
      if (static_cast<int>(i % c.seq_k) >= c.seq_k - c.seq_k / 3)
        bias[i] = c.bias.fp32 ? c.hidden : rounded(number_for(c.hidden, t.encode == float_to_fp16));
  std::vector<uint8_t> mask(pair_size(c, c.mask));
  for (auto& e : mask) e = uniform(random) < 0.75f;

  FlashsciForwardParams p{};
  Device device;
  if (c.bias.given) {
    p.bias_mask.bias = device.numbers(bias, c.bias.fp32 ? kFp32 : t);
    p.bias_mask.bias_is_fp32 = c.bias.fp32 || t.bytes == 4;
    p.bias_mask.bias_strides = pair_strides(c, c.bias);
  }
  if (c.mask.given) {
    p.bias_mask.mask = device.put(mask);
    p.bias_mask.mask_strides = pair_strides(c, c.mask);
  }
  p.q = device.numbers(q, t), p.k = device.numbers(k, t), p.v = device.numbers(v, t);
  p.out = device.poison(rows * c.dim_v * t.bytes);
  p.lse = static_cast<float*>(device.poison(rows * 4));
  const bool packed = !c.lens_q.empty();
  p.cu_seqlens_q = packed ? device.put(cu_q) : nullptr;
  p.cu_seqlens_k = packed ? device.put(cu_k) : nullptr;
  p.q_strides = lq, p.k_strides = lk, p.v_strides = lv, p.out_strides = lo;
  p.batch0 = c.batch, p.batch1 = 1;
  p.heads_q = c.heads_q, p.heads_k = c.heads_k, p.seq_q = c.seq_q, p.seq_k = c.seq_k;
  p.num_seqs = static_cast<int>(c.lens_q.size()), p.max_seqlen_q = -1;
  p.head_dim = c.dim, p.head_dim_v = c.dim_v;
  p.scale = c.scale != 0.f ? c.scale : 1.f / std::sqrt(static_cast<float>(c.dim));
  p.softcap = c.softcap, p.window_left = c.left, p.window_right = c.right;
  p.lower_right = c.lower_right;
  uint64_t bits = 16;
  for (const FlashsciStrides* l : {&lq, &lk, &lv})
    bits |= t.bytes * static_cast<uint64_t>(l->batch0 | l->head | l->row);
  p.copy_bytes = static_cast<int32_t>(bits & -bits);
  CUDA(cudaDeviceGetAttribute(&p.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));

  if (unit.workspace != nullptr && unit.workspace(&p) > 0)
    p.workspace = device.poison(unit.workspace(&p));

  const int status = unit.launch(&p, nullptr);
  if (status == cudaErrorNotSupported) {
    std::printf("%s %-4s %-28s not served\n", unit.name, t.name, c.name);
    return true;
  }
  CUDA(static_cast<cudaError_t>(status));
  CUDA(cudaDeviceSynchronize());
  const Numbers out = from_device(p.out, rows * c.dim_v, t), lse = from_device(p.lse, rows, kFp32);

  // Naive fp64.
  double worst = 0, worst_lse = 0;
  bool same_infinities = true;
  std::vector<double> scores, sum(c.dim_v), magnitude(c.dim_v);
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.heads_q; ++h) {
      for (int row = 0; row < c.seq_q; ++row) {
        int first_q = 0, len_q = c.seq_q, first_k = 0, len_k = c.seq_k;
        if (packed) {
          const auto n =
              static_cast<size_t>(std::upper_bound(cu_q.begin(), cu_q.end(), row) - cu_q.begin());
          const bool owned = n <= c.lens_q.size();
          first_q = owned ? cu_q[n - 1] : 0, len_q = owned ? c.lens_q[n - 1] : 0;
          first_k = owned ? cu_k[n - 1] : 0, len_k = owned ? c.lens_k[n - 1] : 0;
        }
        const int i = row - first_q, shift = c.lower_right ? len_k - len_q : 0;
        const int kv_head = h / (c.heads_q / c.heads_k);
        scores.assign(len_k, -INFINITY);
        double largest = -INFINITY;
        for (int j = 0; j < len_k; ++j) {
          const int distance = j - i - shift;
          if ((c.left >= 0 && distance < -c.left) || (c.right >= 0 && distance > c.right)) continue;
          double s = 0;
          for (int d = 0; d < c.dim; ++d)
            s += static_cast<double>(q[at(lq, b, h, row) + d]) *
                 k[at(lk, b, kv_head, first_k + j) + d];
          s *= p.scale;
          if (c.softcap != 0.f) s = c.softcap * std::tanh(s / c.softcap);
          if (c.bias.given) s += bias[at(p.bias_mask.bias_strides, b, h, i, j)];
          if (c.mask.given && mask[at(p.bias_mask.mask_strides, b, h, i, j)] == 0) continue;
          scores[j] = s;
          largest = std::max(largest, s);
        }
        double denominator = 0;
        std::fill(sum.begin(), sum.end(), 0.0);
        std::fill(magnitude.begin(), magnitude.end(), 0.0);
        for (int j = 0; j < len_k; ++j) {
          if (scores[j] == -INFINITY) continue;
          const double weight = std::exp(scores[j] - largest);
          denominator += weight;
          for (int d = 0; d < c.dim_v; ++d) {
            const double x = weight * v[at(lv, b, kv_head, first_k + j) + d];
            sum[d] += x;
            magnitude[d] += std::fabs(x);
          }
        }
        for (int d = 0; d < c.dim_v; ++d) {
          const double want = denominator > 0 ? sum[d] / denominator : 0;
          const double got = out[at(lo, b, h, row) + d];
          const double scale = denominator > 0 ? magnitude[d] / denominator + 1e-3 : 1e-30;
          const double error = std::fabs(got - want) / (scale * t.eps);
          worst = error <= worst ? worst : error;  // NaN counts as worse
          if (std::isnan(error)) worst = INFINITY;
        }
        const float got_lse = lse[(int64_t{b} * c.heads_q + h) * c.seq_q + row];
        if (denominator > 0)
          worst_lse =
              std::max(worst_lse, std::isfinite(got_lse)
                                      ? std::fabs(got_lse - (largest + std::log(denominator)))
                                      : INFINITY);
        else
          same_infinities &= got_lse == -INFINITY;
      }
    }
  }
  const bool ok = worst <= 2 && worst_lse <= 2e-3 && same_infinities;
  std::printf("%s %-4s %-28s out %.3f eps, lse %.1e  %s\n", unit.name, t.name, c.name, worst,
              worst_lse, ok ? "ok" : "FAILED");
  return ok;
}

// A bias of every dtype, alignment, layout and broadcast, masks of pairs and of keys, shared by
// members or not, odd sizes.
std::vector<Case> pair_cases() {
  const Pair full = {true, true, true, true, true},
             full32 = {true, true, true, true, true, false, true};
  const Pair shared = {true, false, true, true, true},
             shared32 = {true, false, true, true, true, false, true};
  const Pair columns = {true, true, true, true, true, true, true},
             keys = {true, true, false, false, true};
  const Pair queries = {true, true, false, true, false}, none = {};
  const auto make = [](const char* name, int batch, int heads_q, int heads_k, int seq_q, int seq_k,
                       int dim, int dim_v, const Pair& bias, const Pair& mask) {
    Case c{name, batch, heads_q, heads_k, seq_q, seq_k, dim, dim_v};
    c.bias = bias, c.mask = mask;
    return c;
  };
  std::vector<Case> cases = {
      make("bias d64", 2, 2, 2, 150, 200, 64, 64, full, none),
      make("fp32 bias d64", 2, 2, 1, 150, 200, 64, 64, full32, none),
      make("shared bias, key mask d32", 3, 2, 2, 140, 100, 32, 32, shared32, keys),
      make("shared bias d32", 5, 2, 1, 70, 132, 24, 32, shared, none),
      make("bias of all heads d48", 2, 3, 3, 64, 96, 48, 48, {true, true, false, true, true}, none),
      make("bias of all heads, one key head", 1, 5, 1, 40, 64, 16, 16,
           {true, true, false, true, true, false, true}, {true, false, false, true, true}),
      make("odd keys, bias, mask", 2, 2, 2, 65, 77, 64, 64, full, full),
      make("odd keys, fp32 bias, key mask", 2, 1, 1, 33, 33, 20, 20, full32, keys),
      make("transposed bias, transposed mask", 1, 2, 2, 50, 70, 32, 32, columns, columns),
      make("bias of keys, mask of queries", 2, 2, 2, 90, 90, 128, 128, keys, queries),
      make("bias of queries", 2, 2, 2, 90, 64, 96, 96, queries, none),
      make("mask alone", 2, 2, 2, 100, 130, 64, 64, none, full),
      make("mask of keys alone", 2, 2, 2, 100, 128, 64, 64, none, keys),
      make("mask of all", 2, 1, 1, 100, 128, 64, 64, none, {true}),
      make("bias d192 v128", 1, 2, 1, 65, 129, 192, 128, full32, none),
      make("bias d256", 1, 2, 2, 70, 64, 256, 256, shared, keys),
      make("bias d7", 2, 2, 2, 33, 40, 7, 9, shared32, none),
      make("bias, one row, one key", 3, 2, 2, 1, 1, 64, 64, full, full),
      make("bias, no keys", 1, 2, 2, 40, 0, 64, 64, full, keys),
  };
  cases.push_back(make("bias causal", 2, 2, 2, 257, 257, 64, 64, full, none));
  cases.back().right = 0;
  cases.push_back(make("shared bias, window", 3, 2, 2, 200, 180, 32, 32, shared, keys));
  cases.back().left = 40, cases.back().right = 7;
  cases.push_back(make("bias softcap", 3, 2, 2, 70, 70, 32, 32, shared32, full));
  cases.back().softcap = 5.f;
  cases.push_back(make("bias negative scale", 2, 2, 2, 70, 70, 64, 64, full, none));
  cases.back().scale = -0.3f, cases.back().heads_inside = true;
  // Masks as numbers: what models add to the keys of padding.
  for (const float number : {-1e4f, -1e9f, -1e30f, -3.3895e38f}) {
    for (const int dim : {32, 64, 128, 256}) {
      cases.push_back(make("numbers as mask", 2, 2, 2, 70, 144, dim, dim, full, none));
      cases.back().hidden = number;
      cases.push_back(make("numbers as mask, fp32", 2, 2, 2, 70, 144, dim, dim, shared32, none));
      cases.back().hidden = number, cases.back().padded = true;
    }
  }
  return cases;
}

}  // namespace

// Arguments: words that are in the names of the generations or cases to run; none: all.
int main(int count, char** words) {
  std::vector<Case> cases = {
      {"d64", 2, 4, 2, 150, 200, 64, 64},
      {"d64 causal", 1, 2, 2, 257, 257, 64, 64, -1, 0},
      {"d128 causal lower right", 1, 2, 1, 100, 300, 128, 128, -1, 0, true},
      {"d128 window", 1, 2, 2, 300, 260, 128, 128, 40, 7},
      {"d256", 1, 2, 2, 90, 130, 256, 256},
      {"d192 v128", 1, 2, 1, 65, 129, 192, 128},
      {"d32 softcap", 1, 2, 2, 64, 64, 32, 32, -1, -1, false, 15.f},
      {"d96 heads inside", 2, 3, 3, 70, 70, 96, 96, -1, -1, false, 0.f, 0.f, true},
      {"d96 causal, many tiles", 1, 70, 10, 200, 200, 96, 88, -1, 0},
      {"d192 window", 1, 2, 1, 300, 260, 192, 160, 40, 7},
      {"d192 v128 causal, many tiles", 1, 70, 10, 140, 150, 192, 128, -1, 0},
      {"d192 v128 softcap", 1, 2, 1, 140, 300, 160, 120, -1, -1, false, 15.f},
      {"d256 softcap, window", 1, 2, 1, 300, 260, 256, 256, 40, 7, false, 15.f},
      {"d7", 1, 3, 1, 33, 77, 7, 7},
      {"d37 v53 causal", 1, 2, 2, 140, 139, 37, 53, -1, 0},
      {"d20", 1, 2, 2, 50, 50, 20, 20},
      {"d50 negative scale", 1, 2, 2, 50, 50, 50, 50, -1, -1, false, 0.f, -0.2f},
      {"d255 v1", 1, 1, 1, 17, 40, 255, 1},
      {"one row, one key", 3, 2, 2, 1, 1, 64, 64},
      {"no keys", 1, 2, 2, 40, 0, 64, 64},
      {"rows without keys", 1, 1, 1, 200, 30, 64, 64, 5, 5},
      {"decoding", 3, 8, 2, 1, 700, 128, 128},
      {"decoding, 3 rows, window", 2, 4, 4, 3, 520, 64, 64, 300, 0, true},
      {"decoding d256 v200", 2, 4, 1, 2, 400, 256, 200, -1, 0, true},
      {"d8 causal, many tiles", 1, 45, 5, 400, 2100, 8, 8, -1, 0},
      {"packed",
       1,
       4,
       2,
       300,
       310,
       64,
       64,
       -1,
       -1,
       false,
       0.f,
       0.f,
       true,
       {100, 0, 1, 130, 60},
       {90, 10, 0, 150, 60}},
      {"packed causal, rest unowned",
       1,
       2,
       2,
       300,
       300,
       128,
       128,
       -1,
       0,
       true,
       0.f,
       0.f,
       true,
       {10, 64, 1, 128, 7},
       {30, 64, 2, 100, 9}},
      {"packed d33", 1, 2, 1, 64, 64, 33, 33, -1, -1, false, 0.f, 0.f, true, {40, 24}, {24, 40}},
  };
  const auto packed = std::find_if(
      cases.begin(), cases.end(), [](const Case& c) { return std::strcmp(c.name, "packed") == 0; });
  for (auto [dim, dim_v] : {std::pair{96, 96}, {192, 192}, {192, 128}, {256, 256}}) {
    Case c = *packed;
    c.dim = dim, c.dim_v = dim_v;
    cases.push_back(c);
  }
  // Rows of zeros; short tiles one after the other, of every number of boxes of values; empty
  // tiles first (of causal rows that end with the keys) and last (of a window), beside full ones.
  for (auto [dim, dim_v] : {std::pair{64, 64},
                            {96, 96},
                            {128, 128},
                            {192, 128},
                            {160, 136},
                            {160, 160},
                            {192, 192},
                            {256, 256}}) {
    Case c{"rows of zeros", 2, 2, 1, 140, 150, dim, dim_v};
    c.padded = true;
    cases.push_back(c);
    cases.push_back({"short tiles", 1, 80, 20, 210, 24, dim, dim_v});
    cases.push_back({"empty tiles first", 1, 70, 70, 420, 40, dim, dim_v, -1, 0, true});
    cases.push_back({"empty tiles last", 1, 70, 35, 420, 40, dim, dim_v, 9, 9});
    Case p = *std::find_if(cases.begin(), cases.end(),
                           [](const Case& x) { return std::strcmp(x.name, "packed") == 0; });
    p.name = "packed, empty first and last", p.dim = dim, p.dim_v = dim_v, p.right = 0;
    p.heads_q = p.heads_k = 40, p.seq_q = 170, p.seq_k = 119;
    p.lens_q = {0, 0, 70, 1, 0, 99, 0}, p.lens_k = {0, 9, 40, 1, 7, 62, 0};
    cases.push_back(p);
  }
  for (Case& c : pair_cases()) cases.push_back(std::move(c));
  int major = 0, minor = 0, failed = 0, run_cases = 0;
  CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  for (const Unit& unit : kUnits) {
    const bool exact = unit.capability == 90;
    if (exact ? major != 9 : 10 * major + minor < unit.capability) continue;
    for (const Case& c : cases) {
      if (!asked(count, words, unit.name, c.name)) continue;
      failed += !run(unit, c);
      ++run_cases;
    }
  }
  std::printf("%d cases, %d failed\n", run_cases, failed);
  return failed;
}
