// The two products of LoRA adapters (arXiv 2106.09685). Layouts: see ShrinkTask and ExpandTask.
//
// With few rows, reading A and B from memory dominates, so the arithmetic is kept simple: inputs stay floats, and
// bfloat16 weights are converted to floats in registers.
#pragma once

#include "kernels/dot.h"
#include "kernels/kernels.h"

namespace neso::NESO_ISA {

constexpr int kHalfBlock = kLowRankBlock / 2;

template <int Rows, int Ranks>
NESO_INLINE void shrink_block(const float* const (&x)[Rows], const float* a, int64_t a_stride, F32 (&sums)[Rows][Ranks]) {
#pragma GCC unroll 8
    for (int i = 0; i < kLowRankBlock; i += kLanes) {
        F32 inputs[Rows];
        for (int r = 0; r < Rows; ++r) inputs[r] = load<F32>(x[r] + i);
#pragma GCC unroll 8
        for (int k = 0; k < Ranks; ++k) {
            const F32 weights = load<F32>(a + k * a_stride + i);
            for (int r = 0; r < Rows; ++r) sums[r][k] += inputs[r] * weights;
        }
    }
}

// Pair j of a block holds its inputs j and 16 + j.
template <int Rows, int Ranks>
NESO_INLINE void shrink_block(const float* const (&x)[Rows], const bf16* a, int64_t a_stride, F32 (&sums)[Rows][Ranks]) {
#pragma GCC unroll 4
    for (int i = 0; i < kHalfBlock; i += kLanes) {
        F32 lower[Rows], upper[Rows];
        for (int r = 0; r < Rows; ++r) {
            lower[r] = load<F32>(x[r] + i);
            upper[r] = load<F32>(x[r] + kHalfBlock + i);
        }
#pragma GCC unroll 8
        for (int k = 0; k < Ranks; ++k) {
            const U32 pairs = load<U32>(a + k * a_stride + 2 * i);
            const F32 first = first_of_pair(pairs), second = second_of_pair(pairs);
            for (int r = 0; r < Rows; ++r) {
                sums[r][k] += lower[r] * first;
                sums[r][k] += upper[r] * second;
            }
        }
    }
}

template <typename Weight, int Rows, int Ranks>
NESO_INLINE void shrink_tile(const ShrinkTask& task, int row, int rank) {
    const int64_t a_stride = round_up(task.inputs, kLowRankBlock);
    const Weight* a = static_cast<const Weight*>(task.a) + rank * a_stride;
    const float* x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = task.x + task.rows[row + r] * task.x_stride;
    F32 sums[Rows][Ranks] = {};
    const int whole = task.inputs / kLowRankBlock * kLowRankBlock;
    for (int i = 0; i < whole; i += kLowRankBlock) {
        shrink_block<Rows, Ranks>(x, a + i, a_stride, sums);
        for (int r = 0; r < Rows; ++r) x[r] += kLowRankBlock;
    }
    if (whole < task.inputs) {
        float rest[Rows][kLowRankBlock] = {};
        for (int r = 0; r < Rows; ++r) {
            std::memcpy(rest[r], x[r], sizeof(float) * (task.inputs - whole));
            x[r] = rest[r];
        }
        shrink_block<Rows, Ranks>(x, a + whole, a_stride, sums);
    }
    for (int r = 0; r < Rows; ++r) {
        float* h = task.h + (row + r) * task.h_stride + rank;
        for (int k = 0; k < Ranks; ++k) h[k] = sum(sums[r][k]) * task.scales[rank + k];
    }
}

// Ranks are processed in pairs.
template <typename Weight>
void shrink_as(const ShrinkTask& task) {
    int row = 0;
    for (; row + 4 <= task.num_rows; row += 4) {
        int rank = 0;
        for (; rank + 4 <= task.ranks; rank += 4) shrink_tile<Weight, 4, 4>(task, row, rank);
        for (; rank < task.ranks; rank += 2) shrink_tile<Weight, 4, 2>(task, row, rank);
    }
    for (; row < task.num_rows; ++row) {
        int rank = 0;
        for (; rank + 8 <= task.ranks; rank += 8) shrink_tile<Weight, 1, 8>(task, row, rank);
        for (; rank < task.ranks; rank += 2) shrink_tile<Weight, 1, 2>(task, row, rank);
    }
}

inline void shrink(const ShrinkTask& task) {
    if (task.kind == WeightKind::f32) {
        shrink_as<float>(task);
    } else {
        shrink_as<bf16>(task);
    }
}

// Adds one panel to the requested outputs of a row.
NESO_INLINE void add_panel(const ExpandTask& task, int panel, const F32 (&sums)[kVectors], float* out) {
    const int begin = panel * kPanel;
    if (begin >= task.first_output && begin + kPanel <= task.last_output) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            float* at = out + begin + v * kLanes;
            store(at, load<F32>(at) + sums[v]);
        }
        return;
    }
    float values[kPanel];
    for (int v = 0; v < kVectors; ++v) store(values + v * kLanes, sums[v]);
    const int first = begin < task.first_output ? task.first_output : begin;
    const int last = begin + kPanel < task.last_output ? begin + kPanel : task.last_output;
    for (int i = first; i < last; ++i) out[i] += values[i - begin];
}

template <typename Panel, int Panels>
NESO_INLINE void expand_panels(const ExpandTask& task, int panel) {
    using Weight = typename Panel::Weight;
    const int64_t panel_size = int64_t(task.rank) * kPanel;
    const Weight* b = static_cast<const Weight*>(task.b) + panel * panel_size;
    for_row_blocks(task.num_rows, [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
        F32 sums[Rows][Panels][kVectors] = {};
        dot<Panel, Rows, Panels>(task.h + row * task.h_stride, task.h_stride, b, panel_size, task.rank, sums);
        NESO_UNROLL
        for (int r = 0; r < Rows; ++r) {
            NESO_UNROLL
            for (int p = 0; p < Panels; ++p) {
                add_panel(task, panel + p, sums[r][p], task.out + task.rows[row + r] * task.out_stride);
            }
        }
    });
}

template <typename Panel>
void expand_as(const ExpandTask& task) {
    const int last = (task.last_output + kPanel - 1) / kPanel;
    int panel = task.first_output / kPanel;
    for (; panel + kBlockPanels <= last; panel += kBlockPanels) expand_panels<Panel, kBlockPanels>(task, panel);
    if constexpr (kBlockPanels > 1) {
        for (; panel < last; ++panel) expand_panels<Panel, 1>(task, panel);
    }
}

inline void expand(const ExpandTask& task) {
    if (task.kind == WeightKind::f32) {
        expand_as<FloatPanel<float>>(task);
    } else {
        expand_as<Bf16PanelAsFloat>(task);
    }
}

}  // namespace neso::NESO_ISA
