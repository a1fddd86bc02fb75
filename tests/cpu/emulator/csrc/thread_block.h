// Thread blocks on the host: their threads, launches, and what threads do together.
//
// Each thread is a coroutine, which runs until it waits. A seed decides in which order warps have
// their turns and copies are done, and some warps, or all copies, hardly have any for a while: what
// a kernel leaves unordered comes in many orders. It is an error if no thread can go on and no copy is under way, if threads give a barrier
// different counts, and if products or copies are left that nobody waited for. Clusters, of one block
// each unless a launch says otherwise, run one after another, each to its end, in any order where none
// waits for another; or some single blocks at the same time (`together`).
#pragma once
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

inline uint3 threadIdx, blockIdx;  // of the thread that runs
inline dim3 gridDim, blockDim;

namespace emulation {

struct Failure {
  std::string what;
};
using Work = std::function<void()>;

// --- what there is

// Where threads meet, time after time.
struct Meeting {
  int arrived = 0, threads = 0;
  uint32_t turn = 0;
  bool all[2];  // of this turn and the last: what those who came asked for
};

struct Thread {
  uint3 index;
  ucontext_t start;  // its stack and first instruction
  jmp_buf place;     // where it waits
  bool begun = false, done = false;
  bool (*ready)(const void*) = nullptr;  // of `condition`: whether it can go on; null: it can
  const void* condition;
  // tensor_core.h: products, issued, and then in groups.
  std::vector<Work> products;
  std::deque<std::vector<Work>> product_groups;
  std::map<const float*, int> sums;  // products of 8-bit floats that an accumulator has summed
  // copy_engine.h: how many copies out of shared memory are not done, and then so for groups.
  std::shared_ptr<int> stores;
  std::deque<std::shared_ptr<int>> store_groups;
  // emulation.h: its own copies into shared memory, issued, and then in groups.
  std::vector<std::shared_ptr<Work>> own_copies;
  std::deque<std::vector<std::shared_ptr<Work>>> own_copy_groups;
  // emulation.h: what it has read last to see a change, and how often.
  const int* asked = nullptr;
  int times = 0;
};

struct Block;
struct Warp {
  Block* home;
  Thread threads[32];
  int running = 32;
  bool slow = false;
  Meeting meeting;
  unsigned char given[2][32][16];  // by its lanes, in this turn of the meeting and in that before
};

// In shared memory (copy_engine.h).
struct Barrier {
  int count, pending, phase = 0;
  int64_t bytes = 0;  // that copies still have to bring
};

// Each block of a cluster has a window of these addresses, and its shared memory begins at kBase of it: a
// kernel may count on 16 bytes of alignment, or on those that it asks for.
#ifndef SHARED_ALIGNMENT
#define SHARED_ALIGNMENT 16
#endif
inline constexpr uint32_t kBase = 0x400 + SHARED_ALIGNMENT;
inline constexpr int kSharedBytes = 227 * 1024, kWindow = 256 * 1024, kMostBlocks = 4;
inline int shared_room = kSharedBytes;            // of a block on the device
inline constexpr int kSharedOfAll = 48 * 1024;    // of a kernel that is allowed no more
inline std::map<void (*)(), int> allowed_shared;  // what cudaFuncSetAttribute has allowed others
inline int launched_shared = 0;                   // bytes of the last launch
alignas(1024) inline unsigned char address_space[kMostBlocks * kWindow];

struct Block {
  uint3 index;
  uint32_t window;   // where its addresses begin
  unsigned first, size;  // of its cluster: the first of the blocks that run, and how many there are
  std::vector<Warp> warps;
  int shared_bytes;
  std::map<uint32_t, Barrier> barriers;
  Meeting named[16];         // 0: __syncthreads
  bool any[2] = {};          // of __syncthreads_or, in this turn and in that before
  int registers_beyond = 0;  // of all threads, beyond those that they began with
};

// Blocks that run at the same time.
struct Machine {
  std::vector<Block> blocks;
  std::map<unsigned, Meeting> meetings;  // of clusters
  std::vector<Work> copies;  // that copy engines have not done yet
  bool progress = false;     // something happened that others may have waited for
  std::string failure;
};

inline Machine* machine = nullptr;
inline Block* block = nullptr;    // of the thread that runs
inline Warp* warp = nullptr;      // of the thread that runs
inline Thread* thread = nullptr;  // null: the scheduler runs, or a copy
inline jmp_buf scheduler;
inline std::mt19937 generator;
inline bool any_order = true;  // of the blocks of a grid; false where one waits for those before it
inline bool early = false;     // products run when they are issued
inline unsigned together = 1;  // blocks with much shared memory that run at the same time
inline Work body;              // the kernel with its arguments

// --- turns

// Only the first turn of a thread changes the context, which calls the system; jumps do not.
inline void to_scheduler() {
  if (_setjmp(thread->place) == 0) _longjmp(scheduler, 1);
}
// An exception does not leave the stack of a coroutine: the scheduler throws.
[[noreturn]] inline void fail(const std::string& what) {
  if (thread == nullptr) throw Failure{what};
  machine->failure = what + " (thread " + std::to_string(threadIdx.x) + ")";
  for (;;) to_scheduler();
}
inline void check(bool right, const char* what) {
  if (!right) fail(what);
}
// The condition stays on the stack of the thread that waits, where the scheduler asks it.
template <class Condition>
void wait_until(const Condition& condition) {
  if (condition()) return;
  thread->condition = &condition;
  thread->ready = [](const void* x) { return (*static_cast<const Condition*>(x))(); };
  to_scheduler();
  thread->ready = nullptr;
}

inline void run_thread() {
  body();
  check(thread->product_groups.empty() && thread->products.empty(),
        "products that nobody waited for");
  check(thread->stores == nullptr, "copies of no group");
  thread->done = true;
  --warp->running;
  machine->progress = true;
  for (;;) to_scheduler();
}
// Until the thread waits.
inline void resume(Thread& next) {
  thread = &next;
  threadIdx = next.index;
  if (_setjmp(scheduler) == 0) {
    if (next.begun) _longjmp(next.place, 1);
    next.begun = true;
    setcontext(&next.start);
  }
  thread = nullptr;
  if (!machine->failure.empty()) throw Failure{machine->failure};
}
inline void resume(Warp& next) {
  warp = &next;
  block = next.home;
  blockIdx = block->index;
  for (Thread& it : next.threads)
    if (!it.done && (it.ready == nullptr || it.ready(it.condition))) resume(it);
}

// Some copies, in any order; one at least where no thread can go on.
inline void do_copies(bool slow, bool stuck) {
  std::vector<Work>& copies = machine->copies;
  for (; !copies.empty() && (stuck || generator() % (slow ? 64 : 3) == 0); stuck = false) {
    const size_t i = generator() % copies.size();
    const Work copy = std::move(copies[i]);
    copies.erase(copies.begin() + i);
    copy();
    machine->progress = true;
  }
}

inline void run_machine() {
  std::vector<Warp*> warps;  // that are not done
  for (Block& of : machine->blocks)
    for (Warp& it : of.warps) warps.push_back(&it);
  bool slow_copies = false;
  for (uint32_t round = 0; !warps.empty(); ++round) {
    if (round % 64 == 0) {
      slow_copies = generator() % 2;
      // Of several blocks, sometimes all warps of one.
      const size_t blocks = machine->blocks.size(), slow = generator() % (2 * blocks);
      for (Warp* it : warps)
        it->slow = generator() % 2 ||
                   (blocks > 1 && slow < blocks && it->home == &machine->blocks[slow]);
    }
    std::shuffle(warps.begin(), warps.end(), generator);
    const bool all = !machine->progress;  // slow ones, too, where the others could not go on
    machine->progress = false;
    for (Warp* it : warps)
      if (all || !it->slow || generator() % 16 == 0) resume(*it);
    warps.erase(std::remove_if(warps.begin(), warps.end(), [](Warp* it) { return !it->running; }),
                warps.end());
    const bool stuck = all && !machine->progress && !warps.empty();
    if (stuck && machine->copies.empty()) throw Failure{"no thread can go on"};
    do_copies(slow_copies, stuck);
  }
  if (!machine->copies.empty()) throw Failure{"copies that nobody waited for"};
  for (const Block& it : machine->blocks) {
    if (it.registers_beyond > 0) throw Failure{"more registers than there are"};
    for (const Meeting& meeting : it.named)
      if (meeting.arrived != 0) throw Failure{"a barrier that some have arrived at, not all"};
  }
}

// --- launches

inline void make_threads(Block& made, unsigned first_stack) {
  constexpr size_t kStack = 128 << 10;
  static std::vector<std::unique_ptr<char[]>> stacks;
  made.warps = std::vector<Warp>(blockDim.x / 32);
  for (Warp& it : made.warps) it.home = &made;
  for (unsigned i = 0; i < blockDim.x; ++i) {
    if (first_stack + i == stacks.size()) stacks.emplace_back(new char[kStack]);
    Thread& it = made.warps[i / 32].threads[i % 32];
    it.index = uint3{i, 0, 0};
    getcontext(&it.start);
    it.start.uc_stack.ss_sp = stacks[first_stack + i].get();
    it.start.uc_stack.ss_size = kStack;
    it.start.uc_link = nullptr;
    makecontext(&it.start, run_thread, 0);
  }
}
inline void run_blocks(const std::vector<unsigned>& indices, unsigned size, int shared_bytes) {
  Machine made;
  made.blocks = std::vector<Block>(indices.size());
  for (unsigned i = 0; i < indices.size(); ++i) {
    Block& it = made.blocks[i];
    it.index = uint3{indices[i], 0, 0};
    it.window = i * kWindow;
    it.first = i / size * size;
    it.size = size;
    it.shared_bytes = shared_bytes;
    std::memset(address_space + it.window + kBase, 0xff, shared_bytes);  // NaN
    make_threads(it, i * blockDim.x);
  }
  machine = &made;
  run_machine();
}
template <class Kernel, class... Arguments>
void launch_clusters(Kernel kernel, dim3 grid, unsigned size, dim3 threads, int shared_bytes,
                     const Arguments&... arguments) {
  if (shared_bytes > shared_room) throw Failure{"too much shared memory"};
  const auto allowed = allowed_shared.find(reinterpret_cast<void (*)()>(kernel));
  if (shared_bytes > (allowed == allowed_shared.end() ? kSharedOfAll : allowed->second))
    throw Failure{"more shared memory than the kernel is allowed"};
  launched_shared = shared_bytes;
  if (threads.x % 32 != 0) throw Failure{"a part of a warp"};
  if (size > kMostBlocks || grid.x % size != 0) throw Failure{"clusters that do not fit the grid"};
  gridDim = grid, blockDim = threads;
  body = [&] { kernel(arguments...); };
  std::vector<unsigned> order(grid.x / size);
  std::iota(order.begin(), order.end(), 0u);
  if (any_order) std::shuffle(order.begin(), order.end(), generator);
  const unsigned most = shared_bytes > kSharedOfAll ? std::min<unsigned>(together, kMostBlocks) : 1;
  const unsigned count = std::max(most / size, 1u);  // of clusters
  for (size_t i = 0; i < order.size(); i += count) {
    std::vector<unsigned> indices;
    for (size_t j = i; j < std::min(i + count, order.size()); ++j)
      for (unsigned rank = 0; rank < size; ++rank) indices.push_back(order[j] * size + rank);
    run_blocks(indices, size, shared_bytes);
  }
}
// kernel<<<grid, threads, shared_bytes>>>(arguments...)
template <class Kernel, class... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 threads, int shared_bytes,
            const Arguments&... arguments) {
  launch_clusters(kernel, grid, 1, threads, shared_bytes, arguments...);
}
template <class Kernel, class... Arguments>
cudaError_t launch_ex(const cudaLaunchConfig_t* config, Kernel kernel,
                      const Arguments&... arguments) {
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = config->attrs[i].val.clusterDim.x;
  launch_clusters(kernel, config->gridDim, size, config->blockDim,
                  static_cast<int>(config->dynamicSmemBytes), arguments...);
  return cudaSuccess;
}

// --- what threads do together

// Returns the turn that the thread takes part in.
inline uint32_t arrive(Meeting& meeting, int threads) {
  check(meeting.arrived == 0 || meeting.threads == threads,
        "a barrier of other numbers of threads");
  meeting.threads = threads;
  const uint32_t turn = meeting.turn;
  if (++meeting.arrived < threads) return turn;
  meeting.arrived = 0;
  ++meeting.turn;
  machine->progress = true;
  return turn;
}
inline void meet(Meeting& meeting, int threads) {
  const uint32_t turn = arrive(meeting, threads);
  wait_until([&] { return meeting.turn != turn; });
}
inline int lane() { return threadIdx.x % 32; }
// The x of all lanes.
template <class T>
std::array<T, 32> exchange(const T& x) {
  Warp& mine = *warp;
  auto& given = mine.given[mine.meeting.turn % 2];
  static_assert(sizeof(x) <= sizeof(given[0]));
  std::memcpy(given[lane()], &x, sizeof(x));
  meet(mine.meeting, 32);
  std::array<T, 32> all;
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], given[i], sizeof(x));
  return all;
}

}  // namespace emulation

inline void __syncthreads() { emulation::meet(emulation::block->named[0], blockDim.x); }
inline bool __syncthreads_or(bool x) {
  emulation::Meeting& all = emulation::block->named[0];
  bool& any = emulation::block->any[all.turn % 2];
  any = x || (all.arrived > 0 && any);
  __syncthreads();
  return any;
}
inline bool __syncthreads_and(bool x) { return !__syncthreads_or(!x); }
template <class T>
T __shfl_sync(uint32_t, T x, int from) {
  return emulation::exchange(x)[from % 32];
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int by) {
  const int from = emulation::lane() - by;
  return emulation::exchange(x)[from < 0 ? emulation::lane() : from];
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int by) {
  return emulation::exchange(x)[emulation::lane() ^ by];
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  const auto all = emulation::exchange(x);
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= static_cast<uint32_t>(all[i]) << i;
  return found;
}
inline bool __any_sync(uint32_t lanes, bool x) { return __ballot_sync(lanes, x) != 0; }
inline bool __all_sync(uint32_t lanes, bool x) { return __ballot_sync(lanes, x) == ~0u; }
inline void __syncwarp() { emulation::exchange(true); }

namespace flashsci::ptx {

using namespace emulation;

inline bool elect() { return exchange(lane())[0] == lane(); }
inline int redux_max(int x) {
  const auto all = exchange(x);
  return *std::max_element(all.begin(), all.end());
}
inline Meeting& named_barrier(int id, int threads) {
  check(id > 0 && id < 16 && threads % 32 == 0, "no such named barrier");
  return block->named[id];
}
inline void barrier_sync(int id, int threads) { meet(named_barrier(id, threads), threads); }
inline bool barrier_all(int id, int threads, bool x) {
  Meeting& meeting = named_barrier(id, threads);
  bool& all = meeting.all[meeting.turn % 2];
  all = (meeting.arrived == 0 || all) && x;
  meet(meeting, threads);
  return all;
}
inline void barrier_arrive(int id, int threads) { arrive(named_barrier(id, threads), threads); }
inline uint32_t cluster_rank() { return block->window / kWindow - block->first; }
inline void cluster_sync() {
  meet(machine->meetings[block->first], static_cast<int>(block->size * blockDim.x));
}
inline uint32_t map_shared(uint32_t address, uint32_t rank) {
  check(rank < block->size, "no such block in the cluster");
  return address % kWindow + (block->first + rank) * kWindow;
}

}  // namespace flashsci::ptx
