// Activations made ready for a matrix: padded, rounded to bfloat16 or to integers, permuted for act-order weights.
#pragma once

#include <cmath>

#include "kernels/gemm_amx.h"
#include "kernels/gemm_quantized.h"

namespace neso::NESO_ISA {

#if defined(__AVX512BF16__)
constexpr InputKind kBf16Input = InputKind::bf16;
#else
constexpr InputKind kBf16Input = InputKind::f32;
#endif

// Rows from which quantized panels are unpacked rather than multiplied as integers. Measured.
#if defined(__AMX_BF16__)
constexpr int kUnpackRows = 13, kUnpackRowsDynamic = 25;
#elif defined(__AVX512BF16__)
constexpr int kUnpackRows = 33, kUnpackRowsDynamic = 1 << 30;
#else
constexpr int kUnpackRows = 17, kUnpackRowsDynamic = 17;
#endif

inline InputKind input_kind(const Matrix& matrix, int rows) {
    if (matrix.quantized()) {
        const bool unpack = rows >= (matrix.dynamic ? kUnpackRowsDynamic : kUnpackRows);
        return unpack ? kBf16Input : InputKind::integer;
    }
    return matrix.kind == WeightKind::bf16 ? kBf16Input : InputKind::f32;
}

// The input that gemm wants for this matrix and number of rows; its memory is to be attached.
inline Input describe_input(const Matrix& matrix, int rows) {
    Input input;
    input.kind = input_kind(matrix, rows);
    input.rows = rows;
    input.depth = matrix.depth;
    if (input.kind == InputKind::integer) {
#if defined(__AVX512VNNI__)
        input.planes = matrix.dynamic ? 1 : 2;
#endif
        input.stride = int64_t(input.depth) * input.planes;
        input.value_bytes = rows * input.stride * int64_t(sizeof(IntegerCode));
        input.num_groups = int64_t(rows) * input.depth / kGroup;
        return input;
    }
    // An odd number of cache lines: rows at a power of two would all fall into the same few sets of the cache.
    const int element = input.kind == InputKind::f32 ? 4 : 2;
    input.stride = (round_up(int64_t(input.depth) * element, 128) + 64) / element;
    input.value_bytes = round_up(rows, 32) * input.stride * element;  // whole tiles
    return input;
}

// One group of 32 values -> codes, their scale and their sum.
NESO_INLINE void quantize_group(const float* values, int limit, IntegerCode* codes, int64_t plane_stride, float& scale,
                                int32_t& total) {
    F32 peak{};
    for (int i = 0; i < kGroup; i += kLanes) {
        const F32 v = load<F32>(values + i);
        peak = max(peak, max(v, -v));
    }
    const float absmax = largest(peak);
    // NaN and infinity reach the result by the scale.
    float check = 0;
    for (int i = 0; i < kGroup; ++i) check += values[i] * 0.0f;
    scale = absmax / float(limit) + check;
    const float inverse = absmax > 0 && check == 0 ? float(limit) / absmax : 0.0f;
    total = 0;
    for (int i = 0; i < kGroup; ++i) {
        const int code = int(std::nearbyint(values[i] * inverse));
        total += code;
#if defined(__AVX512VNNI__)
        codes[i] = int8_t(code);
        if (plane_stride) codes[i + plane_stride] = int8_t((code - int8_t(code)) >> 8);
#else
        (void)plane_stride;
        codes[i] = int16_t(code);
#endif
    }
}

inline void pack_integers(const Input& input, int row, const float* values) {
#if defined(__AVX512VNNI__)
    // 16 bits less half a low plane, so that the high plane stays within 8 bits.
    const int limit = input.planes == 2 ? 32512 : 127;
    const int64_t plane_stride = input.planes == 2 ? input.depth : 0;
#else
    const int limit = 32767;
    const int64_t plane_stride = 0;
#endif
    const int groups = input.depth / kGroup;
    for (int group = 0; group < groups; ++group) {
        const int64_t at = int64_t(row) * groups + group;
        quantize_group(values + group * kGroup, limit, input.row<IntegerCode>(row) + group * kGroup, plane_stride,
                       input.scales[at], input.sums[at]);
    }
}

inline void pack_padded(const Input& input, int row, const float* values) {
    if (input.kind == InputKind::f32) {
        std::memcpy(input.row<float>(row), values, sizeof(float) * input.depth);
    } else if (input.kind == InputKind::bf16) {
        bf16* to = input.row<bf16>(row);
        for (int i = 0; i < input.depth; i += kLanes) store_bf16(to + i, load<F32>(values + i));
    } else {
        pack_integers(input, row, values);
    }
}

inline void pack_input(const Input& input, int row, const Matrix& matrix, const float* values) {
    if (matrix.inputs == matrix.depth && !matrix.input_order) {
        pack_padded(input, row, values);
        return;
    }
    static thread_local Buffer<float> padded;
    padded.reserve(matrix.depth);
    for (int i = 0; i < matrix.inputs; ++i) {
        padded.data()[i] = values[matrix.input_order ? matrix.input_order[i] : i];
    }
    std::memset(padded.data() + matrix.inputs, 0, sizeof(float) * (matrix.depth - matrix.inputs));
    pack_padded(input, row, padded.data());
}

}  // namespace neso::NESO_ISA
