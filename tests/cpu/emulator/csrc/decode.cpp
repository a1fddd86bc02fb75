// Decoding, csrc/sm90/decode, as a library for the host.
#include "emulation.h"

// After what takes the place of csrc/ptx.
#include "sm90/decode/launch.cuh"

using namespace flashsci::sm90;

namespace {

template <class Op>
cudaError_t launch(const FlashsciForwardParams& p) {
  if (!decode::is_decoding(p)) return cudaErrorNotSupported;
  fwd::ForwardArgs a;
  a.p = p;
  a.scores = flashsci::plan_scores(p.scale, p.softcap, p.scale > 0.f);
  const int dim = std::max(p.head_dim, p.head_dim_v);
  return dim <= 64    ? decode::launch_decode<Op, 64>(a, nullptr)
         : dim <= 128 ? decode::launch_decode<Op, 128>(a, nullptr)
                      : decode::launch_decode<Op, 256>(a, nullptr);
}

}  // namespace

extern "C" {
int emulate(const FlashsciForwardParams* params, int bf16, int processors, unsigned seed,
            char* text, int size) {
  return emulation::run(bf16 != 0, processors, seed, text, size,
                        [&](auto op) { return launch<decltype(op)>(*params); });
}
int64_t workspace(const FlashsciForwardParams* params, int processors) {
  emulation::processors = processors;
  return decode::is_decoding(*params) ? decode::decode_workspace(*params) : 0;
}
}
