// fp16 instances of attention with a bias whose heads lie side by side.
#include "../../core/dtype_f16.cuh"
#include "launch.cuh"

extern "C" int flashsci_forward_pair_fp16(const FlashsciForwardParams* params,
                                          FlashsciStream stream) {
  return flashsci::sm90::pair::launch_forward<flashsci::Float16>(*params,
                                                                 static_cast<cudaStream_t>(stream));
}

extern "C" int flashsci_takes_pair_fp16(const FlashsciForwardParams* params) {
  return flashsci::sm90::pair::takes_call<flashsci::Float16>(*params);
}
