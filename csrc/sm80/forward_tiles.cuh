// Included by forward.cuh inside flashsci::sm80: the tile shape of each padded head dimension.
// Tiling<head dim, query rows, keys, warps, stages, CTAs per SM>

template <int kHeadDim>
struct TilesOf;

#if FLASHSCI_TILE_PRESET == 0
template <> struct TilesOf<32> { using Type = Tiling<32, 128, 64, 4, 1, 2>; };
template <> struct TilesOf<64> { using Type = Tiling<64, 128, 64, 4, 1, 2>; };
template <> struct TilesOf<96> { using Type = Tiling<96, 128, 64, 4, 1, 2>; };
template <> struct TilesOf<128> { using Type = Tiling<128, 128, 64, 4, 1, 2>; };
template <> struct TilesOf<192> { using Type = Tiling<192, 64, 32, 4, 1, 2>; };
template <> struct TilesOf<256> { using Type = Tiling<256, 64, 32, 4, 1, 2>; };
#else
#ifndef FLASHSCI_TILES_32
#define FLASHSCI_TILES_32 Tiling<32, 128, 128, 4, 1, 2>
#endif
#ifndef FLASHSCI_TILES_64
#define FLASHSCI_TILES_64 Tiling<64, 128, 128, 4, 1, 2>
#endif
#ifndef FLASHSCI_TILES_96
#define FLASHSCI_TILES_96 Tiling<96, 128, 64, 4, 1, 2>
#endif
#ifndef FLASHSCI_TILES_128
#define FLASHSCI_TILES_128 Tiling<128, 128, 64, 4, 1, 2>
#endif
#ifndef FLASHSCI_TILES_192
#define FLASHSCI_TILES_192 Tiling<192, 64, 64, 4, 1, 2>
#endif
#ifndef FLASHSCI_TILES_256
#define FLASHSCI_TILES_256 Tiling<256, 64, 64, 4, 1, 2>
#endif
template <> struct TilesOf<32> { using Type = FLASHSCI_TILES_32; };
template <> struct TilesOf<64> { using Type = FLASHSCI_TILES_64; };
template <> struct TilesOf<96> { using Type = FLASHSCI_TILES_96; };
template <> struct TilesOf<128> { using Type = FLASHSCI_TILES_128; };
template <> struct TilesOf<192> { using Type = FLASHSCI_TILES_192; };
template <> struct TilesOf<256> { using Type = FLASHSCI_TILES_256; };
#endif

template <int kHeadDim>
using Tiles = typename TilesOf<kHeadDim>::Type;
