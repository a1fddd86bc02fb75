// Whether tensors share memory, element by element: interleaved views do not. The algorithm is that
// of flashsci/call/memory.py.
#pragma once
#include <numeric>
#include <vector>

#include "tensor.h"

namespace flashsci::bindings {

struct Term {
  int64_t step, most;  // step in bytes; largest index
};

inline int64_t bytes_of_element(const Tensor& x) {
  const int32_t dtype = dtype_of(x);
  return dtype == dtypes().byte || dtype == dtypes().boolean || dtype == dtypes().e5m2 ? 1
         : dtype == dtypes().int32 ? 4
                                   : size_of(dtype);
}

// Bytes from the first element to the end of the last one.
inline int64_t span_of(const Tensor& x) {
  int64_t steps = 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return 0;
    steps += (x.size(i) - 1) * x.stride(i);
  }
  return (steps + 1) * bytes_of_element(x);
}

// Whether sum n_i step_i = target for some 0 <= n_i <= most_i, from term i on, largest step first.
// A search that takes too long returns true.
inline bool hits(const std::vector<Term>& terms, size_t i, int64_t target, int& steps_left) {
  if (target == 0) return true;
  int64_t reach = 0, divisor = 0;
  for (size_t k = i; k < terms.size(); ++k) {
    reach += terms[k].step * terms[k].most;
    divisor = std::gcd(divisor, terms[k].step);
  }
  if (target < 0 || target > reach || divisor == 0 || target % divisor != 0) return false;
  if (--steps_left < 0) return true;
  const auto [step, most] = terms[i];
  const int64_t rest = reach - step * most;
  const int64_t low = target > rest ? (target - rest + step - 1) / step : 0;
  for (int64_t n = low; n <= std::min(most, target / step); ++n)
    if (hits(terms, i + 1, target - n * step, steps_left)) return true;
  return false;
}

inline bool share_memory(const Tensor& a, const Tensor& b) {
  const int64_t span_a = span_of(a), span_b = span_of(b);
  int64_t target = reinterpret_cast<intptr_t>(b.const_data_ptr()) -
                   reinterpret_cast<intptr_t>(a.const_data_ptr());
  if (span_a == 0 || span_b == 0 || target >= span_a || -target >= span_b) return false;
  std::vector<Term> terms;
  const auto add = [&](int64_t step, int64_t most) {
    if (step == 0 || most == 0) return;
    for (Term& term : terms)
      if (term.step == step) {
        term.most += most;
        return;
      }
    terms.push_back({step, most});
  };
  for (const Tensor* x : {&a, &b}) {
    const int64_t size = bytes_of_element(*x);
    add(1, size - 1);
    for (int64_t i = 0; i < x->dim(); ++i) add(x->stride(i) * size, x->size(i) - 1);
  }
  target += span_b - 1;  // b's indices are counted from the end, so that its offsets are sums, too
  std::sort(terms.begin(), terms.end(), [](Term x, Term y) { return x.step > y.step; });
  int steps_left = 10000;
  return hits(terms, 0, target, steps_left);
}

// Whether two elements of x may share an address, as in an expanded tensor.
inline bool folds(const Tensor& x) {
  std::vector<Term> dims;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) == 0) return false;
    if (x.size(i) > 1) dims.push_back({x.stride(i), x.size(i) - 1});
  }
  std::sort(dims.begin(), dims.end(), [](Term a, Term b) { return a.step < b.step; });
  int64_t end = 1;
  for (const auto& [step, most] : dims) {
    if (step < end) return true;
    end += step * most;
  }
  return false;
}

}  // namespace flashsci::bindings
