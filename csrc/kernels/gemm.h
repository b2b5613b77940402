// Matrix products: selects the kernel by the kinds of weights and inputs.
#pragma once

#include <type_traits>

#include "kernels/gemm_amx_few_rows.h"
#include "kernels/gemm_amx_int8.h"
#include "kernels/gemm_amx_many_rows.h"
#include "kernels/gemm_amx_unpacked.h"
#include "kernels/gemm_dense.h"
#include "kernels/inputs.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)
// More rows would leave too little of the cache for the results of gate and up: 512 rows took 7 % longer.
constexpr int kCachedInputBytes = 1 << 20, kMaxBlockRows = 256;
#else
constexpr int kCachedInputBytes = 512 << 10, kMaxBlockRows = 512;
#endif

// Rows that fit the L2 cache together with the panels, so that each panel is read from memory once.
inline int block_rows(const Matrix& matrix) {
    const int element = matrix.kind == WeightKind::f32 || matrix.kind == WeightKind::f16 ? 4 : 2;
    const int rows = kCachedInputBytes / (matrix.depth * element) / 32 * 32;
    return rows < 32 ? 32 : rows > kMaxBlockRows ? kMaxBlockRows : rows;
}

// `after`: see `gemm_dense`.
inline void gemm_bf16(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                      bool accumulate, [[maybe_unused]] const char* after = nullptr) {
#if defined(__AMX_BF16__)
    if (input.kind == InputKind::bf16_tiles) {
        const auto gemm = range.rows() <= kFewRows ? gemm_amx_few_rows : gemm_amx_many_rows;
        gemm(input, matrix, range, out, stride, accumulate);
        return;
    }
#endif
#if defined(NESO_BF16_DOT)
    gemm_dense<Bf16Panel>(input, matrix, range, out, stride, accumulate, after);
#else
    gemm_dense<Bf16PanelAsFloat>(input, matrix, range, out, stride, accumulate, after);
#endif
}

#if defined(__AMX_BF16__)

static_assert(kUnpackRows >= kMinTileRows && kUnpackRowsDynamic >= kMinTileRows, "inputs must be in tiles");

inline void gemm_unpacked(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                          bool accumulate) {
    const bool int8 = matrix.kind == WeightKind::int8;
    const auto gemm = int8 ? gemm_amx_unpacked<WeightKind::int8> : gemm_amx_unpacked<WeightKind::int4>;
    gemm(input, matrix, range, out, stride, accumulate);
}

#else

// Unpack a few panels and multiply them while they are cached.
inline void gemm_unpacked(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                          bool accumulate) {
    constexpr bool kBf16 = kBf16Input == InputKind::bf16;
    using T = std::conditional_t<kBf16, bf16, float>;
    static thread_local Buffer<T> unpacked;
    const int64_t panel_values = int64_t(matrix.depth) * kPanel;
    unpacked.reserve(panel_values * kBlockPanels);
    for (int panel = range.first_panel; panel < range.last_panel; panel += kBlockPanels) {
        const int count = range.last_panel - panel < kBlockPanels ? range.last_panel - panel : kBlockPanels;
        for (int p = 0; p < count; ++p) unpack_panel(matrix, panel + p, unpacked.data() + p * panel_values);
        const WeightKind kind = kBf16 ? WeightKind::bf16 : WeightKind::f32;
        const Matrix dense = unpacked_panels(matrix, panel, kind, unpacked.data());
        const GemmRange part{range.first_row, range.last_row, 0, count};
        const char* after = panel + count < range.last_panel ? matrix.panel(panel + count) : nullptr;
        if constexpr (kBf16) {
            gemm_bf16(input, dense, part, out + panel * kPanel, stride, accumulate, after);
        } else {
            gemm_dense<FloatPanel<float>>(input, dense, part, out + panel * kPanel, stride, accumulate, after);
        }
    }
}

#endif

inline void gemm(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                 bool accumulate) {
    if (input.kind == InputKind::integer) {
        gemm_quantized(input, matrix, range, out, stride, accumulate);
        return;
    }
#if defined(__AMX_INT8__)
    if (input.kind == InputKind::integer_tiles) {
        gemm_amx_int8(input, matrix, range, out, stride, accumulate);
        return;
    }
#endif
    // A thread processes its panels in order.
    const char* after = range.last_panel < matrix.panels ? matrix.panel(range.last_panel) : nullptr;
    switch (matrix.kind) {
        case WeightKind::f32: gemm_dense<FloatPanel<float>>(input, matrix, range, out, stride, accumulate, after); return;
        case WeightKind::f16: gemm_dense<FloatPanel<f16>>(input, matrix, range, out, stride, accumulate, after); return;
        case WeightKind::bf16: gemm_bf16(input, matrix, range, out, stride, accumulate, after); return;
        default: gemm_unpacked(input, matrix, range, out, stride, accumulate);
    }
}

// One row of a packed matrix, for embeddings that are tied to lm_head.
inline void matrix_row(const Matrix& matrix, int row, float* out) {
    const int panel = row / kPanel, lane = row % kPanel;
    const char* data = matrix.panel(panel);
    if (matrix.quantized()) {
        for (int k = 0; k < matrix.inputs; ++k) {
            const int64_t at = (int64_t(panel) * matrix.groups + k / matrix.group_size) * kPanel + lane;
            const float scale = to_float(matrix.scales[at]);
            const bool int8 = matrix.kind == WeightKind::int8;
            const auto* codes = reinterpret_cast<const uint8_t*>(data);
            const int code = int8 ? codes[(k / 4 * kPanel + lane) * 4 + k % 4]
                                  : codes[(k / 8 * kPanel + lane) * 4 + k % 4] >> (k % 8 / 4 * 4) & 15;
            const float offset = matrix.offsets ? to_float(matrix.offsets[at]) : (int8 ? -128.0f : -8.0f) * scale;
            out[matrix.input_order ? matrix.input_order[k] : k] = (scale * float(code) + offset) * matrix.scale_factor;
        }
        return;
    }
    for (int k = 0; k < matrix.inputs; ++k) {
        switch (matrix.kind) {
            case WeightKind::f32: out[k] = reinterpret_cast<const float*>(data)[k * kPanel + lane]; break;
            case WeightKind::f16: out[k] = to_float(reinterpret_cast<const f16*>(data)[k * kPanel + lane]); break;
            default: out[k] = to_float(reinterpret_cast<const bf16*>(data)[(k / 2 * kPanel + lane) * 2 + k % 2]);
        }
    }
}

}  // namespace neso::NESO_ISA
