// Over a row of logits: the largest, and exponentials.
#pragma once

#include "kernels/vector.h"

namespace neso::NESO_ISA {

// The index of the largest logit, the first of equal ones; -1 when there is a NaN.
inline int argmax(const float* logits, int count) {
    F32 peak = splat(logits[0]);
    I32 nan{};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const F32 v = load<F32>(logits + i);
        peak = max(v, peak);
        nan |= v != v;
    }
    float best = largest(peak);
    bool broken = best != best;
    for (int lane = 0; lane < kLanes; ++lane) broken |= nan[lane] != 0;
    for (; i < count; ++i) {
        broken |= logits[i] != logits[i];
        best = logits[i] > best ? logits[i] : best;
    }
    if (broken) return -1;
    int index = 0;
    for (; index + kLanes <= count; index += kLanes) {
        const I32 equal = load<F32>(logits + index) == best;
        int any = 0;
        for (int lane = 0; lane < kLanes; ++lane) any |= equal[lane];
        if (any) break;
    }
    while (index < count && logits[index] != best) ++index;
    return index;
}

// out[i] = exp((logits[i] - maximum) / temperature)
inline void exponentials(const float* logits, int count, float maximum, float temperature, float* out) {
    const float inverse = 1.0f / temperature;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, exp((load<F32>(logits + i) - maximum) * inverse));
    for (; i < count; ++i) out[i] = exp(splat((logits[i] - maximum) * inverse))[0];
}

}  // namespace neso::NESO_ISA
