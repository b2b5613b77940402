// The inner loop of every product: a few rows of inputs times a few packed panels, accumulated in registers.
//
// The format of a panel is a policy class: Input and Weight types, inputs per step (kStep), and one step of
// accumulation. Matrix products and both products of attention use it.
#pragma once

#include "kernels/vector.h"

namespace neso::NESO_ISA {

// float or half-precision panels [k][16].
template <typename T>
struct FloatPanel {
    using Input = float;
    using Weight = T;
    static constexpr int kStep = 1;

    template <int Rows, int Panels>
    static NESO_INLINE void step(const float* a, int64_t a_stride, const T* b, int64_t b_stride,
                                 F32 (&sums)[Rows][Panels][kVectors]) {
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const F32 weights = load_float(b + p * b_stride + v * kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) sums[r][p][v] += a[r * a_stride] * weights;
            }
        }
    }
};

// bfloat16 panels [k / 2][16][2] with float inputs, for CPUs without bfloat16 instructions.
struct Bf16PanelAsFloat {
    using Input = float;
    using Weight = bf16;
    static constexpr int kStep = 2;

    template <int Rows, int Panels>
    static NESO_INLINE void step(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                                 F32 (&sums)[Rows][Panels][kVectors]) {
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const U32 pairs = load<U32>(b + p * b_stride + 2 * v * kLanes);
                const F32 first = first_of_pair(pairs), second = second_of_pair(pairs);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    sums[r][p][v] += a[r * a_stride] * first;
                    sums[r][p][v] += a[r * a_stride + 1] * second;
                }
            }
        }
    }
};

#if defined(NESO_BF16_DOT)

// kLanes pairs of bfloat16 numbers.
#if defined(__AVX512BF16__)
using Bf16Pairs = __m512bh;
NESO_INLINE Bf16Pairs splat_pair(int32_t pair) { return (Bf16Pairs)_mm512_set1_epi32(pair); }
NESO_INLINE F32 add_products(F32 sums, Bf16Pairs a, Bf16Pairs b) { return (F32)_mm512_dpbf16_ps((__m512)sums, a, b); }
#else
using Bf16Pairs = bfloat16x8_t;
NESO_INLINE Bf16Pairs splat_pair(int32_t pair) { return vreinterpretq_bf16_s32(vdupq_n_s32(pair)); }
NESO_INLINE F32 add_products(F32 sums, Bf16Pairs a, Bf16Pairs b) { return (F32)vbfdotq_f32((float32x4_t)sums, a, b); }
#endif

// bfloat16 panels with bfloat16 inputs.
struct Bf16Panel {
    using Input = bf16;
    using Weight = bf16;
    static constexpr int kStep = 2;

    template <int Rows, int Panels>
    static NESO_INLINE void step(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                                 F32 (&sums)[Rows][Panels][kVectors]) {
        Bf16Pairs weights[Panels][kVectors];
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) weights[p][v] = load<Bf16Pairs>(b + p * b_stride + 2 * v * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            int32_t pair;
            std::memcpy(&pair, a + r * a_stride, sizeof(pair));
            const Bf16Pairs inputs = splat_pair(pair);
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[r][p][v] = add_products(sums[r][p][v], inputs, weights[p][v]);
            }
        }
    }
};

#endif

// sums[r][p] += a[r] . panel p, over `depth` inputs (a multiple of kStep).
//
// With Ahead, prefetches half the byte size of the panels from `ahead`.
template <typename Panel, int Rows, int Panels, bool Ahead = false>
NESO_INLINE void dot(const typename Panel::Input* a, int64_t a_stride, const typename Panel::Weight* b,
                     int64_t b_stride, int depth, F32 (&sums)[Rows][Panels][kVectors], const char* ahead = nullptr) {
    constexpr int kStep = Panel::kStep, kLine = 64;
    constexpr int kAheadBytes = Panels * kPanel * kStep * int(sizeof(*b)) / 2;
#pragma GCC unroll 4
    for (int k = 0; k < depth; k += kStep) {
        if constexpr (Ahead) {
#pragma GCC unroll 4
            for (int at = 0; at < kAheadBytes; at += kLine) __builtin_prefetch(ahead + at, 0, 2);
            ahead += kAheadBytes;
        }
        Panel::step(a + k, a_stride, b + int64_t(k) * kPanel, b_stride, sums);
    }
}

// Rows and panels that fill the registers.
#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockPanels = 4;
#elif defined(__AVX2__)
constexpr int kBlockRows = 5, kBlockPanels = 1;
#else
constexpr int kBlockRows = 4, kBlockPanels = 1;
#endif

// Call body.template operator()<Rows>(row) for blocks of rows, the last one smaller.
template <int Rows = kBlockRows, typename Body>
NESO_INLINE void for_row_blocks(int rows, const Body& body) {
    int row = 0;
    for (; row + Rows <= rows; row += Rows) body.template operator()<Rows>(row);
    if constexpr (Rows > 1) {
        if (row < rows) {
            for_row_blocks<Rows - 1>(rows - row, [&]<int Rest>(int r) NESO_INLINE_LAMBDA {
                body.template operator()<Rest>(row + r);
            });
        }
    }
}

}  // namespace neso::NESO_ISA
