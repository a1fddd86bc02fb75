// Work in a row, shared among CTAs that read memory. SMs read it at rates that differ by a quarter,
// for those of a large GPC share its way to L2: equal shares would end far apart. So each CTA has
// seven eighths of an equal share, and takes what is left in small runs, as it becomes free.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <random>

namespace flashsci {

// Runs: the first `ctas`, which differ by one unit at most, are the CTAs' own; the rest are taken.
// What a run holds does not depend on who takes it. Quotients are exact: nothing divided has more
// than 53 bits.
struct Shares {
  static constexpr int kLaterRuns = 4;  // of a CTA, if all were as fast

  int units, ctas;
  int own;    // units of the first runs
  int later;  // units of a later run
  int runs;

  // fewest: units that a run is worth its beginning and its end for; shorter ones are not made.
  __host__ __device__ __forceinline__ Shares(int units_, int ctas_, int fewest)
      : units(units_), ctas(ctas_ < units_ ? ctas_ : units_) {
    const int small = ctas > 0 ? units / (ctas * 8 * kLaterRuns) : 0;
    const int others = small >= fewest ? ctas * kLaterRuns : 0;
    later = small, own = units - others * small, runs = ctas + others;
  }
  // Up to begin(runs), which is the end.
  __host__ __device__ __forceinline__ int begin(int run) const {
    if (run > ctas) return own + (run - ctas) * later;
    return ctas > 0 ? static_cast<int>(static_cast<double>(run) * own / ctas) : 0;
  }
  __host__ __device__ __forceinline__ int run_of(int unit) const {
    if (unit >= own) return ctas + (unit - own) / later;
    return static_cast<int>((static_cast<double>(unit + 1) * ctas - 1) / own);
  }
};

// Numbers from 0 on, each given once in a launch. The counter lies in workspace that nobody has
// initialised: that it is not of this launch is seen from its upper bits. A CUDA graph launches again
// under the same name, so the last kernel of a call clears it.
struct Tickets {
  static constexpr int kBits = 20;

  unsigned long long* counter;
  unsigned long long launch;  // a name, above kBits zeros

  __device__ __forceinline__ int take() const {
    unsigned long long seen = *static_cast<volatile unsigned long long*>(counter);
    for (;;) {
      const bool begun = seen >> kBits == launch >> kBits;
      const unsigned long long next = (begun ? seen : launch) + 1;
      const unsigned long long found = atomicCAS(counter, seen, next);
      if (found == seen) return static_cast<int>(next - launch) - 1;
      seen = found;
    }
  }
  __device__ __forceinline__ void clear() const { *counter = 0; }
};

// Of no launch before, and none that a fresh workspace can be thought to hold.
inline unsigned long long name_of_launch() {
  static std::atomic<unsigned long long> last{[] {
    std::random_device random;
    return (static_cast<unsigned long long>(random()) << 32 | random()) >> Tickets::kBits;
  }()};
  const unsigned long long name = ++last << Tickets::kBits;
  return name != 0 ? name : name_of_launch();
}

}  // namespace flashsci
