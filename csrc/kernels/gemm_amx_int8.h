// Products of 8-bit activations and 8-bit weights in tile registers, at twice the rate of bfloat16.
//
// Tiles 0 to 3 are the sums of 32 rows and two panels, 4 and 5 the rows, 6 and 7 the panels, as in
// gemm_amx_many_rows.h. The sums of a group of inputs are stored to memory, and while the tiles of the next group are
// multiplied, vector instructions scale them and add them to the totals: the two units work at the same time. The next
// group may be that of the next rows.
//
// Each operation on floats is that of gemm_quantized.h, in the same order, so results are equal to the bit.
#pragma once

#include "kernels/gemm_amx_many_rows.h"
#include "kernels/unpack.h"

namespace neso::NESO_ISA {

#if defined(__AMX_INT8__)

// With fewer rows, the dot products of gemm_quantized.h are as fast.
constexpr int kMinIntegerTileRows = 9;
constexpr int kByteTileDepth = 64;  // inputs of a tile
// Depth of a block: two panels of it take 16 KB and stay in the L1 cache with sums and totals. A multiple of the groups
// of `int8_dynamic`.
constexpr int kByteBlockDepth = 512;

inline bool has_integer_tiles(const Matrix& matrix) {
    return matrix.kind == WeightKind::int8 && matrix.dynamic && !matrix.offsets && matrix.depth % kByteTileDepth == 0 &&
           matrix.group_size % kByteTileDepth == 0;
}

// The tile that holds code k of a row.
NESO_INLINE int8_t* byte_tile_of(const Input& input, int row, int k) {
    const int64_t index = int64_t(row / kTileRows) * (input.depth / kByteTileDepth) + k / kByteTileDepth;
    return reinterpret_cast<int8_t*>(input.values) + index * (kTileRows * kByteTileDepth);
}

// Sums of a group of inputs for 32 rows and two panels, [row tile][panel][16][16].
struct alignas(64) GroupSums {
    int32_t tiles[4][kTileSums];
};

// A group whose sums are still to be scaled and added to the totals of its rows.
template <int Panels>
struct WaitingGroup {
    F32 scales[Panels];       // of the weights
    const float* row_scales;  // of the activations
    const int32_t* row_sums;  // 128 times the sums of a row's codes
    int stride;               // of row_scales and row_sums, from row to row
    bool first;               // totals start with this group
    int rows = 0;             // of the group
    const float* totals;      // [row][panel][16]
    float* to;                // the new totals, or the outputs
    int64_t to_stride;

    // Add rows of one tile: `sums` are [row][16] of the first panel, those of the second follow a tile later.
    template <bool First>
    NESO_INLINE void add_rows(const int32_t* sums, int begin, int end) const {
        const float* x = row_scales + begin * stride;
        const int32_t* start = row_sums + begin * stride;
        const float* before = totals + begin * Panels * kPanel;
        float* after = to + begin * to_stride;
        for (int row = begin; row < end; ++row) {
#pragma GCC unroll 2
            for (int p = 0; p < Panels; ++p) {
                const I32 products = load<I32>(sums + p * kTileSums) - splat(*start);
                const F32 total = First ? F32{} : load<F32>(before + p * kPanel);
                store(after + p * kPanel, total + to_f32(products) * (scales[p] * splat(*x)));
            }
            x += stride;
            start += stride;
            sums += kPanel;
            before += Panels * kPanel;
            after += to_stride;
        }
    }

    NESO_INLINE void add_rows(const GroupSums& sums, int begin, int end) const {
        if (end > rows) end = rows;
        const int32_t* from = sums.tiles[unsigned(begin) / kTileRows * 2] + unsigned(begin) % kTileRows * kPanel;
        if (first) {
            add_rows<true>(from, begin, end);
        } else {
            add_rows<false>(from, begin, end);
        }
    }

    // Part `step` of `steps` of the rows.
    NESO_INLINE void add_part(const GroupSums& sums, int step, int steps) const {
        constexpr int kPart = kTileRows / 2;
        const int parts = 2 * kTileRows / kPart;
        for (int part = parts * step / steps; part < parts * (step + 1) / steps; ++part) {
            add_rows(sums, part * kPart, (part + 1) * kPart);
        }
    }
};

// The products of a step of 64 inputs. Two tiles of rows are loaded with a hint not to keep them in the L1 cache.
template <int RowTiles, int Panels>
NESO_INLINE void multiply_step(const int8_t* a, int64_t row_tile_stride, const char* b, int64_t panel_bytes) {
    _tile_loadd(6, b, kTileBytes);
    if constexpr (RowTiles > 1) {
        _tile_stream_loadd(4, a, kTileBytes);
    } else {
        _tile_loadd(4, a, kTileBytes);
    }
    _tile_dpbsud(0, 4, 6);
    if constexpr (Panels > 1) {
        _tile_loadd(7, b + panel_bytes, kTileBytes);
        _tile_dpbsud(1, 4, 7);
    }
    if constexpr (RowTiles > 1) {
        _tile_stream_loadd(5, a + row_tile_stride, kTileBytes);
        _tile_dpbsud(2, 5, 6);
        if constexpr (Panels > 1) _tile_dpbsud(3, 5, 7);
    }
}

template <int RowTiles, int Panels>
NESO_INLINE void zero_group_sums() {
    _tile_zero(0);
    if constexpr (Panels > 1) _tile_zero(1);
    if constexpr (RowTiles > 1) _tile_zero(2);
    if constexpr (RowTiles > 1 && Panels > 1) _tile_zero(3);
}

template <int RowTiles, int Panels>
NESO_INLINE void store_group_sums(GroupSums& sums) {
    _tile_stored(0, sums.tiles[0], kTileBytes);
    if constexpr (Panels > 1) _tile_stored(1, sums.tiles[1], kTileBytes);
    if constexpr (RowTiles > 1) _tile_stored(2, sums.tiles[2], kTileBytes);
    if constexpr (RowTiles > 1 && Panels > 1) _tile_stored(3, sums.tiles[3], kTileBytes);
}

// The products of up to 32 rows with the inputs [first, last), whole groups except at the end. `waiting` and `sums` are
// of the previous group, and then of the last of these. The last group of all inputs is added to `to`.
template <int RowTiles, int Panels>
NESO_INLINE void multiply_groups(const Input& input, const Matrix& matrix, int panel, int row, int rows, int first,
                                 int last, float* totals, float* to, int64_t to_stride, GroupSums& sums,
                                 WaitingGroup<Panels>& waiting, Prefetch& prefetch) {
    const int64_t row_tile_stride = int64_t(input.depth) * kTileRows, panel_bytes = matrix.panel_bytes();
    const int groups = (input.depth + input.group_size - 1) / input.group_size;
    const char* b = matrix.panel(panel) + int64_t(first) * kPanel;
    const int8_t* a = byte_tile_of(input, row, first);
    for (int begin = first; begin < last; begin += input.group_size) {
        const int end = begin + input.group_size < last ? begin + input.group_size : last;
        const int steps = (end - begin) / kByteTileDepth;
        zero_group_sums<RowTiles, Panels>();
        for (int step = 0; step < steps; ++step) {
            prefetch.step();
            multiply_step<RowTiles, Panels>(a, row_tile_stride, b, panel_bytes);
            a += kTileRows * kByteTileDepth;
            b += kPanel * kByteTileDepth;
            waiting.add_part(sums, step, steps);
        }
        store_group_sums<RowTiles, Panels>(sums);
        const int group = begin / input.group_size, matrix_group = begin / matrix.group_size;
        for (int p = 0; p < Panels; ++p) {
            const int64_t at = (int64_t(panel + p) * matrix.groups + matrix_group) * kPanel;
            waiting.scales[p] = load_f16(matrix.scales + at) * matrix.scale_factor;
        }
        const bool ends = end == input.depth;
        waiting.row_scales = input.scales + int64_t(row) * groups + group;
        waiting.row_sums = input.sums + int64_t(row) * groups + group;
        waiting.stride = groups;
        waiting.first = begin == 0;
        waiting.rows = rows;
        waiting.totals = totals;
        waiting.to = ends ? to : totals;
        waiting.to_stride = ends ? to_stride : Panels * kPanel;
    }
}

template <int Panels>
NESO_INLINE void store_totals(const Matrix& matrix, int panel, int rows, const float* totals, float* out, int64_t stride,
                              bool accumulate) {
    for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < Panels; ++p, totals += kPanel) {
            const F32 sums[kVectors] = {load<F32>(totals)};
            store_panel(matrix, panel + p, sums, out + r * stride, accumulate);
        }
    }
}

template <int Panels>
inline void gemm_byte_tiles(const Input& input, const Matrix& matrix, const GemmRange& range, int panel, float* out,
                            int64_t stride, bool accumulate) {
    static thread_local Buffer<float> all_totals;
    constexpr int kPair = 2 * kTileRows, kTotals = kPair * Panels * kPanel;
    const int row_blocks = row_blocks_of(range);
    all_totals.reserve(int64_t(row_blocks) * kTotals);
    const int whole = kByteBlockDepth / input.group_size * input.group_size;
    const int block_depth = whole ? whole : input.group_size;
    // Whether the totals of whole panels are the outputs.
    const bool plain = !matrix.bias && !accumulate && (panel + Panels) * kPanel <= matrix.outputs;
    const auto first_row = [&](int block) { return range.first_row + block * kPair; };
    const auto rows_of = [&](int block) { return std::min(kPair, range.last_row - first_row(block)); };
    const auto totals_of = [&](int block) { return all_totals.data() + int64_t(block) * kTotals; };
    const auto outputs_of = [&](int block) { return out + first_row(block) * stride; };
    const auto store_block = [&](int block) {
        store_totals<Panels>(matrix, panel, rows_of(block), totals_of(block), outputs_of(block), stride, accumulate);
    };
    Prefetch prefetch = prefetch_pair(matrix, range, panel + Panels);
    GroupSums sums;
    WaitingGroup<Panels> waiting{};
    for (int k = 0; k < input.depth; k += block_depth) {
        const int end = std::min(k + block_depth, input.depth);
        const bool last = end == input.depth;
        for (int block = 0; block < row_blocks; ++block) {
            const int row = first_row(block), rows = rows_of(block);
            float *totals = totals_of(block), *outputs = outputs_of(block) + panel * kPanel;
            float* to = plain ? outputs : totals;
            const int64_t to_stride = plain ? stride : Panels * kPanel;
            if (last) prefetch_outputs<(Panels > 1)>(outputs, stride, rows);
            if (rows > kTileRows) {
                multiply_groups<2>(input, matrix, panel, row, rows, k, end, totals, to, to_stride, sums, waiting, prefetch);
            } else {
                multiply_groups<1>(input, matrix, panel, row, rows, k, end, totals, to, to_stride, sums, waiting, prefetch);
            }
            // The last group of these rows still waits.
            if (last && !plain && block) store_block(block - 1);
        }
    }
    waiting.add_part(sums, 0, 1);
    if (!plain) store_block(row_blocks - 1);
}

// Ranges of rows start at a multiple of 32. Rows of the last tile after the input may have any content, NaN included:
// their totals are not stored.
inline void gemm_amx_int8(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                          bool accumulate) {
    const Tiles tiles;
    for (int panel = range.first_panel; panel < range.last_panel; panel += 2) {
        const auto gemm = panel + 2 <= range.last_panel ? gemm_byte_tiles<2> : gemm_byte_tiles<1>;
        gemm(input, matrix, range, panel, out, stride, accumulate);
    }
}

#endif

}  // namespace neso::NESO_ISA
