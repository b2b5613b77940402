#include "model/sampler.h"

#include <algorithm>
#include <cmath>

namespace neso {
namespace {

// Weights are in [0, 1], so their bit patterns are ordered like them; the upper bits select a bucket.
constexpr int kBucketShift = 18, kBuckets = (0x3f800000 >> kBucketShift) + 1;

int bucket_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return int(bits >> kBucketShift);
}

// Most words of a mask are all zeros or all ones.
void forbid(float* logits, int count, const int32_t* allowed) {
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
    if (draw.allowed != nullptr) forbid(logits, count, draw.allowed);
    const int best = kernels.argmax(logits, count);
    if (best < 0 || logits[best] == -INFINITY) return -1;
    if (draw.temperature <= 0) return best;
    weights_.resize(count);
    ids_.resize(count);
    double mass = 0;
    const int kept = kernels.weigh_logits(logits, count, logits[best], draw.temperature, floor_of(count, draw),
                                          weights_.data(), ids_.data(), &mass);
    weights_.resize(kept);
    const bool filtered = (draw.top_k > 0 && draw.top_k < count) || draw.top_p < 1.0f || draw.min_p > 0.0f;
    if (filtered) mass = keep_above(nucleus(mass, draw));
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
float RowSampler::floor_of(int count, const Draw& draw) {
    if (draw.top_p >= 1.0f) return draw.min_p;
    if (draw.top_k > 0 && draw.top_k < count) return 0.0f;
    return std::max(draw.min_p, 0.999f * (1.0f - draw.top_p) / float(count));
}

double RowSampler::keep_above(const Edge& edge) {
    int kept = 0, at_edge = edge.kept_at_edge;
    double mass = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        const float weight = weights_[i];
        if (weight > edge.weight || (weight == edge.weight && at_edge-- > 0)) {
            weights_[kept] = weight;
            ids_[kept++] = ids_[i];
            mass += weight;
        }
    }
    weights_.resize(kept);
    return mass;
}

// `mass`: sum of all weights, including dropped ones.
RowSampler::Edge RowSampler::nucleus(double mass, const Draw& draw) {
    const int count = int(weights_.size());
    Edge edge{0.0f, count};
    const int most = draw.top_k > 0 ? std::min(draw.top_k, count) : count;
    if (most < count) edge = edge_of(most, INFINITY);
    if (draw.top_p < 1.0f) {
        if (most < count) {
            mass = 0;
            int at_edge = edge.kept_at_edge;
            for (float weight : weights_) {
                if (weight > edge.weight || (weight == edge.weight && at_edge-- > 0)) mass += weight;
            }
        }
        const Edge inner = edge_of(most, draw.top_p * mass);
        if (inner.weight > edge.weight || (inner.weight == edge.weight && inner.kept_at_edge < edge.kept_at_edge)) {
            edge = inner;
        }
    }
    // The most likely token has weight 1.
    if (draw.min_p > edge.weight) edge = {draw.min_p, count};
    return edge;
}

RowSampler::Edge RowSampler::edge_of(int most, double mass) {
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
        if (reached + bucket_mass_[bucket] >= mass || taken + bucket_count_[bucket] >= most) break;
        reached += bucket_mass_[bucket];
        taken += bucket_count_[bucket];
    }
    edge_weights_.clear();
    for (float weight : weights_) {
        if (bucket_of(weight) == bucket) edge_weights_.push_back(weight);
    }
    std::sort(edge_weights_.begin(), edge_weights_.end(), std::greater<>());
    Edge edge{0.0f, int(weights_.size())};
    for (size_t i = 0; i < edge_weights_.size(); ++i) {
        // The token that reaches the mass is kept, and always the most likely one.
        if (edge.weight != edge_weights_[i]) edge = {edge_weights_[i], 0};
        ++edge.kept_at_edge;
        reached += edge_weights_[i];
        if (++taken >= most || reached >= mass) break;
    }
    return edge;
}

}  // namespace neso
