// Qgmma<136> of wgmma.cuh: 128 columns of V and 8 more.
#pragma once
#include "wgmma.cuh"

#define FLASHSCI_D68 FLASHSCI_D64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define FLASHSCI_NAMES68 FLASHSCI_NAMES64 ", %64, %65, %66, %67"

namespace flashsci::ptx {

FLASHSCI_QGMMA_WIDTH(136, 68, "%68", "%69", "%70", "%71", "%72", "%73")

}  // namespace flashsci::ptx
