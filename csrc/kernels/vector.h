// Vectors of floats of the instruction set's width, as GCC and Clang vector types with + - * and comparisons.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/dtypes.h"
#include "kernels/matrix.h"

#define NESO_INLINE inline __attribute__((always_inline))
#define NESO_INLINE_LAMBDA __attribute__((always_inline))

// For loops over an array of sums, outside the inner loop. Clang keeps an array in registers only if all its indices are
// constants, and otherwise stores every sum in every iteration of the inner loop. GCC does not need it.
#if defined(__clang__)
#define NESO_UNROLL _Pragma("unroll")
#else
#define NESO_UNROLL
#endif

// Instructions that add products of four 8-bit integers, or of two bfloat16 numbers, to each 32-bit lane.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define NESO_INT8_DOT
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NESO_BF16_DOT
#endif

namespace neso::NESO_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(kLanes * 4)));
typedef int32_t I32 __attribute__((vector_size(kLanes * 4)));
typedef uint32_t U32 __attribute__((vector_size(kLanes * 4)));

// Vectors per panel.
constexpr int kVectors = kPanel / kLanes;

template <typename V, typename T>
NESO_INLINE V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
}

template <typename V, typename T>
NESO_INLINE void store(T* to, V v) {
    std::memcpy(to, &v, sizeof(V));
}

NESO_INLINE F32 splat(float value) { return value - F32{}; }
NESO_INLINE I32 splat(int32_t value) { return value - I32{}; }

NESO_INLINE F32 to_f32(I32 v) { return __builtin_convertvector(v, F32); }
NESO_INLINE I32 as_int(F32 v) { return (I32)v; }
NESO_INLINE F32 as_float(I32 v) { return (F32)v; }
NESO_INLINE F32 as_float(U32 v) { return (F32)v; }

NESO_INLINE F32 select(I32 mask, F32 yes, F32 no) { return as_float((as_int(yes) & mask) | (as_int(no) & ~mask)); }
NESO_INLINE F32 max(F32 a, F32 b) { return a > b ? a : b; }
NESO_INLINE F32 min(F32 a, F32 b) { return a < b ? a : b; }

NESO_INLINE float sum(F32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += v[i];
    return total;
#endif
}

// Unspecified if an element is NaN.
NESO_INLINE float largest(F32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float found = v[0];
    for (int i = 1; i < kLanes; ++i) found = v[i] > found ? v[i] : found;
    return found;
#endif
}

NESO_INLINE F32 load_f16(const f16* from) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (F32)_mm256_cvtph_ps(load<__m128i>(from));
#elif defined(__aarch64__)
    return (F32)vcvt_f32_f16(load<float16x4_t>(from));
#else
    F32 v;
    for (int i = 0; i < kLanes; ++i) v[i] = to_float(from[i]);
    return v;
#endif
}

NESO_INLINE F32 load_float(const float* from) { return load<F32>(from); }
NESO_INLINE F32 load_float(const f16* from) { return load_f16(from); }

// First and second elements of bfloat16 pairs, one pair per lane.
NESO_INLINE F32 first_of_pair(U32 pairs) { return as_float(pairs << 16); }
NESO_INLINE F32 second_of_pair(U32 pairs) { return as_float(pairs & 0xffff0000u); }

// Round to nearest even, in the upper half of each lane; the lower half is not cleared. NaN stays NaN.
NESO_INLINE U32 round_to_bf16(F32 v) {
    const U32 bits = (U32)v;
    const U32 rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
    const U32 nan = (U32)(v != v);
    return (rounded & ~nan) | ((bits | 0x400000u) & nan);
}

// float[kLanes] to bfloat16[kLanes], in order.
NESO_INLINE void store_bf16(bf16* to, F32 v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &rounded, sizeof(rounded));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    const bfloat16x4_t rounded = vcvt_bf16_f32((float32x4_t)v);
    std::memcpy(to, &rounded, sizeof(rounded));
#else
    const U32 rounded = round_to_bf16(v) >> 16;
    for (int i = 0; i < kLanes; ++i) to[i].bits = uint16_t(rounded[i]);
#endif
}

// exp(x - n ln 2) for n = round(x / ln 2), by the polynomial of Cephes' expf.
NESO_INLINE F32 exp_fraction(F32 x, F32 n) {
    const F32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    F32 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// The exponential, within 2 units in the last place; 0 below -87, at most 2^127. NaN stays NaN.
// exp(x) = 2^n exp(r), n = round(x / ln 2).
NESO_INLINE F32 exp(F32 x) {
#if defined(__AVX512F__)
    // min returns its second operand if one is NaN.
    const F32 clamped = (F32)_mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x);
    const F32 n = (F32)_mm512_roundscale_ps((__m512)(clamped * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
    const F32 p = exp_fraction(clamped, n);
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (F32)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
    const F32 clamped = select(x > 88.0f, splat(88.0f), select(x < -87.0f, splat(-87.0f), x));
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
    const F32 shifted = clamped * 1.44269504088896341f + kRound;
    const F32 p = exp_fraction(clamped, shifted - kRound);
    const I32 exponent = as_int(shifted) - as_int(splat(kRound)) + 127;
    const F32 result = p * as_float(exponent << 23);
    return select(x < -87.0f, F32{}, result);
#endif
}

}  // namespace neso::NESO_ISA
