// x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467).
#pragma once

#include <cmath>

#include "kernels/vector.h"

namespace neso::NESO_ISA {

inline void rms_norm(const float* x, const float* weight, float eps, int count, float* out) {
    F32 squares{};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const F32 v = load<F32>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(total / float(count) + eps);
    for (i = 0; i + kLanes <= count; i += kLanes) {
        store(out + i, load<F32>(x + i) * inverse * load<F32>(weight + i));
    }
    for (; i < count; ++i) out[i] = x[i] * inverse * weight[i];
}

}  // namespace neso::NESO_ISA
