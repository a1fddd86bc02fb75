// A kernel of csrc/sm90 or csrc/sm80 on the host: what it takes from CUDA C++, from csrc/ptx and, in its
// launcher, from the CUDA runtime, in plain C++. What no emulated kernel uses is not there.
//
// tests/cpu/emulator/emulated.py compiles a kernel with g++, this in place of csrc/ptx. What hardware may do
// in any order happens in an order that a seed decides, and what it does not allow is an error:
// thread_block.h, copy_engine.h and tensor_core.h say which. Speed, registers, fences and the
// memory model between CTAs are not emulated.
#pragma once
#include <cmath>
#include <cstdio>
#include <utility>

#include "copy_engine.h"
#include "tensor_core.h"
#include "thread_block.h"

// --- CUDA C++

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#undef __shared__
#define __shared__ static  // of the one block that runs
#define cudaLaunchKernelEx emulation::launch_ex

template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <class T>
T __ldg(const T* x) {
  return *x;
}
inline uint32_t __float_as_uint(float x) { return emulation::bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulation::bits_as<float>(x); }
inline int __float_as_int(float x) { return emulation::bits_as<int>(x); }
inline float __int_as_float(int x) { return emulation::bits_as<float>(x); }
inline float rounded_down(double x) {
  const float near = static_cast<float>(x);
  return near > x ? std::nextafter(near, -INFINITY) : near;
}
// The product of two floats is exact in double, a sum as good as that.
inline float __fmul_rd(float a, float b) { return rounded_down(static_cast<double>(a) * b); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rd(float a, float b) { return rounded_down(static_cast<double>(a) + b); }
// Bytes 0 .. 3 of x, 4 .. 7 of y: the four that the digits of `selector` name, the lowest first.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i)
    found |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}
inline uint32_t atomicAdd(uint32_t* x, uint32_t by) {
  const uint32_t before = *x;
  *x += by;
  return before;
}
template <class T>
T __ldcg(const T* x) {
  return *x;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulation::address_space;
}

// --- the rest of csrc/ptx

namespace flashsci::ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
template <class T>
T load_shared(uint32_t address) {
  T value;
  std::memcpy(&value, at(address, sizeof(T), sizeof(T)), sizeof(T));
  return value;
}
inline uint32_t ld_shared(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint32_t ld_shared_u8(uint32_t address) { return load_shared<uint8_t>(address); }
inline uint64_t ld_shared_u64(uint32_t address) { return load_shared<uint64_t>(address); }
inline float2 ld_shared_f2(uint32_t address) { return load_shared<float2>(address); }
inline uint4 ld_shared_v4(uint32_t address) { return load_shared<uint4>(address); }
template <class T>
void st_shared(uint32_t address, T value) {
  std::memcpy(at(address, sizeof(T), sizeof(T)), &value, sizeof(T));
}

inline void st_shared_b16(uint32_t address, uint16_t value) { st_shared(address, value); }
inline void st_shared_b8(uint32_t address, uint32_t value) {
  st_shared(address, static_cast<uint8_t>(value));
}
inline void red_add(float* global, float value) { *global += value; }

inline float ex2_approx(float x) { return std::exp2(x); }
inline float rcp_approx(float x) { return 1.f / x; }
inline float lg2_approx(float x) { return std::log2(x); }

// Of the registers that a CTA has if no other one shares the SM: setmaxnreg waits for ever for more.
inline void take_registers(int wanted) {
  const int own = 65536 / static_cast<int>(blockDim.x) / 8 * 8;
  block->registers_beyond += wanted - own;
}
template <int kRegisters>
void setmaxnreg_dec() {
  take_registers(kRegisters);
}
template <int kRegisters>
void setmaxnreg_inc() {
  take_registers(kRegisters);
}
inline void prefetch_l1(const void*) {}
template <class T>
void ld_row(T& x, const T* from) {
  check(reinterpret_cast<uintptr_t>(from) % sizeof(T) == 0, "a misaligned load");
  x = *from;
}
inline void prefetch_l2(const void*) {}
inline void launch_dependents() {}  // kernels run one after another
inline void wait_for_prerequisites() {}

// Asked again and again, until another CTA has changed it. Those that may be waited for have run
// before: what does not come while the other threads of this one go on never comes.
inline int load_acquire(const int* x) {
  thread->times = thread->asked == x ? thread->times + 1 : 0;
  thread->asked = x;
  check(thread->times < 10000, "a turn that never comes");
  machine->progress = true;
  to_scheduler();
  return *x;
}
inline void add_release(int* x, int by) { *x += by; }
inline uint32_t arrive(uint32_t* x) { return (*x)++; }

// Copies of a thread, done when it waits for them, or when their arrival at a barrier is. Until then
// nothing is there.
inline void copy_later(uint32_t shared, const void* global, int bytes, int valid_bytes) {
  unsigned char* target = at(shared, bytes, bytes);
  check(valid_bytes == 0 || reinterpret_cast<uintptr_t>(global) % bytes == 0, "a misaligned copy");
  std::memset(target, 0xff, bytes);
  thread->own_copies.push_back(std::make_shared<Work>([=] {
    std::memset(target, 0, bytes);
    std::memcpy(target, global, valid_bytes);
  }));
}
inline void finish(const std::vector<std::shared_ptr<Work>>& copies) {
  for (const auto& copy : copies) std::exchange(*copy, [] {})();
}
template <int kBytes>
void cp_async_small(uint32_t shared, const void* global, int valid_bytes) {
  copy_later(shared, global, kBytes, valid_bytes);
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  copy_later(shared, global, 16, valid ? 16 : 0);
}
inline void cp_async_16_if(bool wanted, uint32_t shared, const void* global) {
  if (wanted) cp_async_16(shared, global, true);
}
inline void cp_async_commit() {
  thread->own_copy_groups.push_back(std::move(thread->own_copies));
  thread->own_copies.clear();
}
template <int kPending>
void cp_async_wait() {
  for (auto& groups = thread->own_copy_groups; groups.size() > kPending; groups.pop_front())
    finish(groups.front());
}
inline void cp_async_arrive(uint32_t barrier) {
  auto copies = thread->own_copies;
  for (const auto& group : thread->own_copy_groups)
    copies.insert(copies.end(), group.begin(), group.end());
  load_later(barrier, [=] {
    finish(copies);
    emulation::arrive(barrier, 1, 0);
  });
}
inline void mbarrier_poll(uint32_t barrier, uint32_t parity, uint32_t = 0) {
  mbarrier_wait(barrier, parity);
}

// Named by headers that other kernels need more of, not called here.
inline uint32_t ld_shared_u16(uint32_t address) { return load_shared<uint16_t>(address); }

}  // namespace flashsci::ptx

// --- the CUDA runtime, as far as launchers call it

namespace emulation {
inline int processors = 1;  // multiprocessors of the device
}
template <class... T>
cudaError_t cudaFuncSetAttribute(void (*kernel)(T...), cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > emulation::shared_room) return cudaErrorInvalidValue;
  int& allowed = emulation::allowed_shared[reinterpret_cast<void (*)()>(kernel)];
  allowed = std::max(allowed, value);  // of several devices
  return cudaSuccess;
}

extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = reinterpret_cast<void*>(&emulation::encode);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value =
      attribute == cudaDevAttrMultiProcessorCount ? emulation::processors : emulation::shared_room;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
}

// --- dtypes, as units of csrc/sm90 define them

#include "core/dtype_bf16.cuh"
#include "core/dtype_f16.cuh"

namespace emulation {

struct Bf16 : flashsci::BFloat16 {
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaBf16<kN>;
};
struct Fp16 : flashsci::Float16 {
  template <int kN>
  using Wgmma = flashsci::ptx::WgmmaF16<kN>;
};

// Calls a launcher, launch(Bf16{}) or launch(Fp16{}). seed: of the order of things; products are
// early if it is odd. Returns what the launcher does, or 999: what went wrong is in `text`.
template <class Launch>
int run(bool bf16, int device_processors, unsigned seed, char* text, int size,
        const Launch& launch) {
  processors = device_processors;
  generator.seed(seed);
  early = seed % 2 != 0;
  try {
    return bf16 ? launch(Bf16{}) : launch(Fp16{});
  } catch (const Failure& failure) {
    std::snprintf(text, size, "%s", failure.what.c_str());
    return 999;
  }
}

}  // namespace emulation
