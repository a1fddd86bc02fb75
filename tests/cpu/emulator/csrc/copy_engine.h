// Shared memory and the copy engine on the host: mbarriers, TMA boxes and bulk copies.
//
// A copy is done at any time from when it is asked for until somebody waits for it, in any order
// with others, and in one go: waiting for what it reads is waiting for what it writes. It is an
// error if an address is misaligned or outside, and if a barrier gets more arrivals than it counts;
// one that expects other bytes than come never completes, so that no thread can go on.
#pragma once
#include <cuda.h>

#include "thread_block.h"

namespace emulation {

// --- shared memory and its barriers

inline Block& owner(uint32_t address) { return machine->blocks.at(address / kWindow); }
inline unsigned char* of_block(const Block& whose, uint32_t address, int bytes, int alignment) {
  check(address % alignment == 0, "a misaligned address of shared memory");
  const int64_t offset = int64_t{address} - whose.window - kBase;
  check(offset >= 0 && offset + bytes <= whose.shared_bytes, "beyond shared memory");
  return address_space + address;
}
// Of the block's own shared memory.
inline unsigned char* at(uint32_t address, int bytes, int alignment) {
  return of_block(*block, address, bytes, alignment);
}
// Of the shared memory of any block, which must not have ended.
inline unsigned char* there(uint32_t address, int bytes, int alignment) {
  const Block& whose = owner(address);
  bool runs = false;
  for (const Warp& it : whose.warps) runs |= it.running > 0;
  check(runs, "shared memory of a block that has ended");
  return of_block(whose, address, bytes, alignment);
}
inline Barrier& barrier_at(uint32_t address) {
  Block& whose = owner(address);
  const auto found = whose.barriers.find(address);
  if (found == whose.barriers.end()) fail("no barrier there");
  return found->second;
}
// Some arrivals, and some bytes more to come (or, when a copy has brought them, fewer).
inline void arrive(uint32_t address, int arrivals, int64_t bytes) {
  Barrier& barrier = barrier_at(address);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  check(barrier.pending >= 0, "more arrivals than the barrier counts");
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
  machine->progress = true;
}

// --- tensor maps

// What stands in the 128 bytes of a CUtensorMap.
struct Map {
  unsigned char* base;
  uint64_t size[5], stride[5];  // elements, bytes
  uint32_t box[3];              // columns, rows, rows of the next dimension
  uint32_t element;             // bytes
  uint32_t row_bytes;           // of a row of the box
  uint32_t span;                // bytes that are swizzled, those of a row; 16: none are
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

// cuTensorMapEncodeTiled, for boxes of rows as long as the swizzle, or without one.
inline CUresult encode(CUtensorMap* target, CUtensorMapDataType type, cuuint32_t rank, void* base,
                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map map;
  map.base = static_cast<unsigned char*>(base);
  map.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                                                        : 2;
  map.row_bytes = box[0] * map.element;
  map.span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
             : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
             : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                    : 16;
  if (rank != 5 || reinterpret_cast<uintptr_t>(base) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 5; ++i) {
    map.size[i] = size[i];
    map.stride[i] = i == 0 ? map.element : stride[i - 1];
    if (i > 0 && map.stride[i] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] > 256 || (i > 2 && box[i] != 1)) return CUDA_ERROR_INVALID_VALUE;
  }
  map.box[0] = box[0], map.box[1] = box[1], map.box[2] = box[2];
  const bool fits = map.span == 16 ? map.row_bytes % 16 == 0 : map.row_bytes == map.span;
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(target, &map, sizeof(map));
  return CUDA_SUCCESS;
}

// Where TMA puts what has this address in rows of `span`: pieces of 16 bytes change places.
inline uint32_t swizzled(uint32_t address, int span) {
  return address ^ ((address >> 3) & (span - 16));
}

// A box of a tensor and its place in shared memory.
struct Box {
  Map map;
  uint32_t address;
  int64_t start[5];

  Box(const void* source, uint32_t address, int c0, int c1, int c2, int c3, int c4)
      : address(address), start{c0, c1, c2, c3, c4} {
    std::memcpy(&map, source, sizeof(map));
    // Swizzles are of addresses: single rows may be anywhere.
    check(map.box[1] == 1 || address % (map.span * 8) == 0,
          "a box that is not aligned to its swizzle");
    // The hardware stops such a load as an illegal instruction.
    check(c0 * map.element % 16 == 0, "a box that begins at no multiple of 16 bytes in memory");
    at(address, bytes(), 128);
  }
  uint32_t bytes() const { return map.box[2] * map.box[1] * map.row_bytes; }

  // Calls move(shared memory, tensor or null beyond it) for each element.
  template <class Move>
  void for_each(const Move& move) const {
    for (uint32_t row = 0; row < map.box[1] * map.box[2]; ++row)
      for (uint32_t column = 0; column < map.box[0]; ++column) {
        const int64_t offset[5] = {column, row % map.box[1], row / map.box[1]};
        unsigned char* global = map.base;
        bool inside = true;
        for (int i = 0; i < 5; ++i) {
          const int64_t position = start[i] + offset[i];
          inside &= position >= 0 && position < static_cast<int64_t>(map.size[i]);
          global += position * static_cast<int64_t>(map.stride[i]);
        }
        const uint32_t place = address + row * map.row_bytes + column * map.element;
        move(address_space + swizzled(place, map.span), inside ? global : nullptr);
      }
  }
};

// --- copies

// Into shared memory; a barrier hears of it.
inline void load_later(uint32_t barrier, Work load) {
  barrier_at(barrier);
  machine->copies.push_back(std::move(load));
}
inline void load_later(uint32_t barrier, uint32_t bytes, Work load) {
  load_later(barrier, [=, load = std::move(load)] {
    load();
    arrive(barrier, 0, -int64_t{bytes});
  });
}
// Out of it; the thread waits for groups of them.
inline void store_later(Work store) {
  if (thread->stores == nullptr) thread->stores = std::make_shared<int>(0);
  ++*thread->stores;
  machine->copies.push_back([group = thread->stores, store = std::move(store)] {
    store();
    --*group;
  });
}
inline void check_bulk(const void* global, uint32_t address, uint32_t bytes) {
  at(address, bytes, 16);
  check(bytes % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0, "a misaligned copy");
}

}  // namespace emulation

namespace flashsci::ptx {

inline void mbarrier_init(uint32_t barrier, uint32_t count) {
  at(barrier, 8, 8);
  const int n = static_cast<int>(count);
  check(block->barriers.emplace(barrier, Barrier{n, n}).second, "a barrier made twice");
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier, uint32_t count = 1) {
  arrive(barrier, static_cast<int>(count), 0);
}
inline void mbarrier_arrive_there(uint32_t mapped) {
  there(mapped, 8, 8);
  arrive(mapped, 1, 0);
}
inline void mbarrier_arrive_after(uint32_t barrier, uint32_t) { mbarrier_arrive(barrier); }
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) { arrive(barrier, 1, bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Barrier& it = barrier_at(barrier);
  wait_until([&] { return it.phase != static_cast<int>(parity); });
}
inline void mbarrier_sleep(uint32_t barrier, uint32_t parity) { mbarrier_wait(barrier, parity); }

inline void prefetch_tensor_map(const void*) {}
inline void tma_load_5d(uint32_t target, const void* map, uint32_t barrier, int c0, int c1, int c2,
                        int c3, int c4) {
  const Box box(map, target, c0, c1, c2, c3, c4);
  load_later(barrier, box.bytes(), [box] {
    box.for_each([&](unsigned char* to, const unsigned char* from) {
      for (uint32_t i = 0; i < box.map.element; ++i) to[i] = from == nullptr ? 0 : from[i];
    });
  });
}
inline void tma_store_5d(const void* map, uint32_t source, int c0, int c1, int c2, int c3, int c4) {
  store_later([box = Box(map, source, c0, c1, c2, c3, c4)] {
    box.for_each([&](const unsigned char* from, unsigned char* to) {
      if (to != nullptr) std::memcpy(to, from, box.map.element);
    });
  });
}
inline void tma_add_5d(const void* map, uint32_t source, int c0, int c1, int c2, int c3, int c4) {
  store_later([box = Box(map, source, c0, c1, c2, c3, c4)] {
    check(box.map.element == 4, "numbers of 16 bits are not added");
    box.for_each([&](const unsigned char* from, unsigned char* to) {
      if (to != nullptr)
        *reinterpret_cast<float*>(to) += *reinterpret_cast<const float*>(from);
    });
  });
}

inline void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  check_bulk(source, target, bytes);
  load_later(barrier, bytes, [=] { std::memcpy(address_space + target, source, bytes); });
}
inline void bulk_store(void* target, uint32_t source, uint32_t bytes) {
  check_bulk(target, source, bytes);
  store_later([=] { std::memcpy(target, address_space + source, bytes); });
}
inline void bulk_add_f32(void* target, uint32_t source, uint32_t bytes) {
  check_bulk(target, source, bytes);
  store_later([=] {
    const auto* from = reinterpret_cast<const float*>(address_space + source);
    for (uint32_t i = 0; i < bytes / 4; ++i) static_cast<float*>(target)[i] += from[i];
  });
}
inline void bulk_send(uint32_t mapped, uint32_t source, uint32_t bytes, uint32_t barrier) {
  at(source, bytes, 16);
  check(owner(mapped).window == owner(barrier).window, "a barrier of another block than the bytes");
  load_later(barrier, bytes, [=] {
    std::memcpy(there(mapped, bytes, 16), there(source, bytes, 16), bytes);
  });
}
inline void bulk_commit() { thread->store_groups.push_back(std::move(thread->stores)); }
// The oldest groups, but for kPending, are done.
template <int kPending>
void bulk_wait() {
  auto& groups = thread->store_groups;
  for (; groups.size() > kPending; groups.pop_front())
    wait_until([oldest = groups.front()] { return oldest == nullptr || *oldest == 0; });
}
template <int kPending>
void bulk_wait_read() {
  bulk_wait<kPending>();
}

inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}

}  // namespace flashsci::ptx
