// A rehearsal of a launch: launchers decide as for a real one on a device that is only described, and the kernels that they would
// start are named instead. It needs no GPU and no memory: addresses stand for their alignment alone.
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
  std::string kernels{};  // "sm90/fwd/forward_kernel", one a line, in the order of their launches
};

// That of this thread, or null: launches are real.
inline Rehearsal*& rehearsal() {
  static thread_local Rehearsal* current = nullptr;
  return current;
}

inline bool rehearsing() { return rehearsal() != nullptr; }

// An address for memory that a rehearsal does not have, aligned as allocators align.
inline void* rehearsed_address() { return reinterpret_cast<void*>(uintptr_t{1} << 20); }

// Notes a kernel by what the compiler prints of this function: "... [with auto kKernel = sm90::fwd::forward_kernel<...>]".
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
