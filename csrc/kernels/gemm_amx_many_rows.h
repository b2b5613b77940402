// bfloat16 products of many rows in tile registers.
//
// Tiles 0 to 3 are the sums of 32 rows and two panels, 4 and 5 the rows, 6 and 7 the panels. Panels are split in blocks
// of depth that stay in the L1 cache for all rows; sums are kept in memory in between. Rows are loaded with a hint not
// to keep them in the L1 cache, since they would evict the panels.
#pragma once

#include <algorithm>

#include "kernels/amx_tiles.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

// Depth of a block: two panels of it take 32 KB.
constexpr int kBlockDepth = 512;

// Prefetches the next panels into the L2 cache, a few lines per step of the products: tile loads are too far apart for
// the hardware prefetcher to detect the stream.
class Prefetch {
   public:
    Prefetch(const void* begin, const void* end, int lines_a_step)
        : at_(static_cast<const char*>(begin)), end_(static_cast<const char*>(end)), lines_(lines_a_step) {}

    NESO_INLINE void step() {
        for (int i = 0; i < lines_; ++i, at_ += 64) {
            if (at_ < end_) _mm_prefetch(at_, _MM_HINT_T1);
        }
    }

   private:
    const char* at_;
    const char* const end_;
    const int lines_;
};

// sums += rows . panels over `depth`. `a2`, `b2`: the second 16 rows and the second panel, if present. `ahead`
// prefetches or unpacks the next panels meanwhile, a part in each step.
template <bool TwoRows, bool TwoPanels, typename Ahead>
NESO_INLINE void tile_products(const bf16* a, const bf16* a2, const bf16* b, const bf16* b2, int depth, Ahead& ahead) {
    for (int k = 0; k < depth; k += kTileDepth) {
        ahead.step();
        _tile_loadd(6, b + int64_t(k) * kPanel, kTileBytes);
        _tile_stream_loadd(4, a + int64_t(k) * kTileRows, kTileBytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TwoPanels) {
            _tile_loadd(7, b2 + int64_t(k) * kPanel, kTileBytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (TwoRows) {
            _tile_stream_loadd(5, a2 + int64_t(k) * kTileRows, kTileBytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (TwoPanels) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// The sums of 32 rows and two panels in memory: [tile][16][16].
using TileSums = float[4 * kTileSums];

template <bool TwoRows, bool TwoPanels>
NESO_INLINE void begin_sums(const float* sums, bool first) {
    if (first) {
        _tile_zero(0);
        if constexpr (TwoPanels) _tile_zero(1);
        if constexpr (TwoRows) _tile_zero(2);
        if constexpr (TwoRows && TwoPanels) _tile_zero(3);
        return;
    }
    _tile_loadd(0, sums, kTileBytes);
    if constexpr (TwoPanels) _tile_loadd(1, sums + kTileSums, kTileBytes);
    if constexpr (TwoRows) _tile_loadd(2, sums + 2 * kTileSums, kTileBytes);
    if constexpr (TwoRows && TwoPanels) _tile_loadd(3, sums + 3 * kTileSums, kTileBytes);
}

// Store the sums: rows are `row_bytes` apart, the second panel starts at sums + panel_offset, the second 16 rows at sums +
// rows_offset.
template <bool TwoRows, bool TwoPanels>
NESO_INLINE void end_sums(float* sums, int64_t row_bytes = kTileBytes, int64_t panel_offset = kTileSums,
                          int64_t rows_offset = 2 * kTileSums) {
    _tile_stored(0, sums, row_bytes);
    if constexpr (TwoPanels) _tile_stored(1, sums + panel_offset, row_bytes);
    if constexpr (TwoRows) _tile_stored(2, sums + rows_offset, row_bytes);
    if constexpr (TwoRows && TwoPanels) _tile_stored(3, sums + rows_offset + panel_offset, row_bytes);
}

// Store the sums of up to 32 rows from `row` on to out.
template <bool TwoPanels>
NESO_INLINE void store_tiles(const Matrix& matrix, int panel, int row, int rows, const float* sums, float* out,
                             int64_t stride, bool accumulate) {
    for (int r = 0; r < rows; r += kTileRows, sums += 2 * kTileSums) {
        const int count = rows - r < kTileRows ? rows - r : kTileRows;
        float* to = out + (row + r) * stride;
        store_tile(matrix, panel, sums, count, to, stride, accumulate);
        if constexpr (TwoPanels) {
            store_tile(matrix, panel + 1, sums + kTileSums, count, to, stride, accumulate);
        }
    }
}

// Prefetch the outputs of up to 32 rows, which the hardware does not: they are a page apart.
template <bool TwoPanels>
NESO_INLINE void prefetch_outputs(const float* out, int64_t stride, int rows) {
    for (int r = 0; r < rows; ++r, out += stride) {
        __builtin_prefetch(out, 1);
        if constexpr (TwoPanels) __builtin_prefetch(out + kPanel, 1);
    }
}

// The end of the pair of panels, or single panel, that starts at `panel`.
inline int end_of_pair(const GemmRange& range, int panel) {
    return panel + 2 < range.last_panel ? panel + 2 : range.last_panel;
}

// Number of blocks of 32 rows.
inline int row_blocks_of(const GemmRange& range) { return (range.rows() + 2 * kTileRows - 1) / (2 * kTileRows); }

// Prefetches up to two panels from `panel` on in the steps of two others. They may be after the range: a thread takes
// ranges in order.
inline Prefetch prefetch_pair(const Matrix& matrix, const GemmRange& range, int panel) {
    // A step reads a tile of each panel: the tiles of two panels have 32 cache lines.
    const int row_blocks = row_blocks_of(range), lines = (32 + row_blocks - 1) / row_blocks;
    return Prefetch(matrix.panel(panel), matrix.panel(std::min(panel + 2, matrix.panels)), lines);
}

// Multiplies the inputs [k, k + depth) of all rows with one or two panels from `panel` on. `b` and `b2` are the panels'
// weights for these inputs. Blocks of inputs are multiplied in order; the last stores the outputs.
template <bool TwoPanels, typename Ahead>
inline void gemm_block(const Input& input, const Matrix& matrix, const GemmRange& range, int panel, int k, int depth,
                       const bf16* b, const bf16* b2, float* out, int64_t stride, bool accumulate, Ahead& ahead) {
    static thread_local Buffer<float> waiting;
    constexpr int kPair = 2 * kTileRows, kSums = sizeof(TileSums) / sizeof(float);
    const int row_blocks = row_blocks_of(range);
    waiting.reserve(int64_t(row_blocks) * kSums);
    // Whether the sums of whole tiles are the outputs.
    const bool plain = !matrix.bias && !accumulate && (panel + 1 + TwoPanels) * kPanel <= matrix.outputs;
    const bool last = k + depth == input.depth;
    for (int block = 0; block < row_blocks; ++block) {
        const int row = range.first_row + block * kPair;
        const int rows = range.last_row - row < kPair ? range.last_row - row : kPair;
        float* sums = waiting.data() + int64_t(block) * kSums;
        float* to = out + row * stride + panel * kPanel;
        const bf16 *a = tile_of(input, row, k), *a2 = tile_of(input, row + kTileRows, k);
        if (last) prefetch_outputs<TwoPanels>(to, stride, rows);
        if (rows > kTileRows) {
            begin_sums<true, TwoPanels>(sums, k == 0);
            tile_products<true, TwoPanels>(a, a2, b, b2, depth, ahead);
            if (last && plain && rows == kPair) {
                end_sums<true, TwoPanels>(to, stride * 4, kPanel, kTileRows * stride);
                continue;
            }
            end_sums<true, TwoPanels>(sums);
        } else {
            begin_sums<false, TwoPanels>(sums, k == 0);
            tile_products<false, TwoPanels>(a, a2, b, b2, depth, ahead);
            end_sums<false, TwoPanels>(sums);
        }
        if (last) store_tiles<TwoPanels>(matrix, panel, row, rows, sums, out, stride, accumulate);
    }
}

template <bool TwoPanels>
inline void gemm_tiles(const Input& input, const Matrix& matrix, const GemmRange& range, int panel, float* out,
                       int64_t stride, bool accumulate, Prefetch& prefetch) {
    const bf16* b = reinterpret_cast<const bf16*>(matrix.panel(panel));
    const bf16* b2 = b + matrix.panel_bytes() / 2;
    for (int k = 0; k < input.depth; k += kBlockDepth) {
        const int depth = input.depth - k < kBlockDepth ? input.depth - k : kBlockDepth;
        const int64_t at = int64_t(k) * kPanel;
        gemm_block<TwoPanels>(input, matrix, range, panel, k, depth, b + at, b2 + at, out, stride, accumulate, prefetch);
    }
}

// Ranges of rows start at a multiple of 32. Rows of the last tile after the input may have any content: their sums are
// not stored.
inline void gemm_amx_many_rows(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                               int64_t stride, bool accumulate) {
    const Tiles tiles;
    for (int panel = range.first_panel; panel < range.last_panel; panel += 2) {
        const int end = end_of_pair(range, panel);
        Prefetch prefetch = prefetch_pair(matrix, range, end);
        const auto gemm = end - panel == 2 ? gemm_tiles<true> : gemm_tiles<false>;
        gemm(input, matrix, range, panel, out, stride, accumulate, prefetch);
    }
}

#endif

}  // namespace neso::NESO_ISA
