// The two products of attention in tile registers, for bfloat16 caches; see Attention.
//
// Tiles 0 to 3 are sums; 4 is 16 queries of 32 dimensions, 6 is 16 keys of 32 dimensions; 5 is 16 rows of weights of 16
// slots, 7 the values of these slots.
#pragma once

#include "kernels/amx_tiles.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

// With fewer queries, tiles would be mostly empty.
constexpr int kAttentionTileRows = 8;

class AttentionTiles {
   public:
    AttentionTiles() {
        static const TileConfig config = [] {
            TileConfig made;
            made.row_bytes[5] = 32;
            made.rows[7] = 8;
            return made;
        }();
        _tile_loadconfig(&config);
    }
    ~AttentionTiles() { _tile_release(); }

    // scores[16][width] of 16 queries [16][dim] and the keys of a block, [dim / 2][slots][2].
    static void scores(const bf16* queries, int dim, const bf16* keys, int slots, float* scores, int width) {
        for (int panel = 0; panel < slots / kPanel; panel += 2) {
            const bf16* from = keys + int64_t(panel) * kPanel * 2;
            const bool two = panel + 1 < slots / kPanel;
            _tile_zero(0);
            _tile_zero(1);
            for (int d = 0; d < dim; d += kTileDepth) {
                _tile_loadd(4, queries + d, int64_t(dim) * 2);
                _tile_loadd(6, from + int64_t(d) * slots, int64_t(slots) * 4);
                _tile_dpbf16ps(0, 4, 6);
                if (two) {
                    _tile_loadd(6, from + int64_t(d) * slots + 2 * kPanel, int64_t(slots) * 4);
                    _tile_dpbf16ps(1, 4, 6);
                }
            }
            _tile_stored(0, scores + panel * kPanel, int64_t(width) * 4);
            if (two) _tile_stored(1, scores + (panel + 1) * kPanel, int64_t(width) * 4);
        }
    }

    // sums[16][dim] += weights[16][width] . values, for 2 or 4 panels of 16 dimensions; values_of(block) are
    // the panels of a block, each of slots / 2 pairs.
    template <int Panels, typename ValuesOf>
    static void values(const bf16* weights, int width, const ValuesOf& values_of, int blocks, int slots, float* sums,
                       int dim) {
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
                _tile_loadd(7, from, kTileBytes);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, from + panel_size, kTileBytes);
                _tile_dpbf16ps(1, 5, 7);
                if constexpr (Panels == 4) {
                    _tile_loadd(7, from + 2 * panel_size, kTileBytes);
                    _tile_dpbf16ps(2, 5, 7);
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
};

#endif

}  // namespace neso::NESO_ISA
