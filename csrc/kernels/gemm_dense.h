// Inputs times dense panels, in registers.
#pragma once

#include "kernels/dot.h"
#include "kernels/gemm_store.h"

namespace neso::NESO_ISA {

// Panels [first, first + Panels) lie at `weights`, `weight_stride` elements apart. All rows go over them while they
// are in the nearest caches: with few rows the time is that of reading the weights once.
template <typename Panel, int Panels>
NESO_INLINE void gemm_panels(const Input& input, const Matrix& matrix, const GemmRange& range, int first,
                             const typename Panel::Weight* weights, int64_t weight_stride, float* out, int64_t stride,
                             bool accumulate) {
    for_row_blocks(range.rows(), [&]<int Rows>(int block) NESO_INLINE_LAMBDA {
        const int row = range.first_row + block;
        F32 sums[Rows][Panels][kVectors] = {};
        dot<Panel, Rows, Panels>(input.row<typename Panel::Input>(row), input.stride, weights, weight_stride,
                                 matrix.depth, sums);
        for (int r = 0; r < Rows; ++r) {
            for (int p = 0; p < Panels; ++p) {
                store_panel(matrix, first + p, sums[r][p], out + (row + r) * stride, accumulate);
            }
        }
    });
}

template <typename Panel>
void gemm_dense(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                bool accumulate) {
    using Weight = typename Panel::Weight;
    const int64_t weight_stride = matrix.panel_bytes() / int64_t(sizeof(Weight));
    int panel = range.first_panel;
    for (; panel + kBlockPanels <= range.last_panel; panel += kBlockPanels) {
        gemm_panels<Panel, kBlockPanels>(input, matrix, range, panel,
                                         reinterpret_cast<const Weight*>(matrix.panel(panel)), weight_stride, out,
                                         stride, accumulate);
    }
    if constexpr (kBlockPanels > 1) {
        for (; panel < range.last_panel; ++panel) {
            gemm_panels<Panel, 1>(input, matrix, range, panel, reinterpret_cast<const Weight*>(matrix.panel(panel)),
                                  weight_stride, out, stride, accumulate);
        }
    }
}

}  // namespace neso::NESO_ISA
