// Writes keys and values of one token and head to their cache block, in the layout of packed panels.
#pragma once

#include "kernels/kernels.h"
#include "kernels/vector.h"

namespace neso::NESO_ISA {

// Store 16 values of one slot to a panel of values: every value, or every second one in bfloat16.
NESO_INLINE void store_slot(float* panel_row, int, const float* values) {
    std::memcpy(panel_row, values, sizeof(float) * kPanel);
}
NESO_INLINE void store_slot(bf16* panel_row, int half, const float* values) {
    for (int i = 0; i < kPanel; i += kLanes) {
        const U32 before = load<U32>(panel_row + 2 * i), rounded = round_to_bf16(load<F32>(values + i));
        store(panel_row + 2 * i, half ? (before & 0xffffu) | (rounded & 0xffff0000u)
                                      : (before & 0xffff0000u) | (rounded >> 16));
    }
}

inline float cache_value(float value, float) { return value; }
inline bf16 cache_value(float value, bf16) { return to_bf16(value); }

template <typename T>
void write_cache_as(const AttentionShape& shape, char* block, int slot, int kv_head, const float* key,
                    const float* value) {
    constexpr int kInterleave = 4 / sizeof(T);
    T* keys = reinterpret_cast<T*>(block + kv_head * shape.head_bytes());
    T* values = keys + int64_t(shape.padded_dim()) * shape.slots();
    // Attention reads whole panels and multiplies unwritten slots by weight 0. Zero them, because another sequence may
    // have left a NaN, and 0 * NaN is NaN.
    if (slot == 0) std::memset(static_cast<void*>(values), 0, sizeof(T) * shape.padded_dim() * shape.slots());
    const int slots = shape.slots();
    for (int d = 0; d < shape.head_dim; ++d) {
        keys[int64_t(d / kInterleave) * slots * kInterleave + slot * kInterleave + d % kInterleave] =
            cache_value(key[d], T{});
    }
    const int64_t panel_size = int64_t(slots) * kPanel;
    T* row = values + int64_t(slot / kInterleave) * kPanel * kInterleave;
    int d = 0;
    for (; d + kPanel <= shape.head_dim; d += kPanel) {
        store_slot(row + d / kPanel * panel_size, slot % kInterleave, value + d);
    }
    for (; d < shape.head_dim; ++d) {
        row[d / kPanel * panel_size + d % kPanel * kInterleave + slot % kInterleave] = cache_value(value[d], T{});
    }
}

inline void write_cache(const AttentionShape& shape, char* block, int slot, int kv_head, const float* key,
                        const float* value) {
    if (shape.kind == CacheKind::f32) {
        write_cache_as<float>(shape, block, slot, kv_head, key, value);
    } else {
        write_cache_as<bf16>(shape, block, slot, kv_head, key, value);
    }
}

}  // namespace neso::NESO_ISA
