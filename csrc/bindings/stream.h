// The one CUDA symbol we take from torch. Weak: it lives in libtorch_cuda, which CPU builds lack.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
