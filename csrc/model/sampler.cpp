#include "model/sampler.h"

#include <algorithm>
#include <cmath>

namespace neso {
namespace {

// Weights are in [0, 1], so their bit patterns have the same order; the upper bits select a bucket.
constexpr int kBucketShift = 18, kBuckets = (0x3f800000 >> kBucketShift) + 1;

int bucket_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return int(bits >> kBucketShift);
}

// Most words of a mask are all zeros or all ones.
void apply_mask(float* logits, int count, const int32_t* allowed) {
    const int words = count / 32;
    for (int w = 0; w < words; ++w) {
        const uint32_t word = uint32_t(allowed[w]);
        float* lane = logits + int64_t(w) * 32;
        if (word == 0) {
            std::fill(lane, lane + 32, -INFINITY);
        } else if (word != 0xffffffffu) {
            for (int i = 0; i < 32; ++i) lane[i] = word >> i & 1 ? lane[i] : -INFINITY;
        }
    }
    for (int i = words * 32; i < count; ++i) {
        if (!(uint32_t(allowed[words]) >> (i - words * 32) & 1)) logits[i] = -INFINITY;
    }
}

}  // namespace

int RowSampler::choose(const Kernels& kernels, float* logits, int count, const Draw& draw) {
    if (draw.allowed != nullptr) apply_mask(logits, count, draw.allowed);
    const int best = kernels.argmax(logits, count);
    if (best < 0 || logits[best] == -INFINITY) return -1;
    if (draw.temperature <= 0) return best;
    weights_.resize(count);
    ids_.resize(count);
    double mass = 0;
    const int kept = kernels.softmax_weights(logits, count, logits[best], draw.temperature, min_kept_weight(count, draw),
                                          weights_.data(), ids_.data(), &mass);
    weights_.resize(kept);
    const bool filtered = (draw.top_k > 0 && draw.top_k < count) || draw.top_p < 1.0f || draw.min_p > 0.0f;
    if (filtered) mass = drop_below(filter_threshold(mass, draw));
    const double target = draw.uniform * mass;
    double reached = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        reached += weights_[i];
        if (reached > target) return ids_[i];
    }
    return best;  // rounding error: the cumulative sum did not reach the target
}

// Lower bound of the kept weights. All weights below (1 - top_p) / count sum to less than 1 - top_p, while the most likely
// token alone has weight 1, so the others reach the fraction top_p without them. Not valid with top_k, whose mass may
// include them.
float RowSampler::min_kept_weight(int count, const Draw& draw) {
    if (draw.top_p >= 1.0f) return draw.min_p;
    if (draw.top_k > 0 && draw.top_k < count) return 0.0f;
    return std::max(draw.min_p, 0.999f * (1.0f - draw.top_p) / float(count));
}

double RowSampler::drop_below(const Threshold& threshold) {
    int kept = 0, at_threshold = threshold.kept_at_threshold;
    double mass = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        const float weight = weights_[i];
        if (weight > threshold.weight || (weight == threshold.weight && at_threshold-- > 0)) {
            weights_[kept] = weight;
            ids_[kept++] = ids_[i];
            mass += weight;
        }
    }
    weights_.resize(kept);
    return mass;
}

// `mass`: sum of all weights, including dropped ones.
RowSampler::Threshold RowSampler::filter_threshold(double mass, const Draw& draw) {
    const int count = int(weights_.size());
    Threshold threshold{0.0f, count};
    const int max_count = draw.top_k > 0 ? std::min(draw.top_k, count) : count;
    if (max_count < count) threshold = threshold_of(max_count, INFINITY);
    if (draw.top_p < 1.0f) {
        if (max_count < count) {
            mass = 0;
            int at_threshold = threshold.kept_at_threshold;
            for (float weight : weights_) {
                if (weight > threshold.weight || (weight == threshold.weight && at_threshold-- > 0)) mass += weight;
            }
        }
        const Threshold inner = threshold_of(max_count, draw.top_p * mass);
        if (inner.weight > threshold.weight || (inner.weight == threshold.weight && inner.kept_at_threshold < threshold.kept_at_threshold)) {
            threshold = inner;
        }
    }
    // The most likely token has weight 1.
    if (draw.min_p > threshold.weight) threshold = {draw.min_p, count};
    return threshold;
}

RowSampler::Threshold RowSampler::threshold_of(int max_count, double mass) {
    bucket_mass_.assign(kBuckets, 0.0);
    bucket_count_.assign(kBuckets, 0);
    for (float weight : weights_) {
        const int bucket = bucket_of(weight);
        bucket_mass_[bucket] += weight;
        ++bucket_count_[bucket];
    }
    double reached = 0;
    int taken = 0, bucket = kBuckets - 1;
    for (; bucket > 0; --bucket) {
        if (reached + bucket_mass_[bucket] >= mass || taken + bucket_count_[bucket] >= max_count) break;
        reached += bucket_mass_[bucket];
        taken += bucket_count_[bucket];
    }
    threshold_bucket_.clear();
    for (float weight : weights_) {
        if (bucket_of(weight) == bucket) threshold_bucket_.push_back(weight);
    }
    std::sort(threshold_bucket_.begin(), threshold_bucket_.end(), std::greater<>());
    Threshold threshold{0.0f, int(weights_.size())};
    for (size_t i = 0; i < threshold_bucket_.size(); ++i) {
        // The token that reaches the mass is kept, and the most likely token is always kept.
        if (threshold.weight != threshold_bucket_[i]) threshold = {threshold_bucket_[i], 0};
        ++threshold.kept_at_threshold;
        reached += threshold_bucket_[i];
        if (++taken >= max_count || reached >= mass) break;
    }
    return threshold;
}

}  // namespace neso
