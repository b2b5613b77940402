#include "model/quantize.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

namespace neso {
namespace {

// Candidate scales, relative to the scale that just represents the largest weight. A smaller scale clips that weight but
// reduces the error of all other weights. With few bits, more candidates are worthwhile.
constexpr float kShares8[] = {1.0f, 0.99f, 0.98f, 0.96f};
constexpr float kShares4[] = {1.0f, 1.06f, 1.12f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f};

struct Candidate {
    float scale, error;
};

// Codes range from -2^(bits - 1) to 2^(bits - 1) - 1.
inline float code_of(float value, float inverse, float lowest) {
    return std::min(std::max(std::nearbyint(value * inverse), lowest), -lowest - 1);
}

float error_of(const float* values, int count, float scale, float lowest) {
    const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
    float error = 0;
    for (int i = 0; i < count; ++i) {
        const float difference = values[i] - code_of(values[i], inverse, lowest) * scale;
        error += difference * difference;
    }
    return error;
}

float best_scale(const float* values, int count, int bits) {
    const float lowest = -float(1 << (bits - 1));
    float extreme = 0;
    for (int i = 0; i < count; ++i) extreme = std::fabs(values[i]) > std::fabs(extreme) ? values[i] : extreme;
    if (extreme == 0) return 0;
    // The largest weight is mapped to the sign that has one more code, so the scale may be negative.
    const float widest = extreme / lowest;
    Candidate best{widest, INFINITY};
    const auto attempt = [&](float scale) {
        const float error = error_of(values, count, scale, lowest);
        if (error < best.error) best = {scale, error};
    };
    if (bits == 8) {
        for (float share : kShares8) attempt(widest * share);
    } else {
        for (float share : kShares4) attempt(widest * share);
    }
    return best.scale;
}

void quantize_row(const float* values, int inputs, int bits, int group_size, uint8_t* codes, float* scales) {
    const float middle = float(1 << (bits - 1));
    for (int first = 0, group = 0; first < inputs; first += group_size, ++group) {
        const int count = std::min(group_size, inputs - first);
        const float scale = best_scale(values + first, count, bits);
        const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
        scales[group] = scale;
        for (int i = 0; i < count; ++i) {
            codes[first + i] = uint8_t(code_of(values[first + i], inverse, -middle) + middle);
        }
    }
}

template <typename T>
void convert_row(const void* source, int64_t row, int inputs, float* to) {
    const char* from = static_cast<const char*>(source) + row * inputs * int64_t(sizeof(T));
    for (int i = 0; i < inputs; ++i) {
        T value;
        std::memcpy(&value, from + i * int64_t(sizeof(T)), sizeof(T));
        to[i] = to_float(value);
    }
}

}  // namespace

void quantize(WeightKind source_kind, const void* source, int rows, int inputs, int bits, int group_size,
              uint8_t* codes, float* scales, int threads) {
    const int groups = (inputs + group_size - 1) / group_size;
    const auto work = [&](int begin, int end) {
        std::vector<float> values(inputs);
        for (int row = begin; row < end; ++row) {
            switch (source_kind) {
                case WeightKind::f32: convert_row<float>(source, row, inputs, values.data()); break;
                case WeightKind::f16: convert_row<f16>(source, row, inputs, values.data()); break;
                default: convert_row<bf16>(source, row, inputs, values.data());
            }
            quantize_row(values.data(), inputs, bits, group_size, codes + int64_t(row) * inputs,
                         scales + int64_t(row) * groups);
        }
    };
    std::vector<std::thread> helpers;
    for (int t = 1; t < threads; ++t) {
        helpers.emplace_back(work, int(int64_t(rows) * t / threads), int(int64_t(rows) * (t + 1) / threads));
    }
    work(0, rows / threads);
    for (auto& helper : helpers) helper.join();
}

}  // namespace neso
