// Units of work in a row, cut into runs that differ by one at most, one for each CTA.
#pragma once

namespace flashsci {

// Quotients are exact: nothing divided has more than 53 bits.
struct EvenRuns {
  int total, ctas;
  // Up to begin(ctas), which is the end.
  __host__ __device__ __forceinline__ int begin(int cta) const {
    return static_cast<int>(static_cast<double>(cta) * total / ctas);
  }
  // The CTA whose run has a unit.
  __host__ __device__ __forceinline__ int cta_of(int unit) const {
    return static_cast<int>((static_cast<double>(unit + 1) * ctas - 1) / total);
  }
};

}  // namespace flashsci
