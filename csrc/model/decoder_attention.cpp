// Attention: the part of a layer that reads and writes the KV cache.
#include <algorithm>
#include <cmath>

#include "model/decoder.h"

namespace neso {

// In the last layer, only tokens with requested outputs are needed.
void Decoder::plan_attention(const Step& step) {
    wanted_.assign(step.num_tokens, 0);
    for (int i = 0; i < step.num_wanted; ++i) wanted_[step.wanted_rows[i]] = 1;
    plans_.clear();
    last_plans_.clear();
    int parts = 0;
    for (size_t index = 0; index < weights_.layers.size(); ++index) {
        const bool last = is_last(int(index));
        const int window = weights_.layers[index].window;
        auto& plans = last ? last_plans_ : plans_;
        const auto same = [&](const AttentionPlan& plan) { return plan.window() == window; };
        if (std::any_of(plans.begin(), plans.end(), same)) continue;
        plans.emplace_back(cache_->shape(), step, window, sink_tokens_, team_.size(), last ? wanted_.data() : nullptr);
        parts = std::max(parts, plans.back().num_parts());
    }
    plan_cache_writes(step);
    const int64_t group = cache_->shape().group();
    partial_.reserve(parts * group * shape_.head_dim);
    part_maxima_.reserve(parts * group);
    part_sums_.reserve(parts * group);
}

// Split the tokens at the boundaries of cache blocks, so that threads share the tokens of a prompt and no two write to
// one block.
void Decoder::plan_cache_writes(const Step& step) {
    const int block_size = cache_->shape().block_size;
    cache_writes_.clear();
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int first = step.query_start[sequence], last = step.query_start[sequence + 1];
        for (int begin = first; begin < last;) {
            const int slot = (step.num_computed[sequence] + begin - first) % block_size;
            const int end = std::min(last, begin + block_size - slot);
            cache_writes_.push_back({sequence, begin, end});
            begin = end;
        }
    }
}

const AttentionPlan& Decoder::plan_for(int layer) const {
    const int window = weights_.layers[layer].window;
    const auto& plans = is_last(layer) ? last_plans_ : plans_;
    return *std::find_if(plans.begin(), plans.end(), [&](const auto& plan) { return plan.window() == window; });
}

// Norm and rotate queries and keys in place; write keys and values to the cache.
void Decoder::write_cache(const Step& step, int index) {
    const LayerWeights& layer = weights_.layers[index];
    const int dim = shape_.head_dim, block_size = cache_->shape().block_size;
    const RotaryRows* rotary = layer.rotary < 0 ? nullptr : &step.rotary[layer.rotary];
    if (step.num_copies) {
        team_.for_each(1, [&](int) { cache_->copy_blocks(index, step); });
    }
    if (step.num_slot_copies) {
        team_.for_each(1, [&](int) { cache_->copy_slots(index, step); });
    }
    if (layer.query_norm && shape_.norms_width && all_reduce_) norm_width(index, step.num_tokens);
    // With few tokens, the key-value heads are split too, each with its group of query heads.
    const bool split = int(cache_writes_.size()) < team_.size() && !(layer.query_norm && shape_.norms_width && !all_reduce_);
    const int parts = split ? shape_.kv_heads : 1, kv_heads = shape_.kv_heads / parts, heads = shape_.heads / parts;
    team_.for_each(int(cache_writes_.size()) * parts, [&](int number) {
        const auto [sequence, begin, end] = cache_writes_[number / parts];
        const int first_kv = number % parts * kv_heads, first_head = number % parts * heads;
        const int first = step.query_start[sequence];
        const int32_t* table = step.block_tables + int64_t(sequence) * step.table_width;
        for (int token = begin; token < end; ++token) {
            float* queries = qkv_.data() + token * qkv_stride_;
            float* keys = queries + shape_.query_size();
            const float* values = keys + shape_.kv_size();
            if (layer.query_norm && shape_.norms_width && !all_reduce_) {
                kernels_.rms_norm(queries, layer.query_norm, shape_.norm_eps, shape_.query_size(), queries);
                kernels_.rms_norm(keys, layer.key_norm, shape_.norm_eps, shape_.kv_size(), keys);
            }
            for (int head = 0; head < heads + kv_heads; ++head) {
                const bool query = head < heads;
                float* at = query ? queries + (first_head + head) * dim : keys + (first_kv + head - heads) * dim;
                const float* norm = query ? layer.query_norm : layer.key_norm;
                if (norm && !shape_.norms_width) kernels_.rms_norm(at, norm, shape_.norm_eps, dim, at);
                if (!rotary) continue;
                const int64_t row = int64_t(token) * rotary->half;
                kernels_.rotate(at, rotary->cos + row, rotary->sin + row, rotary->half);
            }
            const int position = step.num_computed[sequence] + token - first;
            char* block = cache_->block(index, table[position / block_size]);
            for (int head = first_kv; head < first_kv + kv_heads; ++head) {
                kernels_.write_cache(cache_->shape(), block, position % block_size, head, keys + head * dim,
                                     values + head * dim);
            }
        }
    });
}

// Norm the queries and the keys of each token over the heads of all ranks.
void Decoder::norm_width(int index, int tokens) {
    const LayerWeights& layer = weights_.layers[index];
    const auto sum_squares = [](const float* x, int count) {
        float sum = 0;
        for (int i = 0; i < count; ++i) sum += x[i] * x[i];
        return sum;
    };
    const auto scale = [](float* x, const float* weight, int count, float factor) {
        for (int i = 0; i < count; ++i) x[i] *= factor * weight[i];
    };
    team_.for_each(tokens, [&](int token) {
        const float* queries = qkv_.data() + token * qkv_stride_;
        float* sums = squares_.data() + 2 * token;
        sums[0] = sum_squares(queries, shape_.query_size());
        sums[1] = shape_.owns_kv_heads ? sum_squares(queries + shape_.query_size(), shape_.kv_size()) : 0;
    });
    all_reduce_->sum(team_, squares_.data(), 2 * int64_t(tokens));
    team_.for_each(tokens, [&](int token) {
        float* queries = qkv_.data() + token * qkv_stride_;
        const float* sums = squares_.data() + 2 * token;
        const auto factor = [&](float sum, int heads) {
            return 1 / std::sqrt(sum / (heads * shape_.head_dim) + shape_.norm_eps);
        };
        scale(queries, layer.query_norm, shape_.query_size(), factor(sums[0], shape_.all_heads));
        scale(queries + shape_.query_size(), layer.key_norm, shape_.kv_size(), factor(sums[1], shape_.all_kv_heads));
    });
}

void Decoder::attend(int index, const Step& step) {
    const AttentionPlan& plan = plan_for(index);
    const int dim = shape_.head_dim, group = cache_->shape().group();
    team_.for_each(int(plan.tasks().size()), [&](int number) {
        const PlannedTask& planned = plan.tasks()[number];
        const int64_t head = int64_t(planned.kv_head) * group * dim;
        AttentionTask task{};
        task.block_table = step.block_tables + int64_t(planned.sequence) * step.table_width;
        task.kv_head = planned.kv_head;
        task.first_position = planned.first_position;
        task.num_tokens = planned.num_tokens;
        task.key_begin = planned.key_begin;
        task.key_end = planned.key_end;
        task.window = plan.window();
        task.sinks = plan.sinks();
        task.adds_sinks = planned.adds_sinks;
        const int first = step.query_start[planned.sequence];
        if (step.in_tree(first)) {
            task.tree_depths = step.tree_depths + first;
            task.tree_masks = step.tree_masks + first;
            task.tree_begin = step.num_computed[planned.sequence];
        }
        task.queries = qkv_.data() + planned.first_token * qkv_stride_ + head;
        task.query_stride = qkv_stride_;
        task.out = attended_.data() + planned.first_token * attended_stride_ + head;
        task.out_stride = attended_stride_;
        if (planned.part >= 0) {
            task.out = partial_.data() + int64_t(planned.part) * group * dim;
            task.maxima = part_maxima_.data() + int64_t(planned.part) * group;
            task.sums = part_sums_.data() + int64_t(planned.part) * group;
        }
        kernels_.attend(cache_->shape(), cache_->layer(index), task);
    });
    if (plan.merges().empty()) return;
    team_.for_each(int(plan.merges().size()), [&](int number) {
        const PlannedMerge& merge = plan.merges()[number];
        for (int query = 0; query < group; ++query) {
            const int64_t first = int64_t(merge.first_part) * group + query;
            kernels_.merge_parts(partial_.data() + first * dim, int64_t(group) * dim, part_maxima_.data() + first,
                                 part_sums_.data() + first, group, merge.parts, dim,
                                 attended_.data() + merge.token * attended_stride_ + (merge.kv_head * group + query) * dim);
        }
    });
}

}  // namespace neso
