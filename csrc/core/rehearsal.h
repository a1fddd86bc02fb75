// A rehearsal of a launch, on a device that is only described: launchers decide as for a real
// launch, and the kernels that they would start are named instead. It needs no GPU and no memory:
// addresses only stand for their alignment.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace flashsci {

struct Rehearsal {
  int capability;         // of the described device: major * 10 + minor
  int processors;         // streaming multiprocessors
  int shared_per_sm;      // bytes
  int shared_per_block;   // bytes that a kernel may ask for
  std::string kernels{};  // "sm90/fwd/forward_kernel", one a line, in launch order
};

// The rehearsal of this thread, or null: launches are real.
inline Rehearsal*& rehearsal() {
  static thread_local Rehearsal* current = nullptr;
  return current;
}

inline bool rehearsing() { return rehearsal() != nullptr; }

// An address for memory that a rehearsal does not have, with the alignment of an allocator.
inline void* rehearsed_address() { return reinterpret_cast<void*>(uintptr_t{1} << 20); }

// Notes a kernel by the compiler's name of this function: "... [with auto kKernel =
// sm90::fwd::forward_kernel<...>]".
template <auto kKernel>
void note_kernel(Rehearsal& of) {
  std::string_view name = __PRETTY_FUNCTION__;
  constexpr std::string_view kBefore = "kKernel = ";
  name.remove_prefix(name.find(kBefore) + kBefore.size());
  name = name.substr(0, name.find_first_of("<;]"));
  if (!of.kernels.empty()) of.kernels += '\n';
  for (; !name.empty(); name.remove_prefix(1)) {
    const bool separator = name.substr(0, 2) == "::";
    of.kernels += separator ? '/' : name[0];
    if (separator) name.remove_prefix(1);
  }
}

}  // namespace flashsci
