// bfloat16 products in tile registers (Intel AMX): 16 x 16 sums of 32 products in one instruction.
#pragma once

#if defined(__AMX_BF16__)

#include "kernels/gemm_store.h"

namespace neso::NESO_ISA {

// Fewer rows than this: the tiles stay mostly empty, and registers do.
constexpr int kTileRowsWorthwhile = 5;
constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Holds the tile registers; given back at the end, since a thread that owns them costs 8 KB at every switch.
class Tiles {
   public:
    Tiles() {
        static const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// Sums of 16 or 32 rows and one or two panels: tiles 0 to 3 are the sums, 4 and 5 the rows, 6 and 7 the panels.
template <bool TwoRows, bool TwoPanels>
NESO_INLINE void tile_products(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, int depth) {
    const int64_t a_bytes = a_stride * 2;
    const bf16* a2 = a + kTileRows * a_stride;
    const bf16* b2 = b + b_stride;
    _tile_zero(0);
    if constexpr (TwoPanels) _tile_zero(1);
    if constexpr (TwoRows) _tile_zero(2);
    if constexpr (TwoRows && TwoPanels) _tile_zero(3);
    for (int k = 0; k < depth; k += kTileDepth) {
        _tile_loadd(6, b + int64_t(k) * kPanel, 64);
        _tile_loadd(4, a + k, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TwoPanels) {
            _tile_loadd(7, b2 + int64_t(k) * kPanel, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TwoRows) {
            _tile_loadd(5, a2 + k, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (TwoPanels) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

inline void store_tile(const Matrix& matrix, int panel, const float* tile, int rows, float* out, int64_t stride,
                       bool accumulate) {
    for (int r = 0; r < rows; ++r) {
        const F32 sums[kVectors] = {load<F32>(tile + r * kPanel)};
        store_panel(matrix, panel, sums, out + r * stride, accumulate);
    }
}

template <bool TwoPanels>
inline void gemm_tiles(const Input& input, const Matrix& matrix, int panel, const bf16* b, int64_t b_stride, float* out,
                       int64_t stride, bool accumulate) {
    alignas(64) float tile[kTileRows * kPanel];
    int row = 0;
    const auto finish = [&](int rows_done) {
        const auto put = [&](int p, int r) {
            const int rows = input.rows - r < kTileRows ? input.rows - r : kTileRows;
            store_tile(matrix, p, tile, rows, out + r * stride, stride, accumulate);
        };
        _tile_stored(0, tile, 64);
        put(panel, row);
        if constexpr (TwoPanels) {
            _tile_stored(1, tile, 64);
            put(panel + 1, row);
        }
        if (rows_done == kTileRows) return;
        _tile_stored(2, tile, 64);
        put(panel, row + kTileRows);
        if constexpr (TwoPanels) {
            _tile_stored(3, tile, 64);
            put(panel + 1, row + kTileRows);
        }
    };
    for (; row + kTileRows < input.rows; row += 2 * kTileRows) {
        tile_products<true, TwoPanels>(input.row<bf16>(row), input.stride, b, b_stride, matrix.depth);
        finish(2 * kTileRows);
    }
    if (row < input.rows) {
        tile_products<false, TwoPanels>(input.row<bf16>(row), input.stride, b, b_stride, matrix.depth);
        finish(kTileRows);
    }
}

// The input must have room for a multiple of 32 rows; what lies in those that are not used does not matter.
inline void gemm_amx(const Input& input, const Matrix& matrix, int first, int last, float* out, int64_t stride,
                     bool accumulate) {
    const Tiles tiles;
    const int64_t b_stride = matrix.panel_bytes() / 2;
    int panel = first;
    for (; panel + 2 <= last; panel += 2) {
        gemm_tiles<true>(input, matrix, panel, reinterpret_cast<const bf16*>(matrix.panel(panel)), b_stride, out, stride,
                         accumulate);
    }
    if (panel < last) {
        gemm_tiles<false>(input, matrix, panel, reinterpret_cast<const bf16*>(matrix.panel(panel)), b_stride, out,
                          stride, accumulate);
    }
}

}  // namespace neso::NESO_ISA

#endif
