// Products of 8-bit activations and 8-bit weights in tile registers, at twice the rate of bfloat16.
//
// Tiles 0 to 3 are the sums of 32 rows and two panels, 4 and 5 the rows, 6 and 7 the panels, as in
// gemm_amx_many_rows.h. The sums of a group of inputs are stored to memory, and while the tiles of the next group are
// multiplied, vector instructions scale them and add them to the totals: the two units work at the same time.
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
// Depth of a block: two panels of it and 32 rows take 32 KB. A multiple of the groups of `int8_dynamic`.
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

// The factors of a group: weight scales of each panel; of each row, the scale and 128 times the sum of its codes.
template <int Panels>
struct GroupFactors {
    F32 scales[Panels];
    const float* row_scales;
    const int32_t* row_sums;
    int stride;  // from row to row
};

// Add the scaled sums of one row to its totals, [panel][16].
template <int Panels>
NESO_INLINE void add_group_row(const GroupSums& sums, const GroupFactors<Panels>& factors, int row, float* totals) {
    const F32 x = splat(factors.row_scales[row * factors.stride]);
    const I32 start = splat(factors.row_sums[row * factors.stride]);
#pragma GCC unroll 2
    for (int p = 0; p < Panels; ++p) {
        const I32 products =
            load<I32>(sums.tiles[row / kTileRows * 2 + p] + row % kTileRows * kPanel) - start;
        float* to = totals + (row * Panels + p) * kPanel;
        store(to, load<F32>(to) + to_f32(products) * (factors.scales[p] * x));
    }
}

// The products of a step of 64 inputs.
template <int RowTiles, int Panels>
NESO_INLINE void multiply_step(const int8_t* a, int64_t row_tile_stride, const char* b, int64_t panel_bytes) {
    _tile_loadd(6, b, kTileBytes);
    _tile_loadd(4, a, kTileBytes);
    _tile_dpbsud(0, 4, 6);
    if constexpr (Panels > 1) {
        _tile_loadd(7, b + panel_bytes, kTileBytes);
        _tile_dpbsud(1, 4, 7);
    }
    if constexpr (RowTiles > 1) {
        _tile_loadd(5, a + row_tile_stride, kTileBytes);
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

// totals[row][panel][16] += the products of up to 32 rows with the inputs [first, last), whole groups except at the end.
template <int RowTiles, int Panels>
NESO_INLINE void add_groups(const Input& input, const Matrix& matrix, int panel, int row, int first, int last,
                            float* totals, Prefetch& prefetch) {
    constexpr int kRows = RowTiles * kTileRows;
    const int64_t row_tile_stride = int64_t(input.depth) * kTileRows, panel_bytes = matrix.panel_bytes();
    const int groups = (input.depth + input.group_size - 1) / input.group_size;
    const char* weights = matrix.panel(panel);
    GroupSums sums[2];
    GroupFactors<Panels> factors{};
    bool waiting = false;  // whether `factors` and the sums of the other parity are still to be added
    int parity = 0;
    for (int begin = first; begin < last; begin += input.group_size) {
        const int end = begin + input.group_size < last ? begin + input.group_size : last;
        const int steps = (end - begin) / kByteTileDepth;
        zero_group_sums<RowTiles, Panels>();
        for (int step = 0, done = 0; step < steps; ++step) {
            const int k = begin + step * kByteTileDepth;
            prefetch.step();
            multiply_step<RowTiles, Panels>(byte_tile_of(input, row, k), row_tile_stride,
                                            weights + int64_t(k) * kPanel, panel_bytes);
            if (!waiting) continue;
            for (const int due = kRows * (step + 1) / steps; done < due; ++done) {
                add_group_row<Panels>(sums[parity ^ 1], factors, done, totals);
            }
        }
        store_group_sums<RowTiles, Panels>(sums[parity]);
        const int group = begin / input.group_size, matrix_group = begin / matrix.group_size;
        for (int p = 0; p < Panels; ++p) {
            const int64_t at = (int64_t(panel + p) * matrix.groups + matrix_group) * kPanel;
            factors.scales[p] = load_f16(matrix.scales + at) * matrix.scale_factor;
        }
        factors.row_scales = input.scales + int64_t(row) * groups + group;
        factors.row_sums = input.sums + int64_t(row) * groups + group;
        factors.stride = groups;
        waiting = true;
        parity ^= 1;
    }
    for (int r = 0; r < kRows; ++r) add_group_row<Panels>(sums[parity ^ 1], factors, r, totals);
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

// `prefetch` is a copy, so that it stays in registers.
template <int Panels>
inline void gemm_byte_tiles(const Input& input, const Matrix& matrix, const GemmRange& range, int panel, float* out,
                            int64_t stride, bool accumulate, Prefetch prefetch) {
    static thread_local Buffer<float> waiting;
    constexpr int kPair = 2 * kTileRows, kTotals = kPair * Panels * kPanel;
    const int row_blocks = row_blocks_of(range);
    waiting.reserve(int64_t(row_blocks) * kTotals);
    const int whole = kByteBlockDepth / input.group_size * input.group_size;
    const int block_depth = whole ? whole : input.group_size;
    for (int k = 0; k < input.depth; k += block_depth) {
        const int end = k + block_depth < input.depth ? k + block_depth : input.depth;
        for (int block = 0; block < row_blocks; ++block) {
            const int row = range.first_row + block * kPair;
            const int rows = range.last_row - row < kPair ? range.last_row - row : kPair;
            float* totals = waiting.data() + int64_t(block) * kTotals;
            if (k == 0) std::memset(totals, 0, sizeof(float) * kTotals);
            if (end == input.depth) prefetch_outputs<(Panels > 1)>(out + row * stride + panel * kPanel, stride, rows);
            if (rows > kTileRows) {
                add_groups<2, Panels>(input, matrix, panel, row, k, end, totals, prefetch);
            } else {
                add_groups<1, Panels>(input, matrix, panel, row, k, end, totals, prefetch);
            }
            if (end == input.depth) {
                store_totals<Panels>(matrix, panel, rows, totals, out + row * stride, stride, accumulate);
            }
        }
    }
}

// Ranges of rows start at a multiple of 32. Rows of the last tile after the input may have any content, NaN included:
// their totals are not stored.
inline void gemm_amx_int8(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                          bool accumulate) {
    const Tiles tiles;
    for_each_pair(matrix, range, [&](int panel, bool two, Prefetch prefetch) {
        const auto gemm = two ? gemm_byte_tiles<2> : gemm_byte_tiles<1>;
        gemm(input, matrix, range, panel, out, stride, accumulate, prefetch);
    });
}

#endif

}  // namespace neso::NESO_ISA
