// WgmmaF16<N>: wgmma with f16 operands.
#pragma once
#include "wgmma_widths.cuh"

namespace flashsci::ptx {

FLASHSCI_WGMMA(WgmmaF16, "f16")

}  // namespace flashsci::ptx
