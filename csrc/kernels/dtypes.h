// Storage types without C++ arithmetic. Kernels convert them to float.
#pragma once

#include <cstdint>
#include <cstring>

namespace neso {

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// IEEE half precision from its bits: normal, subnormal, infinite.
inline float to_float(f16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    const uint32_t exponent = (value.bits >> 10) & 0x1f, mantissa = value.bits & 0x3ff;
    if (exponent == 0) {
        const float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// Rounded to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16{uint16_t(bits >> 16 | 0x40)};
    return bf16{uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

}  // namespace neso
