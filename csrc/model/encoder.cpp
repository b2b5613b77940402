#include "model/encoder.h"

#include <algorithm>
#include <numeric>

#include "model/product.h"

namespace neso {
namespace {

constexpr int kBlock = 64;        // tokens per block of keys
constexpr int kTileQueries = 32;  // queries per task

int64_t float_stride(int64_t count) { return spread_stride(count * 4) / 4; }

}  // namespace

Encoder::Encoder(const EncoderShape& shape, std::vector<EncoderLayer> layers, CacheKind kind, Isa isa, int num_threads,
                 CpuSets cpus)
    : shape_(shape), layers_(std::move(layers)),
      attention_{kind, shape.heads, shape.heads, shape.head_dim, kBlock, shape.attention_scale, 0},
      kernels_(kernels_for(isa)), team_(num_threads, std::move(cpus)), x_stride_(float_stride(shape.hidden_size)),
      qkv_stride_(float_stride(3 * shape.attention_size())), attended_stride_(float_stride(shape.attention_size())) {}

void Encoder::run(float* x, const int32_t* starts, int num_sequences, const std::vector<RotaryRows>& rotary) {
    const int tokens = starts[num_sequences], hidden = shape_.hidden_size;
    rotary_ = rotary;
    plan(starts, num_sequences);
    reserve(tokens);
    team_.run([&](int) {
        team_.for_each(tokens, [&](int row) { std::copy_n(x + int64_t(row) * hidden, hidden, x_row(row)); });
        for (int index = 0; index < int(layers_.size()); ++index) run_layer(index, tokens);
        finish(x, tokens);
    });
}

void Encoder::plan(const int32_t* starts, int num_sequences) {
    blocks_.clear();
    tasks_.clear();
    for (int sequence = 0; sequence < num_sequences; ++sequence) {
        const int first = starts[sequence], end = starts[sequence + 1], first_block = int(blocks_.size());
        for (int token = first; token < end; token += kBlock) blocks_.push_back({token, std::min(kBlock, end - token)});
        for (int head = 0; head < shape_.heads; ++head) {
            for (int token = first; token < end; token += kTileQueries) {
                tasks_.push_back(
                    {token, std::min(kTileQueries, end - token), head, first_block, end - first, token - first});
            }
        }
    }
    // Longest first, for load balancing.
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) { return a.length > b.length; });
    if (block_table_.size() < blocks_.size()) {
        block_table_.resize(blocks_.size());
        std::iota(block_table_.begin(), block_table_.end(), 0);
        keys_ = std::make_unique<KVCache>(attention_, 1, int(blocks_.size()));
    }
}

void Encoder::reserve(int tokens) {
    x_.reserve(tokens * x_stride_);
    qkv_.reserve(tokens * qkv_stride_);
    attended_.reserve(tokens * attended_stride_);
    for (const EncoderLayer& layer : layers_) {
        for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.mlp.first()}) {
            input_.reserve(kernels_.describe_input(*matrix, tokens));
        }
        activated_.reserve(kernels_.describe_input(layer.mlp.down, tokens));
    }
}

float* Encoder::norm_in_place(int row, const Norm& norm) {
    float* x = x_row(row);
    kernels_.layer_norm(x, norm.weight, norm.bias, shape_.norm_eps, shape_.hidden_size, x);
    return x;
}

// In post-norm layers, each norm is fused into the packing of the next product's input.
void Encoder::run_layer(int index, int tokens) {
    const EncoderLayer& layer = layers_[index];
    const auto normed = [&](int row, const Norm& norm, float* out) {
        if (!norm.weight) return x_row(row);
        kernels_.layer_norm(x_row(row), norm.weight, norm.bias, shape_.norm_eps, shape_.hidden_size, out);
        return out;
    };
    const Input input = input_.attach(kernels_.describe_input(layer.qkv, tokens));
    pack_rows(team_, kernels_, input, layer.qkv, [&](int row, float* out) {
        if (shape_.norm_first) return normed(row, layer.attention_norm, out);
        return index ? norm_in_place(row, layers_[index - 1].mlp_norm) : x_row(row);
    });
    multiply(team_, kernels_, input, layer.qkv, qkv_.data(), qkv_stride_, false);
    write_keys(index);
    attend(index);
    const Input attended = input_.attach(kernels_.describe_input(layer.output, tokens));
    pack_rows(team_, kernels_, attended, layer.output,
              [&](int row, float*) { return attended_.data() + row * attended_stride_; });
    multiply(team_, kernels_, attended, layer.output, x_.data(), x_stride_, true);
    const Input activated = activated_.attach(kernels_.describe_input(layer.mlp.down, tokens));
    const Input up = input_.attach(kernels_.describe_input(layer.mlp.first(), tokens));
    pack_rows(team_, kernels_, up, layer.mlp.first(), [&](int row, float* out) {
        return shape_.norm_first ? normed(row, layer.mlp_norm, out) : norm_in_place(row, layer.attention_norm);
    });
    multiply_activated(team_, kernels_, up, layer.mlp, shape_.activation, activated);
    multiply(team_, kernels_, activated, layer.mlp.down, x_.data(), x_stride_, true);
}

void Encoder::finish(float* x, int tokens) {
    team_.for_each(tokens, [&](int row) {
        const bool norm_left = !shape_.norm_first && !layers_.empty();
        const float* from = norm_left ? norm_in_place(row, layers_.back().mlp_norm) : x_row(row);
        std::copy_n(from, shape_.hidden_size, x + int64_t(row) * shape_.hidden_size);
    });
}

// Rotate queries and keys in place; copy keys and values to their blocks.
void Encoder::write_keys(int index) {
    const int dim = shape_.head_dim, width = shape_.attention_size();
    const RotaryRows* rotary = layers_[index].rotary < 0 ? nullptr : &rotary_[layers_[index].rotary];
    team_.for_each(int(blocks_.size()), [&](int number) {
        const Block& block = blocks_[number];
        for (int slot = 0; slot < block.num_tokens; ++slot) {
            const int token = block.first_token + slot;
            float* queries = qkv_.data() + token * qkv_stride_;
            const float* keys = queries + width;
            for (int head = 0; rotary && head < 2 * shape_.heads; ++head) {
                const int64_t row = int64_t(token) * rotary->half;
                kernels_.rotate(queries + head * dim, rotary->cos + row, rotary->sin + row, rotary->half);
            }
            for (int head = 0; head < shape_.heads; ++head) {
                kernels_.write_cache(attention_, keys_->block(0, number), slot, head, keys + head * dim,
                                     keys + width + head * dim);
            }
        }
    });
}

void Encoder::attend(int index) {
    const int dim = shape_.head_dim, reach = layers_[index].reach;
    team_.for_each(int(tasks_.size()), [&](int number) {
        const Task& planned = tasks_[number];
        AttentionTask task{};
        task.block_table = block_table_.data() + planned.first_block;
        task.kv_head = planned.head;
        task.first_position = planned.length;  // after all keys, so that every query attends to all of them
        task.num_tokens = planned.num_tokens;
        task.key_begin = 0;
        task.key_end = planned.length;
        if (reach >= 0) {
            // A causal window that ends `reach` tokens after the query, and begins as many before it.
            task.first_position = planned.position + reach;
            task.window = 2 * reach + 1;
            task.key_begin = std::max(0, planned.position - reach);
            task.key_end = std::min(planned.length, planned.position + planned.num_tokens + reach);
        }
        task.queries = qkv_.data() + planned.first_token * qkv_stride_ + planned.head * dim;
        task.query_stride = qkv_stride_;
        task.out = attended_.data() + planned.first_token * attended_stride_ + planned.head * dim;
        task.out_stride = attended_stride_;
        kernels_.attend(attention_, keys_->layer(0), task);
    });
}

}  // namespace neso
