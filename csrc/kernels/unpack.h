// Quantized panels back to dense ones: for batches so large that arithmetic, not reading, takes the time.
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

// Codes of inputs k to k + 3 of kLanes outputs, one byte each in a lane.
NESO_INLINE U32 load_codes(const Matrix& matrix, const char* panel, int k, int vector) {
    if (matrix.kind == WeightKind::int8) return load<U32>(panel + int64_t(k) * kPanel + vector * kLanes * 4);
    const U32 nibbles = load<U32>(panel + int64_t(k / 8) * kPanel * 4 + vector * kLanes * 4);
    return (k % 8 == 0 ? nibbles : nibbles >> 4) & 0x0f0f0f0fu;
}

NESO_INLINE void store_fours(float* to, int k, int vector, const F32 (&w)[4]) {
    for (int i = 0; i < 4; ++i) store(to + int64_t(k + i) * kPanel + vector * kLanes, w[i]);
}

// Rounded by adding half a unit: the weights are finite, and ties are rare.
NESO_INLINE void store_fours(bf16* to, int k, int vector, const F32 (&w)[4]) {
    for (int i = 0; i < 4; i += 2) {
        const U32 first = ((U32)w[i] + 0x8000u) >> 16, second = ((U32)w[i + 1] + 0x8000u) & 0xffff0000u;
        store(to + int64_t(k + i) * kPanel + 2 * vector * kLanes, first | second);
    }
}

// A quantized panel -> a dense one of floats [k][16] or bfloat16 [k / 2][16][2].
template <typename T>
void unpack_panel(const Matrix& matrix, int panel, T* to) {
    const char* codes = matrix.panel(panel);
    for (int group = 0; group < matrix.groups; ++group) {
        const GroupScale scale = group_scale(matrix, panel, group);
        const int end = (group + 1) * matrix.group_size < matrix.depth ? (group + 1) * matrix.group_size : matrix.depth;
        for (int k = group * matrix.group_size; k < end; k += 4) {
            for (int v = 0; v < kVectors; ++v) {
                const U32 four = load_codes(matrix, codes, k, v);
                F32 w[4];
                for (int i = 0; i < 4; ++i) {
                    w[i] = to_f32((I32)((four >> (8 * i)) & 0xffu)) * scale.scale[v] + scale.offset[v];
                }
                store_fours(to, k, v, w);
            }
        }
    }
}

}  // namespace neso::NESO_ISA
