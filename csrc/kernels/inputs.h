// Packs activations for a matrix: padded, rounded to bfloat16 or integers, permuted for act-order weights.
#pragma once

#include <cmath>

#include "kernels/gemm_amx_int8.h"
#include "kernels/gemm_quantized.h"

namespace neso::NESO_ISA {

#if defined(NESO_BF16_DOT)
constexpr InputKind kBf16Input = InputKind::bf16;
#else
constexpr InputKind kBf16Input = InputKind::f32;
#endif

// From this number of rows, quantized panels are unpacked instead of multiplied as integers. Measured on x86-64. On
// aarch64, the way with fewer instructions: `gemm_quantized` needs fewer than float32, more than bfloat16 with two planes.
#if defined(__AMX_BF16__)
constexpr int kUnpackRows = 13, kUnpackRowsDynamic = 25;
#elif defined(NESO_BF16_DOT)
constexpr int kUnpackRows = 21, kUnpackRowsDynamic = 1 << 30;
#elif defined(NESO_INT8_DOT)
constexpr int kUnpackRows = 1 << 30, kUnpackRowsDynamic = 1 << 30;
#else
constexpr int kUnpackRows = 17, kUnpackRowsDynamic = 17;
#endif

inline InputKind input_kind(const Matrix& matrix, int rows) {
#if defined(__AMX_INT8__)
    if (has_integer_tiles(matrix) && rows >= kMinIntegerTileRows) return InputKind::integer_tiles;
#endif
    if (matrix.quantized() && rows < (matrix.dynamic ? kUnpackRowsDynamic : kUnpackRows)) return InputKind::integer;
    if (matrix.kind == WeightKind::f32 || matrix.kind == WeightKind::f16) return InputKind::f32;
#if defined(__AMX_BF16__)
    if (rows >= kMinTileRows) return InputKind::bf16_tiles;
#endif
    return kBf16Input;
}

// The largest size that divides the weights' groups and for which sums of a group fit 32 bits.
inline int input_group_size(const Matrix& matrix) {
#if defined(NESO_INT8_DOT)
    if (matrix.dynamic && matrix.group_size % kDynamicGroup == 0) return kDynamicGroup;
#endif
    return matrix.group_size % 128 == 0 ? 128 : matrix.group_size % 64 == 0 ? 64 : 32;
}

// Layout of gemm's input for this matrix and number of rows; the caller attaches memory.
inline Input describe_input(const Matrix& matrix, int rows) {
    Input input;
    input.kind = input_kind(matrix, rows);
    input.rows = rows;
    input.depth = matrix.depth;
    if (input.kind == InputKind::integer || input.kind == InputKind::integer_tiles) {
        const bool tiles = input.kind == InputKind::integer_tiles;
#if defined(NESO_INT8_DOT)
        input.planes = matrix.dynamic ? 1 : 2;
#endif
        input.stride = int64_t(input.depth) * input.planes;
        // Tiles are processed in pairs.
        const int64_t packed_rows = tiles ? round_up(rows, 2 * kTileRows) : rows;
        input.value_bytes = packed_rows * input.stride * int64_t(sizeof(IntegerCode));
        input.group_size = input_group_size(matrix);
        input.num_groups = packed_rows * (round_up(input.depth, input.group_size) / input.group_size);
        return input;
    }
    if (input.kind == InputKind::bf16_tiles) {
        input.value_bytes = round_up(rows, 2 * kTileRows) * input.depth * 2;  // tiles are processed in pairs
        return input;
    }
    const int element = input.kind == InputKind::f32 ? 4 : 2;
    input.stride = spread_stride(int64_t(input.depth) * element) / element;
    input.value_bytes = rows * input.stride * element;
    return input;
}

// Quantize one group of values, a multiple of 32, to codes with a scale and their sum.
NESO_INLINE void quantize_group(const float* values, int count, int limit, IntegerCode* codes, int64_t plane_stride,
                                float& scale, int32_t& total) {
    F32 peak{}, checks{};
    for (int i = 0; i < count; i += kLanes) {
        const F32 v = load<F32>(values + i);
        peak = max(peak, max(v, -v));
        checks += v * 0.0f;
    }
    const float absmax = largest(peak);
    // NaN and infinity propagate through the scale.
    const float check = sum(checks);
    scale = absmax / float(limit) + check;
    const float inverse = absmax > 0 && check == 0 ? float(limit) / absmax : 0.0f;
    total = 0;
    for (int i = 0; i < count; ++i) {
        const int code = int(std::nearbyint(values[i] * inverse));
        total += code;
#if defined(NESO_INT8_DOT)
        codes[i] = int8_t(code);
        if (plane_stride) codes[i + plane_stride] = int8_t((code - int8_t(code)) >> 8);
#else
        (void)plane_stride;
        codes[i] = int16_t(code);
#endif
    }
}

inline void pack_integers(const Input& input, int row, int first, int count, const float* values) {
#if defined(NESO_INT8_DOT)
    // 16 bits minus half a low plane, so that the high plane fits 8 bits.
    const int limit = input.planes == 2 ? 32512 : 127;
    const int64_t plane_stride = input.planes == 2 ? input.depth : 0;
#else
    const int limit = 32767;
    const int64_t plane_stride = 0;
#endif
    const int size = input.group_size, groups = (input.depth + size - 1) / size;
    for (int begin = first; begin < first + count; begin += size) {
        const int64_t at = int64_t(row) * groups + begin / size;
        const int width = first + count - begin < size ? first + count - begin : size;
        quantize_group(values + begin - first, width, limit, input.row<IntegerCode>(row) + begin, plane_stride,
                       input.scales[at], input.sums[at]);
    }
}

#if defined(__AMX_INT8__)

// The same codes and scales as `pack_integers`, in tiles.
inline void pack_integer_tiles(const Input& input, int row, int first, int count, const float* values) {
    const int size = input.group_size, groups = (input.depth + size - 1) / size;
    for (int begin = first; begin < first + count; begin += size) {
        const int64_t at = int64_t(row) * groups + begin / size;
        const int width = first + count - begin < size ? first + count - begin : size;
        alignas(64) int8_t codes[kDynamicGroup];
        int32_t total;
        quantize_group(values + begin - first, width, 127, codes, 0, input.scales[at], total);
        input.sums[at] = total * 128;
        for (int k = 0; k < width; k += kByteTileDepth) {
            int8_t* to = byte_tile_of(input, row, begin + k) + row % kTileRows * kByteTileDepth;
            std::memcpy(to, codes + k, kByteTileDepth);
        }
    }
}

#endif

// Pack values float[count] as inputs from `first`. Both are multiples of 32 and of the input's group_size, except count
// at the end.
inline void pack_part(const Input& input, int row, int first, int count, const float* values) {
    if (input.kind == InputKind::f32) {
        std::memcpy(input.row<float>(row) + first, values, sizeof(float) * count);
    } else if (input.kind == InputKind::bf16) {
        bf16* to = input.row<bf16>(row) + first;
        for (int i = 0; i < count; i += kLanes) store_bf16(to + i, load<F32>(values + i));
    } else if (input.kind == InputKind::bf16_tiles) {
        for (int k = 0; k < count; k += kTileDepth) {
            bf16* to = tile_of(input, row, first + k) + row % kTileRows * kTileDepth;
            for (int i = 0; i < kTileDepth; i += kLanes) store_bf16(to + i, load<F32>(values + k + i));
        }
#if defined(__AMX_INT8__)
    } else if (input.kind == InputKind::integer_tiles) {
        pack_integer_tiles(input, row, first, count, values);
#endif
    } else {
        pack_integers(input, row, first, count, values);
    }
}

inline void pack_input(const Input& input, int row, const Matrix& matrix, const float* values) {
    if (matrix.inputs == matrix.depth && !matrix.input_order) {
        pack_part(input, row, 0, matrix.depth, values);
        return;
    }
    static thread_local Buffer<float> padded;
    padded.reserve(matrix.depth);
    for (int i = 0; i < matrix.inputs; ++i) {
        padded.data()[i] = values[matrix.input_order ? matrix.input_order[i] : i];
    }
    std::memset(padded.data() + matrix.inputs, 0, sizeof(float) * (matrix.depth - matrix.inputs));
    pack_part(input, row, 0, matrix.depth, padded.data());
}

}  // namespace neso::NESO_ISA
