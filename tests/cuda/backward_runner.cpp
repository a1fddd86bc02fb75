// Standalone check of the backward launchers, without Python or torch: for compute-sanitizer and
// profilers. Every generation and dtype that is linked in and runs on the device takes every case.
//
//   compute-sanitizer --tool memcheck|initcheck|synccheck|racecheck build/manual/backward_runner
//
// Every case is drawn from a fixed seed and placed in buffers of exactly the size it needs (so that
// memcheck sees one byte too far); workspace and gradients start as NaN. out and lse come from a
// naive fp64 loop, the gradients are compared with another. Exit code: the number of failed cases.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "runner.h"

extern "C" {
FLASHSCI_DECLARE_BACKWARD(sm90_fp16)
FLASHSCI_DECLARE_BACKWARD(sm90_bf16)
}

namespace {

struct Case {
  const char* name;
  int batch, heads_q, heads_k, seq_q, seq_k, dim, dim_v;
  int left = -1, right = -1;
  bool lower_right = false;
  float softcap = 0.f, scale = 0.f;           // 0: 1 / sqrt(dim)
  std::vector<int> lens_q = {}, lens_k = {};  // packed
  std::vector<int> bias = {}, mask = {};      // shape [B, Hq, Sq, Sk], 1 = broadcast
  bool bias_fp32 = false, dlse = false, no_dout = false;
  bool heads_inside = false;  // [B, S, H, D] in memory
  float hidden = 0.f;         // the bias of the last third of the keys: a mask as a number
  bool padded = false;        // rows of zeros
  float dout_size = 1.f;      // of dout in fp32: that of a mean loss is small
};

enum { kNeedQ = 1, kNeedK = 2, kNeedV = 4, kNeedBias = 8 };

// Contiguous strides of shape [B, Hq, Sq, Sk] with 0 where a size is 1.
FlashsciScoreStrides pair_layout(const std::vector<int>& shape) {
  int64_t stride[4], step = 1;
  for (int i = 3; i >= 0; --i) {
    stride[i] = shape[i] == 1 ? 0 : step;
    step *= shape[i];
  }
  return {stride[0], 0, stride[1], stride[2], stride[3]};
}

size_t size_of(const std::vector<int>& shape) {
  size_t size = shape.empty() ? 0 : 1;
  for (int n : shape) size *= n;
  return size;
}

using Launcher = int (*)(const FlashsciBackwardParams*, FlashsciStream);
using Sizer = int64_t (*)(const FlashsciBackwardParams*);

struct Unit {
  const char* name;
  int capability, max_dim;
  Precision precision;
  Launcher launch;
  Sizer workspace;
};

const Unit kUnits[] = {
#ifdef FLASHSCI_HAVE_SM80_BWD_FP16
    {"sm80", 80, 256, kFp16, flashsci_backward_sm80_fp16, flashsci_backward_sm80_fp16_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM80_BWD_BF16
    {"sm80", 80, 256, kBf16, flashsci_backward_sm80_bf16, flashsci_backward_sm80_bf16_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM80_BWD_FP32
    {"sm80", 80, 256, kFp32, flashsci_backward_sm80_fp32, flashsci_backward_sm80_fp32_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM90_BWD_FP16
    {"sm90", 90, 256, kFp16, flashsci_backward_sm90_fp16, flashsci_backward_sm90_fp16_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM90_BWD_BF16
    {"sm90", 90, 256, kBf16, flashsci_backward_sm90_bf16, flashsci_backward_sm90_bf16_workspace},
#endif
#ifdef FLASHSCI_HAVE_SM75_BWD_FP16
    {"sm75", 75, 128, kFp16, flashsci_backward_sm75_fp16, flashsci_backward_sm75_fp16_workspace},
#endif
};

struct Problem {
  Case c;
  Numbers q, k, v, dout, dlse, bias;
  std::vector<uint8_t> mask;
  FlashsciStrides sq, sk, sv, so;
  FlashsciScoreStrides sb, sm;
  std::vector<int32_t> cu_q{0}, cu_k{0};
  float scale;

  // What the reference computes: results and, for the bounds, their formulas on absolute values.
  Numbers out, lse;
  std::vector<double> dq, dk, dv, dbias, size_q, size_k, size_v, size_bias;
  double floor = 1e-3;  // of the sizes of gradients
};

// Keys of one row: first key, count, row within the sequence and its length.
struct Span {
  int first_k, keys, row, rows;
};

Span span_of(const Problem& x, int row) {
  const Case& c = x.c;
  if (c.lens_q.empty()) return {0, c.seq_k, row, c.seq_q};
  const auto n =
      static_cast<size_t>(std::upper_bound(x.cu_q.begin(), x.cu_q.end(), row) - x.cu_q.begin());
  if (n > c.lens_q.size()) return {0, 0, 0, 0};
  return {x.cu_k[n - 1], c.lens_k[n - 1], row - x.cu_q[n - 1], c.lens_q[n - 1]};
}

void solve(Problem& x) {
  const Case& c = x.c;
  const int group = c.heads_q / c.heads_k;
  x.dq.assign(x.q.size(), 0), x.dk.assign(x.k.size(), 0), x.dv.assign(x.v.size(), 0);
  x.dbias.assign(x.bias.size(), 0);
  x.size_q = x.dq, x.size_k = x.dk, x.size_v = x.dv, x.size_bias = x.dbias;
  std::vector<double> s, p, slope;
  for (int b = 0; b < c.batch; ++b)
    for (int h = 0; h < c.heads_q; ++h)
      for (int row = 0; row < c.seq_q; ++row) {
        const Span span = span_of(x, row);
        const int shift = c.lower_right ? span.keys - span.rows : 0, hk = h / group;
        const float* q = &x.q[at(x.sq, b, h, row)];
        s.assign(span.keys, -INFINITY), p.assign(span.keys, 0), slope.assign(span.keys, 1);
        double largest = -INFINITY;
        for (int j = 0; j < span.keys; ++j) {
          const int distance = j - span.row - shift;
          if ((c.left >= 0 && distance < -c.left) || (c.right >= 0 && distance > c.right)) continue;
          if (!x.mask.empty() && !x.mask[at(x.sm, b, h, row, j)]) continue;
          const float* k = &x.k[at(x.sk, b, hk, span.first_k + j)];
          double value = 0;
          for (int d = 0; d < c.dim; ++d) value += static_cast<double>(q[d]) * k[d];
          value *= x.scale;
          if (c.softcap != 0.f) {
            const double t = std::tanh(value / c.softcap);
            value = c.softcap * t, slope[j] = 1 - t * t;
          }
          if (!x.bias.empty()) value += x.bias[at(x.sb, b, h, row, j)];
          s[j] = value;
          largest = std::max(largest, value);
        }
        double total = 0;
        for (int j = 0; j < span.keys; ++j)
          if (s[j] != -INFINITY) total += p[j] = std::exp(s[j] - largest);
        const int64_t lse_at = (int64_t{b} * c.heads_q + h) * c.seq_q + row;
        x.lse[lse_at] = total > 0 ? static_cast<float>(largest + std::log(total)) : -INFINITY;
        float* out = &x.out[at(x.so, b, h, row)];
        if (total == 0) continue;
        const float* dout = c.no_dout ? nullptr : &x.dout[at(x.so, b, h, row)];
        std::vector<double> o(c.dim_v, 0);
        for (int j = 0; j < span.keys; ++j)
          for (int d = 0; d < c.dim_v && p[j] > 0; ++d)
            o[d] += p[j] / total * x.v[at(x.sv, b, hk, span.first_k + j) + d];
        double delta = x.dlse.empty() ? 0 : -x.dlse[lse_at], delta_size = std::fabs(delta);
        for (int d = 0; d < c.dim_v; ++d) {
          out[d] = static_cast<float>(o[d]);
          if (dout == nullptr) continue;
          delta += o[d] * dout[d], delta_size += std::fabs(o[d] * dout[d]);
        }
        for (int j = 0; j < span.keys; ++j) {
          if (p[j] == 0) continue;
          p[j] /= total;
          const int64_t key = at(x.sk, b, hk, span.first_k + j);
          const int64_t value = at(x.sv, b, hk, span.first_k + j);
          double dp = 0, dp_size = 0;
          for (int d = 0; d < c.dim_v && dout != nullptr; ++d) {
            const double product = static_cast<double>(dout[d]) * x.v[value + d];
            dp += product, dp_size += std::fabs(product);
            x.dv[value + d] += p[j] * dout[d], x.size_v[value + d] += std::fabs(p[j] * dout[d]);
          }
          const double ds = p[j] * (dp - delta), ds_size = p[j] * (dp_size + delta_size);
          if (!x.bias.empty()) {
            x.dbias[at(x.sb, b, h, row, j)] += ds;
            x.size_bias[at(x.sb, b, h, row, j)] += ds_size;
          }
          for (int d = 0; d < c.dim; ++d) {
            const double da = x.scale * ds * slope[j], size = std::fabs(x.scale) * ds_size;
            x.dq[at(x.sq, b, h, row) + d] += da * x.k[key + d];
            x.size_q[at(x.sq, b, h, row) + d] += size * std::fabs(x.k[key + d]);
            x.dk[key + d] += da * q[d];
            x.size_k[key + d] += size * std::fabs(q[d]);
          }
        }
      }
}

Problem make(const Case& c, const Precision& t) {
  Problem x;
  x.c = c;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto rounded = [&](float y, bool fp32 = false) {
    return t.bytes == 4 || fp32 ? y : t.decode(t.encode(y));
  };
  const auto draw = [&](size_t size) {
    Numbers y(size);
    for (float& e : y) e = rounded(normal(random));
    return y;
  };
  const size_t rows_q = size_t{1} * c.batch * c.heads_q * c.seq_q;
  const size_t rows_k = size_t{1} * c.batch * c.heads_k * c.seq_k;
  const auto pad = [&](Numbers& y, int heads, int seq, int dim) {
    const FlashsciStrides s = layout(heads, seq, dim, c.heads_inside);
    for (int i = 0; i < c.batch * heads * seq; ++i) {
      const int row = i % seq, head = i / seq % heads, batch = i / seq / heads;
      if (c.padded && is_padding(row, seq)) std::fill_n(&y[at(s, batch, head, row)], dim, 0.f);
    }
  };
  x.q = draw(rows_q * c.dim), x.k = draw(rows_k * c.dim), x.v = draw(rows_k * c.dim_v);
  x.dout = draw(rows_q * c.dim_v);
  if (t.bytes == 4) {
    for (float& e : x.dout) e *= c.dout_size;
    x.floor *= c.dout_size;
  }
  pad(x.q, c.heads_q, c.seq_q, c.dim), pad(x.dout, c.heads_q, c.seq_q, c.dim_v);
  pad(x.k, c.heads_k, c.seq_k, c.dim), pad(x.v, c.heads_k, c.seq_k, c.dim_v);
  if (c.dlse) x.dlse = draw(rows_q);
  x.out.assign(rows_q * c.dim_v, 0), x.lse.assign(rows_q, -INFINITY);
  x.sq = layout(c.heads_q, c.seq_q, c.dim, c.heads_inside);
  x.sk = layout(c.heads_k, c.seq_k, c.dim, c.heads_inside);
  x.sv = layout(c.heads_k, c.seq_k, c.dim_v, c.heads_inside);
  x.so = layout(c.heads_q, c.seq_q, c.dim_v, c.heads_inside);
  if (!c.bias.empty()) {
    x.sb = pair_layout(c.bias);
    x.bias.resize(size_of(c.bias));
    for (float& e : x.bias) {
      e = rounded(normal(random), c.bias_fp32);
      if (random() % 16 == 0) e = -INFINITY;
    }
    for (size_t i = 0; c.hidden != 0.f && i < x.bias.size(); ++i)
      if (static_cast<int>(i % c.bias[3]) >= c.seq_k - c.seq_k / 3)
        x.bias[i] =
            rounded(number_for(c.hidden, t.encode == float_to_fp16 && !c.bias_fp32), c.bias_fp32);
  }
  if (!c.mask.empty()) {
    x.sm = pair_layout(c.mask);
    x.mask.resize(size_of(c.mask));
    for (uint8_t& e : x.mask) e = random() % 4 != 0;
  }
  for (int n : c.lens_q) x.cu_q.push_back(x.cu_q.back() + n);
  for (int n : c.lens_k) x.cu_k.push_back(x.cu_k.back() + n);
  x.scale = c.scale != 0.f ? c.scale : 1.f / std::sqrt(static_cast<float>(c.dim));
  solve(x);
  for (float& e : x.out) e = rounded(e);
  return x;
}

// Largest error in units of eps times the formula on absolute values; infinite for a NaN.
double compare(const Numbers& got, const std::vector<double>& want, const std::vector<double>& size,
               double eps, double floor) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(got[i] - want[i]) / (eps * (size[i] + floor));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  return worst;
}

bool run(const Unit& unit, const Problem& x, int need, bool deterministic) {
  const Case& c = x.c;
  const Precision& t = unit.precision;
  Device device;
  FlashsciBackwardParams p{};
  p.q = device.numbers(x.q, t), p.k = device.numbers(x.k, t), p.v = device.numbers(x.v, t);
  p.out = device.numbers(x.out, t), p.lse = device.put(x.lse);
  p.dout = c.no_dout ? nullptr : device.numbers(x.dout, t);
  p.dlse = c.dlse ? device.put(x.dlse) : nullptr;
  if (need & kNeedQ) p.dq = device.poison(x.q.size() * t.bytes);
  if (need & kNeedK) p.dk = device.poison(x.k.size() * t.bytes);
  if (need & kNeedV) p.dv = device.poison(x.v.size() * t.bytes);
  const Precision& tb = c.bias_fp32 ? kFp32 : t;
  if (!c.bias.empty()) {
    p.bias_mask.bias = device.numbers(x.bias, tb), p.bias_mask.bias_strides = x.sb;
    p.bias_mask.bias_is_fp32 = tb.bytes == 4;
    if (need & kNeedBias) p.dbias = device.poison(x.bias.size() * tb.bytes);
    p.dbias_strides = x.sb;
  }
  if (!c.mask.empty()) p.bias_mask.mask = device.put(x.mask), p.bias_mask.mask_strides = x.sm;
  if (!c.lens_q.empty()) {
    p.cu_seqlens_q = device.put(x.cu_q), p.cu_seqlens_k = device.put(x.cu_k);
    p.num_seqs = static_cast<int>(c.lens_q.size());
    p.max_seqlen_q = p.max_seqlen_k = -1;
    if (deterministic) p.max_seqlen_k = *std::max_element(c.lens_k.begin(), c.lens_k.end());
  }
  p.q_strides = p.dq_strides = x.sq, p.k_strides = p.dk_strides = x.sk;
  p.v_strides = p.dv_strides = x.sv, p.out_strides = p.dout_strides = x.so;
  p.dlse_strides = {int64_t{c.heads_q} * c.seq_q, 0, c.seq_q, 1};
  p.batch0 = c.batch, p.batch1 = 1;
  p.heads_q = c.heads_q, p.heads_k = c.heads_k, p.seq_q = c.seq_q, p.seq_k = c.seq_k;
  p.head_dim = c.dim, p.head_dim_v = c.dim_v, p.scale = x.scale, p.softcap = c.softcap;
  p.window_left = c.left, p.window_right = c.right, p.lower_right = c.lower_right;
  p.deterministic = deterministic;
  uint64_t bits = 16;
  for (const FlashsciStrides* s : {&x.sq, &x.sk, &x.sv, &x.so})
    bits |= t.bytes * static_cast<uint64_t>(s->batch0 | s->head | s->row);
  p.copy_bytes = static_cast<int32_t>(bits & -bits);
  CUDA(cudaDeviceGetAttribute(&p.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
  const int64_t bytes = unit.workspace(&p);
  p.workspace = device.poison(bytes);

  const std::string label = std::string(unit.name) + " " + t.name + " " + c.name + ", need " +
                            std::to_string(need) + (deterministic ? " deterministic" : "");
  const int status = unit.launch(&p, nullptr);
  if (status == cudaErrorNotSupported) {
    std::printf("%-60s not served\n", label.c_str());
    return true;
  }
  CUDA(static_cast<cudaError_t>(status));
  CUDA(cudaDeviceSynchronize());
  double worst[4] = {};
  const auto check = [&](int i, const void* got, const std::vector<double>& want,
                         const std::vector<double>& size, const Precision& as) {
    if (got != nullptr)
      worst[i] = compare(from_device(got, want.size(), as), want, size, t.eps, x.floor);
  };
  check(0, p.dq, x.dq, x.size_q, t);
  check(1, p.dk, x.dk, x.size_k, t);
  check(2, p.dv, x.dv, x.size_v, t);
  check(3, p.dbias, x.dbias, x.size_bias, tb);
  const double most = *std::max_element(worst, worst + 4);
  const bool ok = most <= 2;
  std::printf("%-60s dq %.3f dk %.3f dv %.3f dbias %.3f eps, workspace %lld  %s\n", label.c_str(),
              worst[0], worst[1], worst[2], worst[3], static_cast<long long>(bytes),
              ok ? "ok" : "FAILED");
  return ok;
}

std::vector<Case> cases() {
  const auto with = [](Case c, auto change) {
    change(c);
    return c;
  };
  std::vector<Case> all = {
      {"d64", 2, 4, 2, 150, 200, 64, 64},
      {"d64 causal", 1, 2, 2, 257, 257, 64, 64, -1, 0},
      {"d128 causal lower right", 1, 2, 1, 100, 300, 128, 128, -1, 0, true},
      {"d128 window", 1, 2, 2, 300, 260, 128, 128, 40, 7},
      {"d256", 1, 2, 2, 90, 130, 256, 256},
      {"d192 v128", 1, 2, 1, 65, 129, 192, 128},
      {"d32 softcap", 1, 2, 2, 64, 64, 32, 32, -1, -1, false, 15.f},
      {"d96", 2, 3, 3, 70, 170, 96, 96},
      {"d96 causal", 1, 4, 2, 300, 300, 96, 80, -1, 0},
      {"d64 v128", 1, 4, 2, 150, 200, 64, 128},
      {"d128 v64 softcap", 1, 2, 2, 150, 200, 128, 64, -1, -1, false, 15.f},
      {"d256 v128 window", 1, 2, 1, 130, 140, 256, 128, 40, 7},
      {"d128 v256", 1, 2, 1, 90, 130, 104, 200},
      {"d192 v256 causal", 1, 1, 1, 90, 130, 192, 256, -1, 0},
      {"d256 v192", 1, 1, 1, 90, 130, 256, 176},
      {"d7", 1, 3, 1, 33, 77, 7, 7},
      {"d37 v53 causal", 1, 2, 2, 140, 139, 37, 53, -1, 0},
      {"d130", 1, 1, 1, 50, 140, 130, 20},
      {"d50 negative scale", 1, 2, 2, 50, 50, 50, 50, -1, -1, false, 0.f, -0.2f},
      {"d255 v1", 1, 1, 1, 17, 40, 255, 1},
      {"one row, one key", 3, 2, 2, 1, 1, 64, 64},
      {"no keys", 1, 2, 2, 40, 0, 64, 64},
      {"no rows", 1, 2, 2, 0, 40, 64, 64},
      {"more tiles than CTAs", 1, 72, 72, 140, 260, 64, 64, -1, 0},
      {"rows without keys", 1, 1, 1, 200, 30, 64, 64, 5, 5},
      {"more tiles than CTAs, d128", 1, 72, 36, 70, 260, 128, 128},
  };
  all[0].dlse = all[1].heads_inside = all[5].dlse = all[7].heads_inside = true;
  const Case bias{"", 2, 2, 1, 70, 150, 40, 40};
  const auto biased = [&](const char* name, std::vector<int> shape, bool fp32, auto change) {
    all.push_back(with(bias, [&](Case& c) {
      c.name = name, c.bias = shape, c.bias_fp32 = fp32;
      change(c);
    }));
  };
  const auto same = [](Case&) {};
  biased("bias full", {2, 2, 70, 150}, false, same);
  biased("bias full fp32", {2, 2, 70, 150}, true, same);
  biased("bias full causal", {2, 2, 70, 150}, false, [](Case& c) { c.right = 0; });
  biased("bias full softcap", {2, 2, 70, 150}, false, [](Case& c) { c.softcap = 3.f; });
  biased("bias of all batches", {1, 2, 70, 150}, true, same);
  biased("bias per key, masked", {2, 1, 1, 150}, false, [](Case& c) { c.mask = {2, 1, 70, 150}; });
  biased("bias per query", {1, 2, 70, 1}, false, [](Case& c) { c.dlse = true; });
  biased("one bias", {1, 1, 1, 1}, true, same);
  biased("short rows of keys", {2, 2, 129, 129}, true,
         [](Case& c) { c.seq_q = c.seq_k = 129, c.dim = c.dim_v = 24; });
  // All rows share it, and are one tile: nothing but rows is summed over.
  biased("bias per key of each head", {2, 2, 1, 150}, false, same);
  biased("bias d16, no dout", {1, 2, 70, 150}, false,
         [](Case& c) { c.dim = c.dim_v = 16, c.no_dout = c.dlse = true; });
  biased("bias d128", {1, 1, 70, 150}, false, [](Case& c) { c.dim = 128; });
  biased("bias d200", {2, 2, 70, 150}, false, [](Case& c) { c.dim = c.dim_v = 200; });
  biased("padding mask d64", {1, 2, 70, 150}, false,
         [](Case& c) { c.bias = {}, c.mask = {2, 1, 1, 150}, c.dim = c.dim_v = 64; });
  // Rows of pairs that take vectors.
  biased("triangle", {1, 2, 136, 136}, true, [](Case& c) {
    c.batch = 3, c.seq_q = c.seq_k = 136, c.dim = c.dim_v = 32, c.mask = {3, 1, 1, 136};
  });
  for (int dim : {64, 128, 256})
    for (bool fp32 : {false, true})
      biased(fp32 ? "aligned bias fp32" : "aligned bias", {2, 2, 70, 132}, fp32,
             [=](Case& c) { c.seq_k = 132, c.dim = c.dim_v = dim, c.mask = {2, 2, 70, 132}; });
  for (int dim : {64, 128})  // rows of the mask that TMA takes
    biased("aligned mask", {}, false, [=](Case& c) {
      c.heads_q = 4, c.heads_k = 2, c.seq_q = 200, c.seq_k = 272, c.dim = c.dim_v = dim;
      c.mask = {2, 1, 200, 272};
    });
  biased("shared bias fp32, aligned mask", {1, 2, 200, 272}, true,
         [](Case& c) { c.seq_q = 200, c.seq_k = 272, c.right = 0, c.mask = {2, 2, 200, 272}; });
  Case packed{"packed", 1, 4, 2, 300, 310, 64, 64};
  packed.heads_inside = true;
  packed.lens_q = {100, 0, 1, 130, 60}, packed.lens_k = {90, 10, 0, 150, 60};
  all.push_back(packed);
  all.push_back(with(packed, [](Case& c) {
    c.name = "packed causal, rest unowned", c.dim = c.dim_v = 128, c.right = 0,
    c.lower_right = true;
    c.lens_q = {10, 64, 1, 128, 7}, c.lens_k = {30, 64, 2, 100, 9}, c.dlse = true;
  }));
  for (auto [dim, dim_v] : {std::pair{96, 96}, {64, 128}, {192, 128}, {104, 256}})
    all.push_back(with(packed, [=](Case& c) { c.dim = dim, c.dim_v = dim_v; }));
  all.push_back(with(packed, [](Case& c) {
    c.name = "packed d33", c.seq_q = c.seq_k = 64, c.dim = c.dim_v = 33;
    c.lens_q = {40, 24}, c.lens_k = {24, 40};
  }));
  all.push_back(with(packed, [](Case& c) {
    c.name = "packed, more tiles than CTAs", c.seq_q = c.seq_k = 600;
    c.lens_q = c.lens_k = std::vector<int>(80, 7);
  }));
  // Rows of zeros under a dout of every size; short tiles and empty ones, first and last, more of
  // them than CTAs; masks as numbers.
  for (auto [dim, dim_v] : {std::pair{32, 32},
                            {64, 64},
                            {64, 128},
                            {96, 96},
                            {128, 64},
                            {128, 128},
                            {192, 160},
                            {256, 256}}) {
    for (const float size : {1.f, 1e-6f, 1e-9f}) {
      Case c{"rows of zeros", 2, 2, 1, 140, 150, dim, dim_v};
      c.padded = true, c.dout_size = size;
      all.push_back(c);
    }
    all.push_back({"short tiles", 1, 80, 20, 40, 150, dim, dim_v});
    all.push_back({"empty tiles first", 1, 70, 70, 210, 40, dim, dim_v, -1, 0, true});
    all.push_back({"empty tiles last", 1, 40, 20, 40, 520, dim, dim_v, -1, 0});
    all.push_back(with(packed, [=](Case& c) {
      c.name = "packed, empty first and last", c.dim = dim, c.dim_v = dim_v, c.right = 0;
      c.heads_q = c.heads_k = 40, c.seq_q = 170, c.seq_k = 119;
      c.lens_q = {0, 0, 70, 1, 0, 99, 0}, c.lens_k = {0, 9, 40, 1, 7, 62, 0};
    }));
  }
  for (const float number : {-1e4f, -1e9f, -1e30f, -3.3895e38f})
    for (const int dim : {32, 64, 128}) {
      biased("numbers as mask", {2, 2, 70, 144}, false, [=](Case& c) {
        c.seq_k = 144, c.dim = c.dim_v = dim, c.hidden = number, c.padded = true;
      });
      biased("numbers as mask, fp32, shared", {1, 2, 70, 144}, true, [=](Case& c) {
        c.seq_k = 144, c.dim = c.dim_v = dim, c.hidden = number, c.padded = true;
      });
    }
  return all;
}

}  // namespace

int main(int count, char** words) {
  int major = 0, minor = 0, failed = 0, ran = 0;
  CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  for (const Unit& unit : kUnits) {
    if (10 * major + minor < unit.capability || (unit.capability == 90 && major != 9)) continue;
    for (const Case& c : cases()) {
      if (std::max(c.dim, c.dim_v) > unit.max_dim) continue;
      if (!asked(count, words, unit.name, c.name)) continue;
      if (c.dout_size != 1.f && unit.precision.bytes != 4) continue;  // the same as without
      const Problem problem = make(c, unit.precision);
      for (int need : {15, 1, 2, 12, 8}) {
        if (need == 8 && c.bias.empty()) continue;
        for (bool deterministic : {false, true}) {
          if (deterministic && need != 15) continue;
          failed += !run(unit, problem, need, deterministic);
          ++ran;
        }
      }
    }
  }
  std::printf("%d cases, %d failed\n", ran, failed);
  return failed;
}
