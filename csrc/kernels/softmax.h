// Maximum and softmax weights of a row of logits.
#pragma once

#include "kernels/vector.h"

namespace neso::NESO_ISA {

// Index of the first maximum; -1 if there is a NaN.
inline int argmax(const float* logits, int count) {
    // The row is read once; then only the block of the maximum is searched.
    constexpr int kBlock = 512;
    float best = -__builtin_inff();
    int best_block = 0;
    I32 nan{};
    bool broken = false;
    for (int block = 0; block < count; block += kBlock) {
        const int end = block + kBlock < count ? block + kBlock : count;
        F32 peak = splat(-__builtin_inff());
        int i = block;
        for (; i + kLanes <= end; i += kLanes) {
            const F32 v = load<F32>(logits + i);
            peak = max(v, peak);
            nan |= v != v;
        }
        float largest_here = largest(peak);
        for (; i < end; ++i) {
            broken |= logits[i] != logits[i];
            largest_here = logits[i] > largest_here ? logits[i] : largest_here;
        }
        if (largest_here > best) {
            best = largest_here;
            best_block = block;
        }
    }
    for (int lane = 0; lane < kLanes; ++lane) broken |= nan[lane] != 0;
    if (broken) return -1;
    int index = best_block;
    while (index < count - 1 && logits[index] != best) ++index;
    return index;
}

// weight = exp((logit - maximum) / temperature). Weights of at least `floor` are written to weights and ids, which have
// capacity `count`, in order of ids; returns their number. `total` becomes the sum of all weights.
inline int softmax_weights(const float* logits, int count, float maximum, float temperature, float floor, float* weights,
                        int32_t* ids, double* total) {
    const float inverse = 1.0f / temperature;
    int kept = 0, i = 0;
    double sum_of_all = 0;
    const auto keep = [&](float weight, int id) {
        weights[kept] = weight;
        ids[kept] = id;
        kept += weight >= floor;
    };
    for (; i + kLanes <= count; i += kLanes) {
        const F32 weight = exp((load<F32>(logits + i) - maximum) * inverse);
        sum_of_all += sum(weight);
        if (floor <= 0.0f) {
            store(weights + i, weight);
            for (int lane = 0; lane < kLanes; ++lane) ids[i + lane] = i + lane;
            kept = i + kLanes;
            continue;
        }
#if defined(__AVX512F__)
        const __mmask16 wanted = _mm512_cmp_ps_mask((__m512)weight, _mm512_set1_ps(floor), _CMP_GE_OQ);
        const __m512i numbers = _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                                                                                        10, 11, 12, 13, 14, 15));
        _mm512_storeu_ps(weights + kept, _mm512_maskz_compress_ps(wanted, (__m512)weight));
        _mm512_storeu_si512(ids + kept, _mm512_maskz_compress_epi32(wanted, numbers));
        kept += __builtin_popcount(wanted);
#else
        for (int lane = 0; lane < kLanes; ++lane) keep(weight[lane], i + lane);
#endif
    }
    for (; i < count; ++i) {
        const float weight = exp(splat((logits[i] - maximum) * inverse))[0];
        sum_of_all += weight;
        keep(weight, i);
    }
    *total = sum_of_all;
    return kept;
}

}  // namespace neso::NESO_ISA
