// WgmmaBf16<N>: wgmma with bf16 operands.
#pragma once
#include "wgmma_widths.cuh"

namespace flashsci::ptx {

FLASHSCI_WGMMA(WgmmaBf16, "bf16")

}  // namespace flashsci::ptx
