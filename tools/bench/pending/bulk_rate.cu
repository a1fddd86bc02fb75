// How fast one SM, and all of them, take small bulk copies (cp.async.bulk) from global into shared memory.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -o bulk_rate bulk_rate.cu && ./bulk_rate
//
// Copies of 80, 144, 272 and 528 bytes (windows of 32, 64, 128 and 256 keys of 16 bits), issued by one elected thread, by the 32
// lanes of one warp, and by the 64 lanes of two. A stage of kCopies copies has one barrier; kStages of them are in flight.
// "1, box": what a row of a box of TMA takes, by one thread (boxes of 64 rows of 128 bytes): the rate to compare with.
// Table 1: clocks of one SM for a copy, from 4 MB that L2 holds, one CTA. Table 2: the same and TB/s with a CTA on every SM, from
// 4 GB. Sources are rows 2,046 bytes apart, as those of a bias of 1,023 keys, rounded down to 16 bytes.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(x)                                                                          \
  do {                                                                                    \
    const cudaError_t error = (x);                                                        \
    if (error != cudaSuccess) {                                                           \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error));          \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

constexpr int kStages = 4, kCopies = 192, kRounds = 256;  // copies of a stage; stages of a run

__device__ __forceinline__ uint32_t address(const void* x) { return static_cast<uint32_t>(__cvta_generic_to_shared(x)); }
__device__ __forceinline__ void init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(chosen));
  return chosen != 0;
}

// kLanes: threads that issue, 1, 32 or 64. The block has 64 threads; those that issue wait for their own stages.
template <int kBytes, int kLanes>
__global__ void __launch_bounds__(64, 1) copies(const char* source, uint64_t size, long long* clocks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t full[kStages];
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) init(address(&full[i]), kLanes);
  __syncthreads();
  const bool issues = kLanes == 1 ? threadIdx.x < 32 && elect() : threadIdx.x < kLanes;
  if (!issues) return;
  const int lane = kLanes == 1 ? 0 : threadIdx.x;
  // Each CTA has a part of its own; rows go on from stage to stage and begin again at its end.
  const uint64_t part = size / gridDim.x / 16 * 16;
  const char* base = source + blockIdx.x * part;
  const uint64_t end = part - 1024;
  uint64_t at = lane * 2046;
  const long long begin = clock64();
  for (int round = 0; round < kRounds + kStages; ++round) {
    const int stage = round % kStages;
    const uint32_t barrier = address(&full[stage]);
    if (round >= kStages) wait(barrier, (round / kStages - 1) & 1);
    if (round >= kRounds) continue;
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = lane; i < kCopies; i += kLanes) {
      // Some copies of a stage write the same place.
      bulk_load(address(shared) + stage * (160 * 1024 / kStages) + i % 64 * kBytes, base + (at & ~uint64_t{15}), kBytes, barrier);
      bytes += kBytes;
      at += kLanes * 2046;
      if (at >= end) at = lane * 2046;
    }
    arrive_expect(barrier, bytes);
  }
  if (lane == 0) clocks[blockIdx.x] = clock64() - begin;
}

// Such rows as boxes of TMA, 64 rows of 128 bytes 2,048 bytes apart, by one thread.
__global__ void __launch_bounds__(64, 1) boxes(const __grid_constant__ CUtensorMap map, int rows_of_part, long long* clocks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t full[kStages];
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) init(address(&full[i]), 1);
  __syncthreads();
  if (threadIdx.x >= 32 || !elect()) return;
  const int first = blockIdx.x * rows_of_part;
  int row = 0;
  const long long begin = clock64();
  for (int round = 0; round < kRounds + kStages; ++round) {
    const int stage = round % kStages;
    const uint32_t barrier = address(&full[stage]);
    if (round >= kStages) wait(barrier, (round / kStages - 1) & 1);
    if (round >= kRounds) continue;
    arrive_expect(barrier, kCopies * 128);
    for (int box = 0; box < kCopies / 64; ++box) {
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];\n" ::"r"(
              address(shared) + (stage * (kCopies / 64) + box) * 8192),
          "l"(&map), "r"(barrier), "r"(0), "r"(first + row)
          : "memory");
      row += 64;
      if (row + 64 > rows_of_part) row = 0;
    }
  }
  clocks[blockIdx.x] = clock64() - begin;
}

struct Found {
  double clocks, bytes_per_second;
};

template <class Launch>
Found measure(int ctas, int bytes, long long* clocks, const Launch& launch) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  Found best{1e30, 0};
  for (int i = 0; i < 5; ++i) {
    CHECK(cudaEventRecord(begin));
    launch();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaGetLastError());
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    double sum = 0;
    for (int c = 0; c < ctas; ++c) sum += static_cast<double>(clocks[c]);
    const double each = sum / ctas / (double(kRounds) * kCopies);
    if (each < best.clocks) best.clocks = each;
    const double rate = double(ctas) * kRounds * kCopies * bytes / (ms * 1e-3);
    if (rate > best.bytes_per_second) best.bytes_per_second = rate;
  }
  return best;
}

template <int kBytes, int kLanes>
void line(const char* memory, uint64_t small, uint64_t large, int processors, long long* clocks) {
  const int shared = 160 * 1024;
  CHECK(cudaFuncSetAttribute(copies<kBytes, kLanes>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const auto run = [&](int ctas, uint64_t size) {
    return measure(ctas, kBytes, clocks, [&] { copies<kBytes, kLanes><<<ctas, 64, shared>>>(memory, size, clocks); });
  };
  run(1, small);  // into L2
  const Found one = run(1, small), all_l2 = run(processors, small * 6), all = run(processors, large);
  std::printf("%5d %7d | %8.1f | %8.1f %6.2f | %8.1f %6.2f\n", kBytes, kLanes, one.clocks, all_l2.clocks,
              all_l2.bytes_per_second * 1e-12, all.clocks, all.bytes_per_second * 1e-12);
}

template <int kBytes>
void lines(const char* memory, uint64_t small, uint64_t large, int processors, long long* clocks) {
  line<kBytes, 1>(memory, small, large, processors, clocks);
  line<kBytes, 32>(memory, small, large, processors, clocks);
  line<kBytes, 64>(memory, small, large, processors, clocks);
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const int processors = device.multiProcessorCount;
  std::printf("%s, %d SMs; clocks are those of one SM for one copy, in stages of %d copies\n", device.name, processors, kCopies);
  const uint64_t small = 4 << 20, large = uint64_t{4} << 30;
  char* memory;
  long long* clocks;
  CHECK(cudaMalloc(&memory, large));
  CHECK(cudaMemset(memory, 0, large));
  CHECK(cudaMallocManaged(&clocks, 1024 * sizeof(long long)));
  std::printf("%5s %7s | %8s | %15s | %15s\n", "bytes", "threads", "1 SM, L2", "all SMs, 24 MB", "all SMs, 4 GB");
  std::printf("%5s %7s | %8s | %8s %6s | %8s %6s\n", "", "", "clocks", "clocks", "TB/s", "clocks", "TB/s");
  lines<80>(memory, small, large, processors, clocks);
  lines<144>(memory, small, large, processors, clocks);
  lines<272>(memory, small, large, processors, clocks);
  lines<528>(memory, small, large, processors, clocks);

  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &status));
  const auto encode = reinterpret_cast<CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)>(function);
  const auto of_boxes = [&](int ctas, uint64_t size) {
    const cuuint64_t rows = size / 2048, dims[2] = {1024, rows}, strides[1] = {2048};
    const cuuint32_t box[2] = {64, 64}, steps[2] = {1, 1};
    CUtensorMap map;
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
      std::printf("no map\n"), std::exit(1);
    CHECK(cudaFuncSetAttribute(boxes, cudaFuncAttributeMaxDynamicSharedMemorySize, 160 * 1024));
    return measure(ctas, 128, clocks, [&] { boxes<<<ctas, 64, 160 * 1024>>>(map, static_cast<int>(rows / ctas), clocks); });
  };
  of_boxes(1, small);
  const Found one = of_boxes(1, small), all_l2 = of_boxes(processors, small * 6), all = of_boxes(processors, large);
  std::printf("%5d %7s | %8.1f | %8.1f %6.2f | %8.1f %6.2f\n", 128, "1, box", one.clocks, all_l2.clocks,
              all_l2.bytes_per_second * 1e-12, all.clocks, all.bytes_per_second * 1e-12);
  return 0;
}
