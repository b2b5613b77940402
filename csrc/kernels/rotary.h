// Rotary position embedding (arXiv 2104.09864), pairs (i, half + i).
#pragma once

#include "kernels/vector.h"

namespace neso::NESO_ISA {

inline void rotate(float* head, const float* cos, const float* sin, int half) {
    float* other = head + half;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const F32 a = load<F32>(head + i), b = load<F32>(other + i);
        const F32 c = load<F32>(cos + i), s = load<F32>(sin + i);
        store(head + i, a * c - b * s);
        store(other + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = head[i], b = other[i];
        head[i] = a * cos[i] - b * sin[i];
        other[i] = b * cos[i] + a * sin[i];
    }
}

}  // namespace neso::NESO_ISA
