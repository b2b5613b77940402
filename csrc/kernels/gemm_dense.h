// Inputs times dense panels, accumulated in registers.
#pragma once

#include "kernels/dot.h"
#include "kernels/gemm_store.h"

namespace neso::NESO_ISA {

// With more rows, memory latency is a small part of the time.
constexpr int kMaxPrefetchRows = 48;

// Panels [first, first + Panels) are at `weights`, `weight_stride` elements apart. All rows use them while they are
// cached, so with few rows the time is the time to read the weights once.
//
// The first rows are bound by memory latency. Each of the following rows prefetches half of `next`; otherwise reading
// and computing would alternate.
template <typename Panel, int Panels>
NESO_INLINE void gemm_panels(const Input& input, const Matrix& matrix, const GemmRange& range, int first,
                             const typename Panel::Weight* weights, int64_t weight_stride, const char* next, float* out,
                             int64_t stride, bool accumulate) {
    const int64_t half = matrix.panel_bytes() * Panels / 2;
    for_row_blocks(range.rows(), [&]<int Rows>(int block) NESO_INLINE_LAMBDA {
        const int row = range.first_row + block;
        const auto* inputs = input.row<typename Panel::Input>(row);
        F32 sums[Rows][Panels][kVectors] = {};
        if (next != nullptr && (block == kBlockRows || block == 2 * kBlockRows)) {
            const char* ahead = next + (block == kBlockRows ? 0 : half);
            dot<Panel, Rows, Panels, true>(inputs, input.stride, weights, weight_stride, matrix.depth, sums, ahead);
        } else {
            dot<Panel, Rows, Panels>(inputs, input.stride, weights, weight_stride, matrix.depth, sums);
        }
        NESO_UNROLL
        for (int r = 0; r < Rows; ++r) {
            NESO_UNROLL
            for (int p = 0; p < Panels; ++p) {
                store_panel(matrix, first + p, sums[r][p], out + (row + r) * stride, accumulate);
            }
        }
    });
}

// `after`: address that is likely to be read after these panels; only a prefetch hint.
template <typename Panel>
void gemm_dense(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                bool accumulate, const char* after = nullptr) {
    using Weight = typename Panel::Weight;
    const int64_t weight_stride = matrix.panel_bytes() / int64_t(sizeof(Weight));
    int panel = range.first_panel;
    for (; panel + kBlockPanels <= range.last_panel; panel += kBlockPanels) {
        const char* next = panel + kBlockPanels < range.last_panel ? matrix.panel(panel + kBlockPanels) : after;
        if (range.rows() > kMaxPrefetchRows) next = nullptr;
        gemm_panels<Panel, kBlockPanels>(input, matrix, range, panel,
                                         reinterpret_cast<const Weight*>(matrix.panel(panel)), weight_stride, next, out,
                                         stride, accumulate);
    }
    if constexpr (kBlockPanels > 1) {
        for (; panel < range.last_panel; ++panel) {
            gemm_panels<Panel, 1>(input, matrix, range, panel, reinterpret_cast<const Weight*>(matrix.panel(panel)),
                                  weight_stride, nullptr, out, stride, accumulate);
        }
    }
}

}  // namespace neso::NESO_ISA
