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

#if defined(__AVX512BF16__)
// bfloat16 panels with bfloat16 inputs: vdpbf16ps multiplies 32 pairs at once.
struct Bf16Panel {
    using Input = bf16;
    using Weight = bf16;
    static constexpr int kStep = 2;

    template <int Rows, int Panels>
    static NESO_INLINE void step(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                                 F32 (&sums)[Rows][Panels][kVectors]) {
        __m512bh weights[Panels];
#pragma GCC unroll 8
        for (int p = 0; p < Panels; ++p) weights[p] = load<__m512bh>(b + p * b_stride);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            int32_t pair;
            std::memcpy(&pair, a + r * a_stride, sizeof(pair));
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) {
                sums[r][p][0] = (F32)_mm512_dpbf16_ps((__m512)sums[r][p][0], inputs, weights[p]);
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
