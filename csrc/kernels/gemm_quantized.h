// Integer inputs times quantized panels, for small batches, where reading the weights dominates.
//
// Activations are integers with a scale per group of inputs. With dot products of 8-bit integers they are one or two
// planes of 8 bits: two planes make 16 bits, more precise than bfloat16, at the cost of a second instruction hidden by
// memory latency. Otherwise they are 16-bit values. Sums of a group are exact in 32 bits: 128 * 255 * 32767 < 2^31.
//
//   sum_k (s c_k + o) x a_k  =  x (s sum_k c_k a_k + o sum_k a_k)        per group, x the scale of the activations
//
// Symmetric codes have o = -s m with the middle code m: the sums start at -m sum_k a_k, and no offset is added.
#pragma once

#include "kernels/gemm_store.h"
#include "kernels/unpack.h"

namespace neso::NESO_ISA {

#if defined(NESO_INT8_DOT)
using IntegerCode = int8_t;
#else
using IntegerCode = int16_t;
#endif

// Rows and panels whose sums fit the registers.
#if defined(__AVX512F__)
template <int Planes>
constexpr int kQuantizedRows = 4;
constexpr int kQuantizedPanels = 2;
#elif defined(__AVXVNNI__)
template <int Planes>
constexpr int kQuantizedRows = 4 / Planes;
constexpr int kQuantizedPanels = 1;
#elif defined(__AVX2__)
template <int Planes>
constexpr int kQuantizedRows = 2;
constexpr int kQuantizedPanels = 1;
#elif defined(__aarch64__)
template <int Planes>
constexpr int kQuantizedRows = 4 / Planes;
constexpr int kQuantizedPanels = 1;
#else
template <int Planes>
constexpr int kQuantizedRows = 1;
constexpr int kQuantizedPanels = 1;
#endif

// What `product_codes` subtracts from each code: NEON's dot products multiply signed bytes only.
#if defined(__ARM_FEATURE_DOTPROD)
template <WeightKind Kind>
constexpr int kCodeShift = Kind == WeightKind::int8 ? 128 : 0;
#else
template <WeightKind Kind>
constexpr int kCodeShift = 0;
#endif

template <WeightKind Kind>
NESO_INLINE EightCodes product_codes(const char* panel, int k, int vector) {
    const EightCodes codes = load_codes<Kind>(panel, k, vector);
    if constexpr (kCodeShift<Kind> == 0) return codes;
    return {codes.first ^ 0x80808080u, codes.second ^ 0x80808080u};
}

// sums += codes of 4 inputs of kLanes outputs, times the activations a[0..3].
NESO_INLINE void add_products(I32& sums, U32 codes, const IntegerCode* a) {
#if defined(__AVX512VNNI__)
    int32_t four;
    std::memcpy(&four, a, 4);
    sums = (I32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    int32_t four;
    std::memcpy(&four, a, 4);
    sums = (I32)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(four));
#elif defined(__ARM_FEATURE_DOTPROD)
    int32_t four;
    std::memcpy(&four, a, 4);
    sums = (I32)vdotq_s32((int32x4_t)sums, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__AVX512BW__)
    const __m512i even = (__m512i)(codes & 0x00ff00ffu), odd = (__m512i)((codes >> 8) & 0x00ff00ffu);
    sums += (I32)_mm512_madd_epi16(even, _mm512_set1_epi32(uint16_t(a[0]) | int32_t(a[2]) << 16));
    sums += (I32)_mm512_madd_epi16(odd, _mm512_set1_epi32(uint16_t(a[1]) | int32_t(a[3]) << 16));
#elif defined(__AVX2__)
    const __m256i even = (__m256i)(codes & 0x00ff00ffu), odd = (__m256i)((codes >> 8) & 0x00ff00ffu);
    sums += (I32)_mm256_madd_epi16(even, _mm256_set1_epi32(uint16_t(a[0]) | int32_t(a[2]) << 16));
    sums += (I32)_mm256_madd_epi16(odd, _mm256_set1_epi32(uint16_t(a[1]) | int32_t(a[3]) << 16));
#else
    for (int i = 0; i < 4; ++i) sums += (I32)((codes >> (8 * i)) & 0xffu) * int32_t(a[i]);
#endif
}

// Sums of a group of inputs [begin, end), for a few rows and panels. Planes: 1, or 2 if the activations have a high
// plane, `depth` codes after the low one.
template <WeightKind Kind, int Rows, int Panels, int Planes>
NESO_INLINE void add_group(const IntegerCode* a, int64_t a_stride, int depth, const char* weights,
                           int64_t panel_bytes, int begin, int end, I32 (&sums)[Rows][Panels][Planes][kVectors]) {
#pragma GCC unroll 2
    for (int k = begin; k < end; k += 8) {
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
            prefetch_codes<Kind>(weights + (Panels + p) * panel_bytes, k);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const EightCodes codes = product_codes<Kind>(weights + p * panel_bytes, k, v);
#pragma GCC unroll 4
                for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
                    for (int plane = 0; plane < Planes; ++plane) {
                        const IntegerCode* at = a + r * a_stride + plane * depth + k;
                        add_products(sums[r][p][plane][v], codes.first, at);
                        add_products(sums[r][p][plane][v], codes.second, at + 4);
                    }
                }
            }
        }
    }
}

// Kind, Symmetric: of the matrix, as compile-time constants.
template <WeightKind Kind, bool Symmetric, int Rows, int Panels, int Planes>
NESO_INLINE void quantized_panels(const Input& input, const Matrix& matrix, int panel, int row, float* out,
                                  int64_t stride, bool accumulate) {
    constexpr int kMiddle = !Symmetric ? 0 : Kind == WeightKind::int8 ? 128 : 8;
    constexpr int kStart = kCodeShift<Kind> - kMiddle;
    const int group_size = input.group_size, groups = (input.depth + group_size - 1) / group_size;
    const int groups_a_scale = matrix.group_size / group_size;
    const int64_t panel_bytes = int64_t(matrix.depth) * kPanel / (Kind == WeightKind::int8 ? 1 : 2);
    const char* weights = static_cast<const char*>(matrix.data) + panel * panel_bytes;
    const int64_t panel_scales = int64_t(matrix.groups) * kPanel;
    const f16* scales = matrix.scales + panel * panel_scales;
    const f16* offsets = Symmetric ? nullptr : matrix.offsets + panel * panel_scales;
    const float* input_scales = input.scales + int64_t(row) * groups;
    const int32_t* input_sums = input.sums + int64_t(row) * groups;
    F32 totals[Rows][Panels][kVectors] = {};
    for (int group = 0, part = 0; group < groups; ++group) {
        const int begin = group * group_size;
        const int end = begin + group_size < input.depth ? begin + group_size : input.depth;
        I32 sums[Rows][Panels][Planes][kVectors] = {};
        NESO_UNROLL
        for (int r = 0; r < Rows; ++r) {
            NESO_UNROLL
            for (int p = 0; p < Panels; ++p) {
                NESO_UNROLL
                for (int v = 0; v < kVectors; ++v) sums[r][p][0][v] = splat(kStart * input_sums[r * groups + group]);
            }
        }
        add_group<Kind>(input.row<IntegerCode>(row), input.stride, input.depth, weights, panel_bytes, begin, end, sums);
#pragma GCC unroll 4
        for (int p = 0; p < Panels; ++p) {
            __builtin_prefetch(scales + (Panels + p) * panel_scales, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const F32 scale = load_f16(scales + p * panel_scales + v * kLanes);
#pragma GCC unroll 4
                for (int r = 0; r < Rows; ++r) {
                    const float x = input_scales[r * groups + group] * matrix.scale_factor;
                    I32 products = sums[r][p][0][v];
                    if constexpr (Planes == 2) products += sums[r][p][1][v] << 8;
                    totals[r][p][v] += to_f32(products) * (scale * x);
                    if constexpr (!Symmetric) {
                        const F32 offset = load_f16(offsets + p * panel_scales + v * kLanes);
                        totals[r][p][v] += offset * (x * float(input_sums[r * groups + group]));
                    }
                }
            }
        }
        if (++part == groups_a_scale) {
            part = 0;
            scales += kPanel;
            if constexpr (!Symmetric) offsets += kPanel;
        }
    }
    NESO_UNROLL
    for (int r = 0; r < Rows; ++r) {
        NESO_UNROLL
        for (int p = 0; p < Panels; ++p) {
            store_panel(matrix, panel + p, totals[r][p], out + (row + r) * stride, accumulate);
        }
    }
}

template <WeightKind Kind, bool Symmetric, int Planes>
void gemm_integer(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                  bool accumulate) {
    int panel = range.first_panel;
    for (; panel + kQuantizedPanels <= range.last_panel; panel += kQuantizedPanels) {
        for_row_blocks<kQuantizedRows<Planes>>(range.rows(), [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
            quantized_panels<Kind, Symmetric, Rows, kQuantizedPanels, Planes>(
                input, matrix, panel, range.first_row + row, out, stride, accumulate);
        });
    }
    for (; panel < range.last_panel; ++panel) {
        for_row_blocks<kQuantizedRows<Planes>>(range.rows(), [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
            quantized_panels<Kind, Symmetric, Rows, 1, Planes>(input, matrix, panel, range.first_row + row, out, stride,
                                                              accumulate);
        });
    }
}

template <WeightKind Kind, int Planes>
void gemm_integer(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                  bool accumulate) {
    if (matrix.offsets) {
        gemm_integer<Kind, false, Planes>(input, matrix, range, out, stride, accumulate);
    } else {
        gemm_integer<Kind, true, Planes>(input, matrix, range, out, stride, accumulate);
    }
}

inline void gemm_quantized(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                           int64_t stride, bool accumulate) {
    constexpr auto kInt8 = WeightKind::int8, kInt4 = WeightKind::int4;
    const bool int8 = matrix.kind == kInt8, two = input.planes == 2;
    if (int8 && two) gemm_integer<kInt8, 2>(input, matrix, range, out, stride, accumulate);
    if (int8 && !two) gemm_integer<kInt8, 1>(input, matrix, range, out, stride, accumulate);
    if (!int8 && two) gemm_integer<kInt4, 2>(input, matrix, range, out, stride, accumulate);
    if (!int8 && !two) gemm_integer<kInt4, 1>(input, matrix, range, out, stride, accumulate);
}

}  // namespace neso::NESO_ISA
