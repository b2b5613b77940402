// Unpacks quantized panels to dense panels, for large batches, where arithmetic dominates.
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace neso::NESO_ISA {

// Scale and offset of the outputs of a panel in one group.
struct GroupScale {
    F32 scale[kVectors], offset[kVectors];
};

NESO_INLINE GroupScale group_scale(const Matrix& matrix, int panel, int group) {
    const int64_t at = (int64_t(panel) * matrix.groups + group) * kPanel;
    const float middle = matrix.kind == WeightKind::int8 ? 128.0f : 8.0f;
    GroupScale found;
    for (int v = 0; v < kVectors; ++v) {
        found.scale[v] = load_f16(matrix.scales + at + v * kLanes) * matrix.scale_factor;
        found.offset[v] = matrix.offsets ? load_f16(matrix.offsets + at + v * kLanes) * matrix.scale_factor
                                         : -middle * found.scale[v];
    }
    return found;
}

// Codes of 8 inputs of kLanes outputs, one byte each: inputs k to k + 3, and k + 4 to k + 7; k is a multiple of 8.
struct EightCodes {
    U32 first, second;
};

template <WeightKind Kind>
NESO_INLINE EightCodes load_codes(const char* panel, int k, int vector) {
    constexpr int kFour = kPanel * 4;  // bytes of 4 inputs, or of 8 nibbles
    if constexpr (Kind == WeightKind::int8) {
        const char* at = panel + int64_t(k) * kPanel + vector * kLanes * 4;
        return {load<U32>(at), load<U32>(at + kFour)};
    } else {
        const U32 nibbles = load<U32>(panel + int64_t(k) * (kPanel / 2) + vector * kLanes * 4);
        return {nibbles & 0x0f0f0f0fu, (nibbles >> 4) & 0x0f0f0f0fu};
    }
}

// Prefetch the codes of 8 inputs of all outputs, two cache lines or one, into the L2 cache: the hardware prefetcher
// restarts at each page, and a panel has few pages.
template <WeightKind Kind>
NESO_INLINE void prefetch_codes(const char* panel, int k) {
    if constexpr (Kind == WeightKind::int8) {
        const char* at = panel + int64_t(k) * kPanel;
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + kPanel * 4, 0, 2);
    } else {
        __builtin_prefetch(panel + int64_t(k) * (kPanel / 2), 0, 2);
    }
}

NESO_INLINE void store_fours(float* to, int k, int vector, const F32 (&w)[4]) {
    for (int i = 0; i < 4; ++i) store(to + int64_t(k + i) * kPanel + vector * kLanes, w[i]);
}

// Rounded by adding half a unit, since weights are finite and ties are rare.
NESO_INLINE void store_fours(bf16* to, int k, int vector, const F32 (&w)[4]) {
    for (int i = 0; i < 4; i += 2) {
        const U32 first = ((U32)w[i] + 0x8000u) >> 16, second = ((U32)w[i + 1] + 0x8000u) & 0xffff0000u;
        store(to + int64_t(k + i) * kPanel + 2 * vector * kLanes, first | second);
    }
}

// 1 + code / 256, for byte `index` of each lane: the code becomes bits of the mantissa, which saves converting it.
NESO_INLINE F32 one_and_code(U32 codes, int index) {
    const U32 shifted = index < 2 ? codes << (15 - 8 * index) : codes >> (8 * index - 15);
    return as_float((shifted & 0x007f8000u) | 0x3f800000u);
}

// The factors of `one_and_code` for the inputs of a panel in the group of input k.
NESO_INLINE GroupScale scale_of_codes(const Matrix& matrix, int panel, int k) {
    GroupScale scale = group_scale(matrix, panel, k / matrix.group_size);
    for (int v = 0; v < kVectors; ++v) {
        scale.scale[v] *= 256.0f;
        scale.offset[v] -= scale.scale[v];  // exact for symmetric codes, since scales have 11 bits
    }
    return scale;
}

// Unpack 8 inputs of a quantized panel, from k on, a multiple of 8: to floats [8][16] or bfloat16 [4][16][2].
template <WeightKind Kind, typename T>
NESO_INLINE void unpack_eight(const char* codes, int k, const GroupScale& scale, T* to) {
    for (int v = 0; v < kVectors; ++v) {
        const EightCodes eight = load_codes<Kind>(codes, k, v);
        F32 w[4];
        for (int i = 0; i < 4; ++i) w[i] = one_and_code(eight.first, i) * scale.scale[v] + scale.offset[v];
        store_fours(to, 0, v, w);
        for (int i = 0; i < 4; ++i) w[i] = one_and_code(eight.second, i) * scale.scale[v] + scale.offset[v];
        store_fours(to, 4, v, w);
    }
}

// The panels from `panel` on, which are unpacked to `data`.
inline Matrix unpacked_panels(const Matrix& matrix, int panel, WeightKind kind, const void* data) {
    Matrix dense;
    dense.kind = kind;
    dense.outputs = matrix.outputs - panel * kPanel;
    dense.inputs = matrix.inputs;
    dense.depth = matrix.depth;
    dense.data = data;
    dense.bias = matrix.bias ? matrix.bias + panel * kPanel : nullptr;
    return dense;
}

template <WeightKind Kind, typename T>
void unpack_panel(const Matrix& matrix, int panel, T* to) {
    const char* codes = matrix.panel(panel);
    for (int group = 0; group < matrix.depth; group += kGroup) {
        const GroupScale scale = scale_of_codes(matrix, panel, group);
        for (int k = group; k < group + kGroup; k += 8) unpack_eight<Kind>(codes, k, scale, to + int64_t(k) * kPanel);
    }
}

template <typename T>
void unpack_panel(const Matrix& matrix, int panel, T* to) {
    if (matrix.kind == WeightKind::int8) {
        unpack_panel<WeightKind::int8>(matrix, panel, to);
    } else {
        unpack_panel<WeightKind::int4>(matrix, panel, to);
    }
}

}  // namespace neso::NESO_ISA
