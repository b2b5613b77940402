// Integer inputs times quantized panels: for batches so small that reading the weights takes the time.
//
// Activations are integers with a scale for each group of 32 inputs. With VNNI they are one or two planes of 8 bits:
// two planes make 16 bits, finer than bfloat16, and cost a second instruction that hides behind the memory. Elsewhere
// they are 16-bit values. Sums of a group are exact in 32 bits: 32 * 255 * 32767 < 2^31.
//
//   sum_k (s c_k + o) x a_k  =  x (s sum_k c_k a_k + o sum_k a_k)        per group, x the scale of the activations
#pragma once

#include "kernels/gemm_store.h"
#include "kernels/unpack.h"

namespace neso::NESO_ISA {

#if defined(__AVX512VNNI__)
using IntegerCode = int8_t;
#else
using IntegerCode = int16_t;
#endif

#if defined(__AVX512VNNI__)
constexpr int kQuantizedRows = 4;
#elif defined(__AVX2__)
constexpr int kQuantizedRows = 2;
#else
constexpr int kQuantizedRows = 1;
#endif

// sums += codes of 4 inputs of kLanes outputs, times the activations a[0..3].
NESO_INLINE void add_products(I32& sums, U32 codes, const IntegerCode* a) {
#if defined(__AVX512VNNI__)
    int32_t four;
    std::memcpy(&four, a, 4);
    sums = (I32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
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

// Planes: 1, or 2 where the activations have a high plane `plane_stride` codes after the low one.
template <int Rows, int Planes>
NESO_INLINE void quantized_panel(const Input& input, const Matrix& matrix, int panel, int row, float* out,
                                 int64_t stride, bool accumulate) {
    const char* weights = matrix.panel(panel);
    const int64_t plane_stride = input.depth;
    const int groups_of_32 = matrix.depth / kGroup;
    F32 totals[Rows][kVectors] = {};
    for (int group = 0; group < groups_of_32; ++group) {
        I32 sums[Rows][Planes][kVectors] = {};
#pragma GCC unroll 8
        for (int k = group * kGroup; k < (group + 1) * kGroup; k += 4) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const U32 codes = load_codes(matrix, weights, k, v);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const IntegerCode* a = input.row<IntegerCode>(row + r) + k;
#pragma GCC unroll 2
                    for (int p = 0; p < Planes; ++p) add_products(sums[r][p][v], codes, a + p * plane_stride);
                }
            }
        }
        const GroupScale scale = group_scale(matrix, panel, group * kGroup / matrix.group_size);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const int64_t at = int64_t(row + r) * groups_of_32 + group;
            const float x = input.scales[at], a = x * float(input.sums[at]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                I32 products = sums[r][0][v];
                if constexpr (Planes == 2) products += sums[r][1][v] * 256;
                totals[r][v] += to_f32(products) * (scale.scale[v] * x) + scale.offset[v] * a;
            }
        }
    }
    for (int r = 0; r < Rows; ++r) store_panel(matrix, panel, totals[r], out + (row + r) * stride, accumulate);
}

template <int Planes, WeightKind Kind>
void gemm_integer(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                  bool accumulate) {
    Matrix known = matrix;
    known.kind = Kind;  // a constant for the compiler
    for (int panel = range.first_panel; panel < range.last_panel; ++panel) {
        for_row_blocks<kQuantizedRows>(range.rows(), [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
            quantized_panel<Rows, Planes>(input, known, panel, range.first_row + row, out, stride, accumulate);
        });
    }
}

inline void gemm_quantized(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                           int64_t stride, bool accumulate) {
    const bool int8 = matrix.kind == WeightKind::int8, two = input.planes == 2;
    if (int8 && two) gemm_integer<2, WeightKind::int8>(input, matrix, range, out, stride, accumulate);
    if (int8 && !two) gemm_integer<1, WeightKind::int8>(input, matrix, range, out, stride, accumulate);
    if (!int8 && two) gemm_integer<2, WeightKind::int4>(input, matrix, range, out, stride, accumulate);
    if (!int8 && !two) gemm_integer<1, WeightKind::int4>(input, matrix, range, out, stride, accumulate);
}

}  // namespace neso::NESO_ISA
