// Activations of vectors, and the soft cap of scores and logits.
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace neso::NESO_ISA {

// x * sigmoid(x). For large negative x the exponential would overflow; the result is its limit, 0.
NESO_INLINE F32 silu(F32 x) { return x / (exp(-x) + 1.0f); }

// The tanh approximation of x times the normal distribution function (arXiv 1606.08415):
// 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y))
NESO_INLINE F32 gelu_tanh(F32 x) {
    const F32 y = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x / (exp(-2.0f * y) + 1.0f);
}

// x times the normal distribution function, 0.5 (1 + erf(x / sqrt(2))). erfc is within 1.5e-7
// (Abramowitz and Stegun 7.1.26).
NESO_INLINE F32 gelu(F32 x) {
    const F32 y = max(x, -x) * 0.70710678118654752f;
    const F32 t = 1.0f / (1.0f + 0.3275911f * y);
    F32 p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const F32 half = 0.5f * p * t * exp(-y * y);  // 0.5 erfc(|x| / sqrt(2))
    return x * select(x > 0.0f, 1.0f - half, half);
}

// x * sigmoid(1.702 x)
NESO_INLINE F32 quick_gelu(F32 x) { return x / (exp(-1.702f * x) + 1.0f); }

NESO_INLINE F32 relu(F32 x) { return select(x < 0.0f, F32{}, x); }

// Near zero, where 1 - 2 / (1 + exp(2 x)) would cancel, the polynomial of Cephes' tanhf.
NESO_INLINE F32 tanh(F32 x) {
    const F32 z = x * x;
    F32 p = splat(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return select(z < 0.390625f, p * z * x + x, 1.0f - 2.0f / (exp(2.0f * x) + 1.0f));
}

// out[i] = function(x[i]), vector by vector.
template <typename Function>
NESO_INLINE void map_vectors(const Function& function, const float* x, int count, float* out) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, function(load<F32>(x + i)));
    if (i == count) return;
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, sizeof(float) * (count - i));
    store(rest, function(load<F32>(rest)));
    std::memcpy(out + i, rest, sizeof(float) * (count - i));
}

// Call `body` with the function object of an activation.
template <typename Body>
NESO_INLINE void with_activation(Activation activation, const Body& body) {
    switch (activation) {
        case Activation::silu: body([](F32 x) NESO_INLINE_LAMBDA { return silu(x); }); return;
        case Activation::gelu: body([](F32 x) NESO_INLINE_LAMBDA { return gelu(x); }); return;
        case Activation::gelu_tanh: body([](F32 x) NESO_INLINE_LAMBDA { return gelu_tanh(x); }); return;
        case Activation::quick_gelu: body([](F32 x) NESO_INLINE_LAMBDA { return quick_gelu(x); }); return;
        case Activation::relu: body([](F32 x) NESO_INLINE_LAMBDA { return relu(x); }); return;
    }
}

inline void activate(Activation activation, const float* x, int count, float* out) {
    with_activation(activation, [&](const auto& function) { map_vectors(function, x, count, out); });
}

inline void softcap(float* x, int count, float cap) {
    const float inverse = 1.0f / cap;
    map_vectors([&](F32 v) NESO_INLINE_LAMBDA { return tanh(v * inverse) * cap; }, x, count, x);
}

}  // namespace neso::NESO_ISA
