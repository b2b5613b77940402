// The gate of an MLP: activation(gate) * up (arXiv 2002.05202).
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace neso::NESO_ISA {

// x * sigmoid(x). Far below zero the exponential would overflow: there the result is 0 (its limit).
NESO_INLINE F32 silu(F32 x) { return x / (exp(-x) + 1.0f); }

// The tanh approximation of x times the normal distribution function (arXiv 1606.08415):
// 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y))
NESO_INLINE F32 gelu_tanh(F32 x) {
    const F32 y = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (exp(-2.0f * y) + 1.0f);
}

template <typename Function>
NESO_INLINE void gated_by(const Function& function, const float* gate, const float* up, int count, float* out) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, function(load<F32>(gate + i)) * load<F32>(up + i));
    if (i == count) return;
    float rest[kLanes] = {}, result[kLanes];
    std::memcpy(rest, gate + i, sizeof(float) * (count - i));
    store(result, function(load<F32>(rest)));
    for (int j = 0; i < count; ++i, ++j) out[i] = result[j] * up[i];
}

inline void gated(Activation activation, const float* gate, const float* up, int count, float* out) {
    if (activation == Activation::silu) {
        gated_by([](F32 x) NESO_INLINE_LAMBDA { return silu(x); }, gate, up, count, out);
    } else {
        gated_by([](F32 x) NESO_INLINE_LAMBDA { return gelu_tanh(x); }, gate, up, count, out);
    }
}

}  // namespace neso::NESO_ISA
