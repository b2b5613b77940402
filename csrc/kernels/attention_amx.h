// The two products of attention in tile registers, for bfloat16 caches; see Attention.
#pragma once

#include "kernels/amx_tiles.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

// With fewer queries, tiles would be mostly empty.
constexpr int kAttentionTileRows = 8;

// scores[16][width] of 16 queries [16][dim] and 1 or 4 panels of keys, [dim / 2][slots][2]; keys_of(p) is the first key
// of panel p. A single panel would wait for the latency of each product.
//
// Tiles 0 to 3 are scores, 4 is 16 queries of 32 dimensions, 6 and 7 are 16 keys of 32 dimensions.
template <int Panels, typename KeysOf>
NESO_INLINE void tile_scores(const bf16* queries, int dim, const KeysOf& keys_of, int slots, float* scores, int width) {
    const int64_t key_bytes = int64_t(slots) * 4, query_bytes = int64_t(dim) * 2, score_bytes = int64_t(width) * 4;
    const bf16* keys[Panels];
    for (int p = 0; p < Panels; ++p) keys[p] = keys_of(p);
    _tile_zero(0);
    if constexpr (Panels == 4) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int d = 0; d < dim; d += kTileDepth) {
        const int64_t at = int64_t(d) * slots;
        _tile_loadd(4, queries + d, query_bytes);
        _tile_loadd(6, keys[0] + at, key_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Panels == 4) {
            _tile_loadd(7, keys[1] + at, key_bytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, keys[2] + at, key_bytes);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, keys[3] + at, key_bytes);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, scores, score_bytes);
    if constexpr (Panels == 4) {
        _tile_stored(1, scores + kPanel, score_bytes);
        _tile_stored(2, scores + 2 * kPanel, score_bytes);
        _tile_stored(3, scores + 3 * kPanel, score_bytes);
    }
}

// Configures the tiles of `tile_values`: 0 to 3 are sums, 5 is 16 rows of weights of 16 slots, 6 and 7 are 16 dimensions
// of the values of these slots.
class ValueTiles {
   public:
    ValueTiles() {
        static const TileConfig config = [] {
            TileConfig made;
            made.row_bytes[5] = 32;
            made.rows[6] = made.rows[7] = 8;
            return made;
        }();
        _tile_loadconfig(&config);
    }
    ~ValueTiles() { _tile_release(); }
};

// sums[16][dim] += weights[16][width] . values, for 2 or 4 panels of 16 dimensions; values_of(block) are the panels of a
// block, each of slots / 2 pairs.
template <int Panels, typename ValuesOf>
NESO_INLINE void tile_values(const bf16* weights, int width, const ValuesOf& values_of, int blocks, int slots,
                             float* sums, int dim) {
    const int64_t sum_bytes = int64_t(dim) * 4, panel_size = int64_t(slots) * kPanel;
    _tile_loadd(0, sums, sum_bytes);
    _tile_loadd(1, sums + kPanel, sum_bytes);
    if constexpr (Panels == 4) {
        _tile_loadd(2, sums + 2 * kPanel, sum_bytes);
        _tile_loadd(3, sums + 3 * kPanel, sum_bytes);
    }
    for (int block = 0; block < blocks; ++block) {
        const bf16* values = values_of(block);
        for (int slot = 0; slot < slots; slot += kPanel) {
            const bf16* from = values + int64_t(slot) * kPanel;
            _tile_loadd(5, weights + block * slots + slot, int64_t(width) * 2);
            _tile_loadd(6, from, kTileBytes);
            _tile_dpbf16ps(0, 5, 6);
            _tile_loadd(7, from + panel_size, kTileBytes);
            _tile_dpbf16ps(1, 5, 7);
            if constexpr (Panels == 4) {
                _tile_loadd(6, from + 2 * panel_size, kTileBytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_loadd(7, from + 3 * panel_size, kTileBytes);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + kPanel, sum_bytes);
    if constexpr (Panels == 4) {
        _tile_stored(2, sums + 2 * kPanel, sum_bytes);
        _tile_stored(3, sums + 3 * kPanel, sum_bytes);
    }
}

#endif

}  // namespace neso::NESO_ISA
