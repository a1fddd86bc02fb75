// The box of one copy of a tensor map: a type with which the host encodes maps and the device
// counts bytes, so that a barrier cannot expect other sizes than are loaded. A barrier expects the
// sizes of the stages it guards; every load asserts that its boxes fill its stage.
#pragma once

namespace flashsci::sm90 {

template <int kRows_, int kColumns_ = 64, int kElementBytes = 2>
struct Box {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kRowBytes = kColumns * kElementBytes, kBytes = kRows * kRowBytes;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "TMA's swizzles");
};

}  // namespace flashsci::sm90
