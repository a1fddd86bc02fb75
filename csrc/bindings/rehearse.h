// The common part of the ops `cuda_..._kernels`: a rehearsal of the launches of another op.
#pragma once
#include <string>
#include <utility>

#include "../core/rehearsal.h"

namespace flashsci::bindings {

// The kernels that `compute` would launch on a described device: "sm90/fwd/forward_kernel", one a
// line; "" if there is no score, since nothing is launched. Raises as `compute` does, also where no
// kernel serves the call.
template <class Compute>
std::string rehearse(int64_t capability, int64_t processors, int64_t shared_per_sm,
                     int64_t shared_per_block, Compute&& compute) {
  Rehearsal made{static_cast<int>(capability), static_cast<int>(processors),
                 static_cast<int>(shared_per_sm), static_cast<int>(shared_per_block)};
  const struct Scope {
    Rehearsal* before = rehearsal();
    ~Scope() { rehearsal() = before; }
  } scope;
  rehearsal() = &made;
  compute();
  return std::move(made.kernels);
}

}  // namespace flashsci::bindings
