// What csrc/ptx says in PTX, in plain C++: a kernel of sm_90a runs on the host, each of its threads a coroutine.
//
// test_triangle_kernel.py compiles the kernel with g++ against this in place of csrc/ptx. Barriers count arrivals and bytes, TMA boxes
// land swizzled and at any later time, products run as late as their wait allows or as early as they are issued, and threads
// come in an order that a seed decides, some for a while hardly at all. What no thread could go on from is an error, as are a wrong count of bytes, a
// misaligned address and a sum of more than 128 products in a tensor core. Sums are exact in fp32.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace emulation {

struct Failure {
  std::string what;
};

inline constexpr uint32_t kBase = 0x410;  // dynamic shared memory begins anywhere
inline constexpr int kSharedBytes = 227 * 1024;
inline unsigned char* shared = nullptr;

struct Warp {
  uint64_t slot[2][32][8];
  int count = 0;
  uint32_t turn = 0;
};

struct Thread {
  ucontext_t context;
  jmp_buf jump;
  std::unique_ptr<char[]> stack;
  bool begun = false, done = false;
  dim3 index;
  std::vector<std::function<void()>> open;                // products issued, of no group yet
  std::deque<std::vector<std::function<void()>>> groups;  // committed, not waited for
};

struct Barrier {
  int count, pending, phase = 0;
  int64_t bytes = 0;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::map<uint32_t, Barrier> barriers;
  std::vector<std::function<void()>> copies;  // of the copy engine, not done yet
  struct Named {
    int count = 0, threads = 0;
    uint32_t turn = 0;
  };
  Named named[16];
  int synced = 0;
  uint32_t sync_turn = 0;
  dim3 index, grid;
  bool progress = false;
  std::string failure;
};

inline Block* block = nullptr;
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline jmp_buf scheduler_jump;
inline std::mt19937 generator;
inline bool early = false;  // products run when they are issued
inline std::function<void()> body;

inline void to_scheduler() {
  if (_setjmp(current->jump) == 0) _longjmp(scheduler_jump, 1);
}
[[noreturn]] inline void fail(const std::string& what) {
  if (block->failure.empty())
    block->failure = what + " (thread " + std::to_string(current ? current->index.x : -1) + ")";
  for (;;) to_scheduler();
}
inline void check(bool right, const char* what) {
  if (!right) fail(what);
}
template <class Ready>
void wait_until(const Ready& ready) {
  while (!ready()) to_scheduler();
}

inline void enter() {
  body();
  if (!current->groups.empty() || !current->open.empty()) fail("products that nobody waited for");
  current->done = true;
  block->progress = true;
  for (;;) to_scheduler();
}

// Runs the thread until it waits.
inline void resume(Thread& thread) {
  current = &thread;
  if (_setjmp(scheduler_jump) != 0) return;
  if (thread.begun) _longjmp(thread.jump, 1);
  thread.begun = true;
  setcontext(&thread.context);
}

inline void run_block(Block& it) {
  block = &it;
  std::vector<bool> slow(it.warps.size());
  for (uint32_t round = 0;; ++round) {
    it.progress = false;
    bool all_done = true, all_asked = true;
    // Warp by warp, in another order each time; for a while some hardly come to their turn.
    if (round % 64 == 0)
      for (size_t i = 0; i < slow.size(); ++i) slow[i] = generator() % 2;
    std::vector<int> warps(it.warps.size());
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    std::shuffle(warps.begin(), warps.end(), generator);
    for (const int warp : warps) {
      if (slow[warp] && generator() % 16 != 0) {
        all_asked = all_done = false;
        continue;
      }
      for (int lane = 0; lane < 32; ++lane) {
        Thread& thread = it.threads[warp * 32 + lane];
        if (thread.done) continue;
        all_done = false;
        resume(thread);
        if (!it.failure.empty()) throw Failure{it.failure};
      }
    }
    if (all_done) break;
    current = nullptr;
    // The copy engine: some copy, in no order; all of them where nobody can go on.
    const bool stuck = !it.progress && all_asked;
    while (!it.copies.empty() && (stuck || generator() % 3 == 0)) {
      const size_t i = generator() % it.copies.size();
      const auto copy = it.copies[i];
      it.copies.erase(it.copies.begin() + i);
      copy();
      it.progress = true;
      if (!it.failure.empty()) throw Failure{it.failure};
    }
    if (!it.progress && all_asked) throw Failure{"no thread can go on"};
  }
  if (!it.copies.empty()) throw Failure{"copies that nobody waited for"};
}

template <class Kernel, class... Arguments>
void launch(Kernel kernel, unsigned grid, unsigned threads, int shared_bytes,
            const Arguments&... arguments) {
  if (shared_bytes > kSharedBytes) throw Failure{"too much shared memory"};
  for (unsigned b = 0; b < grid; ++b) {
    std::memset(shared, 0xff, kSharedBytes);
    Block it;
    it.index = dim3(b), it.grid = dim3(grid);
    it.threads = std::vector<Thread>(threads);
    it.warps.resize(threads / 32);
    body = [&] { kernel(arguments...); };
    for (unsigned i = 0; i < threads; ++i) {
      Thread& thread = it.threads[i];
      constexpr size_t kStack = 128 << 10;
      thread.index = dim3(i);
      thread.stack.reset(new char[kStack]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStack;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, enter, 0);
    }
    run_block(it);
  }
}

// --- what a warp does together

inline int lane() { return current->index.x % 32; }

// All lanes give `count` numbers; returns those of all.
inline const uint64_t (*exchange(const uint64_t* given, int count))[8] {
  Warp& warp = block->warps[current->index.x / 32];
  const uint32_t turn = warp.turn;
  for (int i = 0; i < count; ++i) warp.slot[turn % 2][lane()][i] = given[i];
  if (++warp.count == 32) {
    warp.count = 0;
    ++warp.turn;
    block->progress = true;
  } else {
    wait_until([&] { return warp.turn != turn; });
  }
  return warp.slot[turn % 2];
}
template <class T>
uint64_t bits_of(T x) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
template <class T>
T shuffle(T x, int from) {
  const uint64_t bits = bits_of(x);
  return from_bits<T>(exchange(&bits, 1)[from % 32][0]);
}
inline uint32_t ballot(bool x) {
  const uint64_t bits = x;
  const auto all = exchange(&bits, 1);
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= static_cast<uint32_t>(all[i][0]) << i;
  return found;
}
inline void sync_threads() {
  const uint32_t turn = block->sync_turn;
  if (++block->synced == static_cast<int>(block->threads.size())) {
    block->synced = 0;
    ++block->sync_turn;
    block->progress = true;
  } else {
    wait_until([&] { return block->sync_turn != turn; });
  }
}

// --- shared memory

inline unsigned char* at(uint32_t address, int bytes, int alignment) {
  check(address % alignment == 0, "a misaligned address of shared memory");
  check(address >= kBase && address + bytes <= kBase + kSharedBytes, "beyond shared memory");
  return shared + (address - kBase);
}
inline uint32_t swizzled(uint32_t address, int span) {
  return address ^ ((address >> 3) & (span == 128 ? 0x70 : span == 64 ? 0x30 : 0x10));
}

inline Barrier& barrier_at(uint32_t address) {
  const auto found = block->barriers.find(address);
  if (found == block->barriers.end()) fail("no barrier there");
  return found->second;
}
inline void settle(Barrier& barrier) {
  check(barrier.pending >= 0, "more arrivals than the barrier counts");
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
    block->progress = true;
  }
}

// --- tensor maps

struct Map {
  const unsigned char* base;
  uint64_t size[5], stride[5];
  uint32_t box[5];
  int bytes, span;
};
inline std::vector<std::unique_ptr<Map>> maps;

inline CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  auto made = std::make_unique<Map>();
  made->base = static_cast<const unsigned char*>(base);
  made->bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                          : 2;
  made->span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
               : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                      : 32;
  if (rank != 5 || reinterpret_cast<uintptr_t>(base) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 5; ++i) {
    made->size[i] = size[i], made->box[i] = box[i];
    made->stride[i] = i == 0 ? made->bytes : stride[i - 1];
    if (i > 0 && made->stride[i] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
  }
  if (static_cast<int>(box[0]) * made->bytes > made->span) return CUDA_ERROR_INVALID_VALUE;
  const Map* address = made.get();
  std::memcpy(map, &address, sizeof(address));
  maps.push_back(std::move(made));
  return CUDA_SUCCESS;
}
inline const Map& map_of(const void* map) {
  const Map* found;
  std::memcpy(&found, map, sizeof(found));
  return *found;
}
// Calls move(address in shared memory, address in the tensor or null beyond it) for each element.
template <class Move>
void walk(const Map& map, uint32_t target, const int (&start)[5], const Move& move) {
  for (uint32_t row = 0; row < map.box[1]; ++row)
    for (uint32_t column = 0; column < map.box[0]; ++column) {
      const int64_t position[5] = {start[0] + int64_t{column}, start[1] + int64_t{row}, start[2],
                                   start[3], start[4]};
      const unsigned char* from = map.base;
      bool inside = true;
      for (int i = 0; i < 5; ++i) {
        inside &= position[i] >= 0 && position[i] < static_cast<int64_t>(map.size[i]);
        from += position[i] * static_cast<int64_t>(map.stride[i]);
      }
      move(swizzled(target + row * map.span + column * map.bytes, map.span),
           inside ? from : nullptr);
    }
}

// --- 8-bit floats

inline float from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(8.f + mantissa, exponent - 10)
                              : std::ldexp(static_cast<float>(mantissa), -9);
  return x & 0x80 ? -size : size;
}
inline uint8_t to_e4m3(float x) {  // to nearest, ties to even
  if (std::isnan(x)) return 0x7f;
  uint8_t best = 0;
  float least = INFINITY;
  const float size = std::min(std::fabs(x), 448.f);
  for (int i = 0; i < 0x7f; ++i) {
    const float distance = std::fabs(from_e4m3(i) - size);
    if (distance < least || (distance == least && i % 2 == 0)) best = i, least = distance;
  }
  return best | (x < 0 ? 0x80 : 0);
}
inline const std::vector<float>& e4m3() {
  static const std::vector<float> table = [] {
    std::vector<float> made(256);
    for (int i = 0; i < 256; ++i) made[i] = from_e4m3(i);
    return made;
  }();
  return table;
}

// --- products

// 32 bytes of a row of a K-major operand.
inline void operand_row(float (&x)[32], uint64_t descriptor, int row) {
  const uint32_t start = (descriptor & 0x3fff) << 4, group = (descriptor >> 32 & 0x3fff) << 4;
  const int mode = descriptor >> 62, span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  check(mode != 0 && (descriptor >> 49 & 7) == 0, "a descriptor that TMA's tiles do not have");
  for (int k = 0; k < 32; ++k)
    x[k] = e4m3()[*at(swizzled(start + row / 8 * group + row % 8 * span + k, span), 1, 1)];
}
template <int kN>
void multiply(float (&d)[kN / 2], const float (&a)[2][32], uint64_t b, bool accumulate) {
  const int t = lane() % 4;
  for (int n = 0; n < kN / 8; ++n)
    for (int i = 0; i < 2; ++i) {
      float column[32];
      operand_row(column, b, n * 8 + t * 2 + i);
      for (int half = 0; half < 2; ++half) {
        float& sum = d[n * 4 + half * 2 + i];
        double found = accumulate ? sum : 0.0;
        for (int k = 0; k < 32; ++k) found += a[half][k] * column[k];
        sum = static_cast<float>(found);
      }
    }
}
inline std::map<const void*, int>& lengths() {  // of the sums in accumulators, by 32 products
  static std::map<const void*, int> found;
  return found;
}
inline void issue(const void* d, bool accumulate, std::function<void()> product) {
  int& length = lengths()[d];
  length = accumulate ? length + 1 : 1;
  check(length <= 4, "a sum of more than 128 products in the tensor core");
  if (early)
    product();
  else
    current->open.push_back(std::move(product));
}

// --- products of 16-bit floats

inline float from_16(uint16_t x, bool brain) {
  if (!brain) {
    _Float16 half;
    std::memcpy(&half, &x, sizeof(half));
    return static_cast<float>(half);
  }
  return from_bits<float>(static_cast<uint64_t>(x) << 16);
}
// Element (row of k, column of n) of operand B. transposed: rows of k are rows of shared memory.
inline float operand_16(uint64_t descriptor, int k, int n, bool transposed, bool brain) {
  const uint32_t start = (descriptor & 0x3fff) << 4, block = (descriptor >> 16 & 0x3fff) << 4,
                 group = (descriptor >> 32 & 0x3fff) << 4;
  const int mode = descriptor >> 62, span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  check(mode != 0 && (descriptor >> 49 & 7) == 0, "a descriptor that TMA's tiles do not have");
  const int row = transposed ? k : n, byte = (transposed ? n : k) * 2;
  check(transposed || byte < span, "a row longer than its swizzle");
  check(byte < span || block != 0, "the next block of columns is nowhere");
  uint16_t x;
  std::memcpy(
      &x,
      at(swizzled(start + byte / span * block + row / 8 * group + row % 8 * span + byte % span,
                  span),
         2, 2),
      2);
  return from_16(x, brain);
}
template <int kN>
void multiply_16(float (&d)[kN / 2], const float (&a)[2][16], uint64_t b, bool transposed,
                 bool brain, bool accumulate) {
  const int t = lane() % 4;
  for (int n = 0; n < kN / 8; ++n)
    for (int i = 0; i < 2; ++i) {
      float column[16];
      for (int k = 0; k < 16; ++k)
        column[k] = operand_16(b, k, n * 8 + t * 2 + i, transposed, brain);
      for (int half = 0; half < 2; ++half) {
        float& sum = d[n * 4 + half * 2 + i];
        double found = accumulate ? sum : 0.0;
        for (int k = 0; k < 16; ++k) found += static_cast<double>(a[half][k]) * column[k];
        sum = static_cast<float>(found);
      }
    }
}
inline void issue_16(std::function<void()> product) {
  if (early)
    product();
  else
    current->open.push_back(std::move(product));
}

}  // namespace emulation

// --- CUDA C++

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline
#undef __shared__
#define __shared__
#define threadIdx (emulation::current->index)
#define blockIdx (emulation::block->index)
#define gridDim (emulation::block->grid)
#define blockDim dim3(emulation::block->threads.size())

template <class T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
  return a > b ? a : b;
}
inline void __syncthreads() { emulation::sync_threads(); }
inline void __syncwarp() { emulation::ballot(true); }
inline bool __any_sync(uint32_t, bool x) { return emulation::ballot(x) != 0; }
inline bool __all_sync(uint32_t, bool x) { return emulation::ballot(x) == 0xffffffffu; }
inline uint32_t __ballot_sync(uint32_t, bool x) { return emulation::ballot(x); }
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emulation::kBase + (static_cast<const unsigned char*>(pointer) - emulation::shared);
}
template <class... T>
cudaError_t cudaFuncSetAttribute(void (*)(T...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <class T>
T __shfl_sync(uint32_t, T x, int from) {
  return emulation::shuffle(x, from);
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int by) {
  return emulation::shuffle(x, emulation::lane() ^ by);
}
template <class T>
T __ldg(const T* x) {
  return *x;
}
inline uint32_t atomicAdd(uint32_t* x, uint32_t by) {
  const uint32_t before = *x;
  *x += by;
  return before;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i)
    found |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
}
inline float rounded_down(double x) {
  const float near = static_cast<float>(x);
  return near > x ? std::nextafter(near, -INFINITY) : near;
}
inline float __fmul_rd(float a, float b) { return rounded_down(static_cast<double>(a) * b); }
inline float __fadd_rd(float a, float b) { return rounded_down(static_cast<double>(a) + b); }
inline int __float_as_int(float x) { return emulation::from_bits<int>(emulation::bits_of(x)); }
inline uint32_t __float_as_uint(float x) { return emulation::bits_of(x); }
inline float __int_as_float(int x) { return emulation::from_bits<float>(emulation::bits_of(x)); }
inline float __uint_as_float(uint32_t x) {
  return emulation::from_bits<float>(emulation::bits_of(x));
}

// --- csrc/ptx

namespace flashsci::ptx {

using namespace emulation;

inline uint32_t shared_address(const void* pointer) {
  return kBase +
         static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulation::shared);
}

template <int>
void cp_async_small(uint32_t, const void*, bool) {
  fail("no cp.async here");
}
inline void cp_async_16(uint32_t, const void*, bool) { fail("no cp.async here"); }

inline float ex2_approx(float x) { return x == x ? std::exp2(x) : NAN; }
inline float rcp_approx(float x) { return 1.f / x; }
inline float lg2_approx(float x) { return std::log2(x); }
inline int redux_max(int x) {
  const uint64_t bits = static_cast<uint32_t>(x);
  const auto all = exchange(&bits, 1);
  int found = static_cast<int>(all[0][0]);
  for (int i = 1; i < 32; ++i) found = std::max(found, static_cast<int>(all[i][0]));
  return found;
}

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  at(barrier, 8, 8);
  const int n = static_cast<int>(count);
  check(block->barriers.emplace(barrier, Barrier{n, n}).second, "a barrier made twice");
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  Barrier& it = barrier_at(barrier);
  --it.pending;
  settle(it);
}
inline void mbarrier_arrive(uint32_t barrier, uint32_t count) {
  Barrier& it = barrier_at(barrier);
  it.pending -= count;
  settle(it);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  Barrier& it = barrier_at(barrier);
  it.bytes += bytes;
  --it.pending;
  settle(it);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Barrier& it = barrier_at(barrier);
  wait_until([&] { return it.phase != static_cast<int>(parity); });
}
inline void mbarrier_sleep(uint32_t barrier, uint32_t parity) { mbarrier_wait(barrier, parity); }

inline void tma_load_5d(uint32_t target, const void* map, uint32_t barrier, int c0, int c1, int c2,
                        int c3, int c4) {
  const Map& of = map_of(map);
  check(target % 1024 % (of.span * 8) == 0, "a box that is not aligned to its swizzle");
  at(target, of.box[1] * of.span, 128);
  Block* it = block;
  it->copies.push_back([=, &of] {
    const int start[5] = {c0, c1, c2, c3, c4};
    walk(of, target, start, [&](uint32_t address, const unsigned char* from) {
      unsigned char* to = emulation::shared + (address - kBase);
      for (int i = 0; i < of.bytes; ++i) to[i] = from == nullptr ? 0 : from[i];
    });
    Barrier& arrives = it->barriers.at(barrier);
    arrives.bytes -= of.box[0] * of.box[1] * of.bytes;
    settle(arrives);
  });
}
inline void tma_store_5d(const void* map, uint32_t source, int c0, int c1, int c2, int c3, int c4) {
  const int start[5] = {c0, c1, c2, c3, c4};
  const Map& of = map_of(map);
  at(source, of.box[1] * of.span, 128);
  walk(of, source, start, [&](uint32_t address, const unsigned char* to) {
    if (to != nullptr)
      std::memcpy(const_cast<unsigned char*>(to), emulation::shared + (address - kBase), of.bytes);
  });
}
inline void bulk_commit() {}
template <int>
void bulk_wait_read() {}
inline void fence_proxy_async() {}
inline void prefetch_tensor_map(const void*) {}
template <int>
void setmaxnreg_dec() {}
template <int>
void setmaxnreg_inc() {}
inline bool elect() {
  ballot(true);
  return lane() == 0;
}
inline void barrier_arrive(int id, int threads) {
  Block::Named& it = block->named[id];
  check(it.count == 0 || it.threads == threads, "a named barrier of other threads");
  it.threads = threads;
  if (++it.count < threads) return;
  it.count = 0;
  ++it.turn;
  block->progress = true;
}
inline void barrier_sync(int id, int threads) {
  const uint32_t turn = block->named[id].turn;
  barrier_arrive(id, threads);
  const Block::Named& it = block->named[id];
  wait_until([&] { return it.turn != turn; });
}

inline void st_shared(uint32_t address, uint4 value) {
  std::memcpy(at(address, 16, 16), &value, 16);
}
inline uint4 ld_shared_v4(uint32_t address) {
  uint4 value;
  std::memcpy(&value, at(address, 16, 16), 16);
  return value;
}
inline void st_shared(uint32_t address, uint32_t value) {
  std::memcpy(at(address, 4, 4), &value, 4);
}
inline uint32_t ld_shared_u16(uint32_t address) {
  uint16_t value;
  std::memcpy(&value, at(address, 2, 2), 2);
  return value;
}
inline float2 ld_shared_f2(uint32_t address) {
  float2 value;
  std::memcpy(&value, at(address, 8, 8), 8);
  return value;
}
inline uint32_t cvt_16x2(float low, float high, bool brain) {
  const auto convert = [&](float x) -> uint32_t {
    if (!brain) return emulation::bits_of(static_cast<_Float16>(x)) & 0xffff;
    const uint32_t bits = emulation::bits_of(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
  };
  return convert(low) | convert(high) << 16;
}
inline uint32_t cvt_bf16x2(float low, float high) { return cvt_16x2(low, high, true); }
inline uint32_t cvt_f16x2(float low, float high) { return cvt_16x2(low, high, false); }
inline float cvt_f32_f16(uint16_t x) { return from_16(x, false); }
template <class... T>
void mma_m16n8k16_bf16(T&&...) {
  fail("no mma here");
}
template <class... T>
void mma_m16n8k16_f16(T&&...) {
  fail("no mma here");
}
inline uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
  return to_e4m3(x0) | to_e4m3(x1) << 8 | to_e4m3(x2) << 16 |
         static_cast<uint32_t>(to_e4m3(x3)) << 24;
}

// Eight rows of 16 bytes of a matrix, whose addresses its eight lanes give.
inline uint32_t row_of(const uint64_t (*all)[8], int matrix, int row) {
  return static_cast<uint32_t>(all[matrix * 8 + row][4]);
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const uint64_t given[8] = {0, 0, 0, 0, address};
  const auto all = exchange(given, 5);
  for (int m = 0; m < 4; ++m) {
    uint32_t banks = 0;
    for (int row = 0; row < 8; ++row) banks |= 1u << (row_of(all, m, row) >> 4 & 7);
    check(banks == 0xff, "rows of a matrix that collide");
    std::memcpy(&r[m], at(row_of(all, m, lane() / 4), 16, 16) + lane() % 4 * 4, 4);
  }
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const uint64_t given[8] = {0, 0, 0, 0, address};
  const auto all = exchange(given, 5);
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i)
      std::memcpy(&pair[i], at(row_of(all, m, lane() % 4 * 2 + i), 16, 16) + lane() / 4 * 2, 2);
    r[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint64_t given[8] = {r0, r1, r2, r3, address};
  const auto all = exchange(given, 5);
  const uint32_t r[4] = {r0, r1, r2, r3};
  uint32_t banks[4] = {};
  for (int m = 0; m < 4; ++m) {
    std::memcpy(at(row_of(all, m, lane() / 4), 16, 16) + lane() % 4 * 4, &r[m], 4);
    for (int row = 0; row < 8; ++row) banks[m] |= 1u << (row_of(all, m, row) >> 4 & 7);
    check(banks[m] == 0xff, "rows of a matrix that collide");
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
template <int kPending>
void wgmma_wait() {
  while (current->groups.size() > kPending) {
    for (auto& product : current->groups.front()) product();
    current->groups.pop_front();
  }
}
template <int kCount>
void wgmma_tie(float (&)[kCount]) {}

template <int kN>
struct Qgmma {
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    issue(d, accumulate, [&d, a, b, accumulate] {
      float rows[2][32];
      const int row = current->index.x / 32 % 4 * 16 + lane() / 4;
      operand_row(rows[0], a, row);
      operand_row(rows[1], a, row + 8);
      multiply<kN>(d, rows, b, accumulate);
    });
  }
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    issue(d, accumulate, [&d, &a, b, accumulate] {
      const uint64_t given[8] = {a[0], a[1], a[2], a[3]};
      const auto all = exchange(given, 4);
      float rows[2][32];
      for (int k = 0; k < 32; ++k)
        for (int half = 0; half < 2; ++half)
          rows[half][k] =
              e4m3()[all[lane() / 4 * 4 + k % 16 / 4][k / 16 * 2 + half] >> k % 4 * 8 & 0xff];
      multiply<kN>(d, rows, b, accumulate);
    });
  }
};

template <int kN, bool kBrain>
struct Wgmma16 {
  template <int kTransB>
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    issue_16([&d, &a, b, accumulate] {
      const uint64_t given[8] = {a[0], a[1], a[2], a[3]};
      const auto all = exchange(given, 4);
      float rows[2][16];
      for (int k = 0; k < 16; ++k)
        for (int half = 0; half < 2; ++half)
          rows[half][k] = from_16(
              all[lane() / 4 * 4 + k % 8 / 2][k / 8 * 2 + half] >> k % 2 * 16 & 0xffff, kBrain);
      multiply_16<kN>(d, rows, b, kTransB != 0, kBrain, accumulate);
    });
  }
};
template <int kN>
using WgmmaBf16 = Wgmma16<kN, true>;
template <int kN>
using WgmmaF16 = Wgmma16<kN, false>;

template <int kRowBytes>
uint64_t qgmma_descriptor(uint32_t address) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{kRowBytes * 8 >> 4} << 32 |
         uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
}

}  // namespace flashsci::ptx
