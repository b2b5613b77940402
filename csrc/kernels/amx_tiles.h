// Tile registers (Intel AMX): one instruction adds 32 bfloat16 products to each of 16 x 16 sums.
#pragma once

#include "kernels/gemm_store.h"

namespace neso::NESO_ISA {

// The tile that holds value k of a row.
NESO_INLINE bf16* tile_of(const Input& input, int row, int k) {
    const int64_t index = int64_t(row / kTileRows) * (input.depth / kTileDepth) + k / kTileDepth;
    return reinterpret_cast<bf16*>(input.values) + index * (kTileRows * kTileDepth);
}

#if defined(__AMX_BF16__)

// With fewer rows, tiles would be mostly empty.
constexpr int kMinTileRows = 5;
constexpr int kTileBytes = 64;                  // per row of a tile
constexpr int kTileSums = kTileRows * kPanel;   // per tile of sums

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Owns the tile registers, and releases them at the end: a thread that owns them saves 8 KB at every context switch.
class Tiles {
   public:
    Tiles() {
        static const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// Rows of sums of one panel, [rows][16] -> out.
NESO_INLINE void store_tile(const Matrix& matrix, int panel, const float* sums, int rows, float* out, int64_t stride,
                            bool accumulate) {
    if ((panel + 1) * kPanel > matrix.outputs) {
        for (int r = 0; r < rows; ++r) {
            const F32 row[kVectors] = {load<F32>(sums + r * kPanel)};
            store_panel(matrix, panel, row, out + r * stride, accumulate);
        }
        return;
    }
    const F32 bias = matrix.bias ? load<F32>(matrix.bias + panel * kPanel) : F32{};
    out += panel * kPanel;
    if (accumulate) {
        for (int r = 0; r < rows; ++r, out += stride) {
            store(out, load<F32>(out) + (load<F32>(sums + r * kPanel) + bias));
        }
    } else {
        for (int r = 0; r < rows; ++r, out += stride) store(out, load<F32>(sums + r * kPanel) + bias);
    }
}

#endif

}  // namespace neso::NESO_ISA
