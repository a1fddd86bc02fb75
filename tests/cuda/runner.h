// What the runners share: numbers of each precision on the host and the device, and where the
// elements of a tensor are.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/include/flashsci.h"

#define CUDA(call)                                                        \
  do {                                                                    \
    const cudaError_t error = (call);                                     \
    if (error != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      std::exit(255);                                                     \
    }                                                                     \
  } while (false)

// Whether each argument is in the unit's name or the case's; none: all are asked for.
inline bool asked(int count, char** words, const char* unit, const char* name) {
  for (int i = 1; i < count; ++i)
    if (std::strstr(unit, words[i]) == nullptr && std::strstr(name, words[i]) == nullptr)
      return false;
  return true;
}

inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float fp16_to_float(uint16_t x) {
  const int exponent = (x >> 10) & 31, mantissa = x & 1023;
  const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(1024.f + mantissa, exponent - 25);
  return x & 0x8000 ? -magnitude : magnitude;
}

// Rounds towards zero, which is as good as any for drawing inputs of normal size.
inline uint16_t float_to_fp16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
  if (std::isinf(x)) return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7c00);
  if (exponent <= 0) return 0;
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 1023));
}

// Strides of [B, H, S, D]; heads_inside: [B, S, H, D] in memory.
inline FlashsciStrides layout(int64_t heads, int64_t seq, int64_t dim, bool heads_inside) {
  return heads_inside ? FlashsciStrides{seq * heads * dim, 0, dim, heads * dim}
                      : FlashsciStrides{heads * seq * dim, 0, seq * dim, dim};
}

inline int64_t at(const FlashsciStrides& s, int b, int h, int row) {
  return b * s.batch0 + h * s.head + row * s.row;
}

// Padding: the last quarter of a sequence's rows is zero, and so is every seventh row.
inline bool is_padding(int row, int seq) { return row >= seq - seq / 4 || row % 7 == 3; }

// A mask as a number, as far as a dtype has it.
inline float number_for(float x, bool fp16) { return fp16 ? std::fmax(x, -65504.f) : x; }

inline int64_t at(const FlashsciScoreStrides& s, int b, int h, int i, int j) {
  return b * s.batch0 + h * s.head + i * s.row + j * s.column;
}

using Numbers = std::vector<float>;

struct Precision {
  const char* name;
  int bytes;
  double eps;
  uint16_t (*encode)(float);
  float (*decode)(uint16_t);
};

// Device memory of exactly the size of a host vector, as elements of a precision; freed at the end.
struct Device {
  std::vector<void*> owned;
  ~Device() {
    for (void* x : owned) cudaFree(x);
  }
  void* bytes(const void* host, size_t size) {
    void* device = nullptr;
    CUDA(cudaMalloc(&device, std::max<size_t>(size, 1)));
    owned.push_back(device);
    if (host != nullptr) CUDA(cudaMemcpy(device, host, size, cudaMemcpyHostToDevice));
    return device;
  }
  template <class T>
  T* put(const std::vector<T>& host) {
    return static_cast<T*>(bytes(host.data(), host.size() * sizeof(T)));
  }
  void* numbers(const Numbers& x, const Precision& t) {
    if (t.bytes == 4) return put(x);
    std::vector<uint16_t> encoded(x.size());
    std::transform(x.begin(), x.end(), encoded.begin(), t.encode);
    return put(encoded);
  }
  void* poison(size_t size) {
    void* device = bytes(nullptr, size);
    CUDA(cudaMemset(device, 0xff, size));  // NaN in every dtype
    return device;
  }
};

inline Numbers from_device(const void* device, size_t count, const Precision& t) {
  Numbers x(count);
  if (t.bytes == 4) {
    CUDA(cudaMemcpy(x.data(), device, count * 4, cudaMemcpyDeviceToHost));
  } else {
    std::vector<uint16_t> encoded(count);
    CUDA(cudaMemcpy(encoded.data(), device, count * 2, cudaMemcpyDeviceToHost));
    std::transform(encoded.begin(), encoded.end(), x.begin(), t.decode);
  }
  return x;
}

inline const Precision kBf16{"bf16", 2, 1.0 / 128, float_to_bf16, bf16_to_float};
inline const Precision kFp16{"fp16", 2, 1.0 / 1024, float_to_fp16, fp16_to_float};
inline const Precision kFp32{"fp32", 4, 1.0 / (1 << 20), nullptr, nullptr};
