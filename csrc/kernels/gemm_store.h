// Storing sums to outputs: bias, residual stream, and a partial last panel.
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace neso::NESO_ISA {

// Store one panel of sums of one row to out[16 * panel ...].
NESO_INLINE void store_panel(const Matrix& matrix, int panel, const F32 (&sums)[kVectors], float* row, bool accumulate) {
    const int first = panel * kPanel;
    float* out = row + first;
    const float* bias = matrix.bias ? matrix.bias + first : nullptr;
    if (first + kPanel <= matrix.outputs) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            F32 value = sums[v];
            if (bias) value += load<F32>(bias + v * kLanes);
            if (accumulate) value += load<F32>(out + v * kLanes);
            store(out + v * kLanes, value);
        }
        return;
    }
    float values[kPanel];
    for (int v = 0; v < kVectors; ++v) store(values + v * kLanes, sums[v]);
    for (int i = 0; i < matrix.outputs - first; ++i) {
        out[i] = values[i] + (bias ? bias[i] : 0.0f) + (accumulate ? out[i] : 0.0f);
    }
}

}  // namespace neso::NESO_ISA
