// bfloat16 products of up to 48 rows in tile registers.
//
// Tiles 0 to 2 are the sums of 48 rows and one panel, 4 is the panel, 5 to 7 are the rows. The weights are read once, in
// one stream, and the time of the products overlaps with it. More rows take fewer tile loads in gemm_amx_many_rows.h.
#pragma once

#include "kernels/amx_tiles.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

constexpr int kFewRows = 3 * kTileRows;
// Prefetch distance of panels into the L2 cache: the hardware prefetcher does not keep up with tile loads. Measured.
constexpr int kPrefetchBytes = 8192;

// Store the sums of RowTiles x 16 rows and a panel to memory [tile][16][16]. The tiles of a row are contiguous; the
// tiles of the next 16 rows follow `tile_stride` values later.
template <int RowTiles>
NESO_INLINE void few_row_products(const bf16* rows, int64_t tile_stride, const bf16* panel, int depth, float* sums) {
    _tile_zero(0);
    if constexpr (RowTiles > 1) _tile_zero(1);
    if constexpr (RowTiles > 2) _tile_zero(2);
    for (int k = 0; k < depth; k += kTileDepth) {
        const bf16* at = rows + int64_t(k) * kTileRows;
        const char* ahead = reinterpret_cast<const char*>(panel + int64_t(k) * kPanel) + kPrefetchBytes;
#pragma GCC unroll 16
        for (int line = 0; line < kTileRows; ++line) _mm_prefetch(ahead + line * kTileBytes, _MM_HINT_T1);
        _tile_loadd(4, panel + int64_t(k) * kPanel, kTileBytes);
        _tile_loadd(5, at, kTileBytes);
        _tile_dpbf16ps(0, 5, 4);
        if constexpr (RowTiles > 1) {
            _tile_loadd(6, at + tile_stride, kTileBytes);
            _tile_dpbf16ps(1, 6, 4);
        }
        if constexpr (RowTiles > 2) {
            _tile_loadd(7, at + 2 * tile_stride, kTileBytes);
            _tile_dpbf16ps(2, 7, 4);
        }
    }
    _tile_stored(0, sums, kTileBytes);
    if constexpr (RowTiles > 1) _tile_stored(1, sums + kTileSums, kTileBytes);
    if constexpr (RowTiles > 2) _tile_stored(2, sums + 2 * kTileSums, kTileBytes);
}

// Rows of the last tile after the input may have any content: their sums are not stored.
inline void gemm_amx_few_rows(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                              int64_t stride, bool accumulate) {
    const Tiles tiles;
    alignas(64) float sums[3 * kTileSums];
    const int64_t tile_stride = int64_t(input.depth) * kTileRows;
    const bf16* rows = tile_of(input, range.first_row, 0);
    for (int panel = range.first_panel; panel < range.last_panel; ++panel) {
        const bf16* weights = reinterpret_cast<const bf16*>(matrix.panel(panel));
        switch ((range.rows() + kTileRows - 1) / kTileRows) {
            case 1: few_row_products<1>(rows, tile_stride, weights, input.depth, sums); break;
            case 2: few_row_products<2>(rows, tile_stride, weights, input.depth, sums); break;
            default: few_row_products<3>(rows, tile_stride, weights, input.depth, sums);
        }
        // Tiles of sums are contiguous, so their rows are too.
        store_tile(matrix, panel, sums, range.rows(), out + range.first_row * stride, stride, accumulate);
    }
}

#endif

}  // namespace neso::NESO_ISA
