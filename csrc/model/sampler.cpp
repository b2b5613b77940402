#include "model/sampler.h"

#include <algorithm>
#include <cmath>

namespace neso {
namespace {

// Weights are in [0, 1]: their bits are ordered as they are, and the upper ones make a bucket.
constexpr int kBucketShift = 18, kBuckets = (0x3f800000 >> kBucketShift) + 1;

int bucket_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return int(bits >> kBucketShift);
}

}  // namespace

int RowSampler::choose(const Kernels& kernels, const float* logits, int count, const Draw& draw) {
    const int best = kernels.argmax(logits, count);
    if (best < 0 || draw.temperature <= 0) return best;
    weights_.resize(count);
    kernels.exponentials(logits, count, logits[best], draw.temperature, weights_.data());
    Edge edge{0.0f, count};
    const bool filtered = (draw.top_k > 0 && draw.top_k < count) || draw.top_p < 1.0f || draw.min_p > 0.0f;
    if (filtered) edge = nucleus(count, draw);
    double total = 0;
    int at_edge = edge.kept_at_edge;
    for (float& weight : weights_) {
        if (weight < edge.weight || (weight == edge.weight && at_edge-- <= 0)) weight = 0;
        total += weight;
    }
    const double target = draw.uniform * total;
    double reached = 0;
    for (int token = 0; token < count; ++token) {
        reached += weights_[token];
        if (reached > target) return token;
    }
    return best;  // rounding left the end short of the target
}

RowSampler::Edge RowSampler::nucleus(int count, const Draw& draw) {
    Edge edge{0.0f, count};
    const int most = draw.top_k > 0 ? std::min(draw.top_k, count) : count;
    if (most < count) edge = edge_of(count, most, INFINITY);
    if (draw.top_p < 1.0f) {
        double total = 0;
        int at_edge = edge.kept_at_edge;
        for (float weight : weights_) {
            if (weight > edge.weight || (weight == edge.weight && at_edge-- > 0)) total += weight;
        }
        const Edge inner = edge_of(count, most, draw.top_p * total);
        if (inner.weight > edge.weight || (inner.weight == edge.weight && inner.kept_at_edge < edge.kept_at_edge)) {
            edge = inner;
        }
    }
    // The most likely token has weight 1.
    if (draw.min_p > edge.weight) edge = {draw.min_p, count};
    return edge;
}

RowSampler::Edge RowSampler::edge_of(int count, int most, double mass) {
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
    Edge edge{0.0f, count};
    for (size_t i = 0; i < edge_weights_.size(); ++i) {
        // The token that reaches the mass is kept; the most likely one always.
        if (edge.weight != edge_weights_[i]) edge = {edge_weights_[i], 0};
        ++edge.kept_at_edge;
        reached += edge_weights_[i];
        if (++taken >= most || reached >= mass) break;
    }
    return edge;
}

}  // namespace neso
