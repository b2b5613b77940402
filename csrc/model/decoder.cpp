#include "model/decoder.h"

#include <algorithm>

#include "model/product.h"

namespace neso {
namespace {

int64_t float_stride(int64_t count) { return spread_stride(count * 4) / 4; }

template <typename T>
void copy_row(const void* table, int64_t row, int count, float* out) {
    const T* from = static_cast<const T*>(table) + row * count;
    for (int i = 0; i < count; ++i) out[i] = to_float(from[i]);
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, DecoderWeights weights, CacheKind cache_kind, Isa isa, int num_threads,
                 CpuSets cpus)
    : shape_(shape), weights_(std::move(weights)), cache_kind_(cache_kind), kernels_(kernels_for(isa)),
      team_(num_threads, std::move(cpus)), experts_(team_, kernels_, shape_), x_stride_(float_stride(shape.hidden_size)),
      qkv_stride_(float_stride(shape.query_size() + 2 * shape.kv_size())),
      attended_stride_(float_stride(shape.query_size())) {
    samplers_.resize(num_threads);
}

AttentionShape Decoder::attention_shape(int block_size) const {
    return {cache_kind_, shape_.heads,           shape_.kv_heads,         shape_.head_dim,
            block_size,  shape_.attention_scale, shape_.attention_softcap};
}

int64_t Decoder::cache_bytes_per_block(int block_size) const {
    return attention_shape(block_size).block_bytes() * int64_t(weights_.layers.size());
}

void Decoder::allocate_cache(int num_blocks, int block_size, char* memory) {
    cache_ = std::make_unique<KVCache>(attention_shape(block_size), int(weights_.layers.size()), num_blocks, memory);
}

std::pair<int, int> Decoder::blocks_read(const Step& step, int sequence) const {
    if (!cache_) return {0, 0};
    const int begin = step.num_computed[sequence], block_size = cache_->shape().block_size;
    const int end = begin + step.query_start[sequence + 1] - step.query_start[sequence];
    int first = begin;
    for (const LayerWeights& layer : weights_.layers) {
        first = std::min(first, layer.window ? std::max(0, begin - layer.window + 1) : 0);
    }
    return {first / block_size, (end + block_size - 1) / block_size};
}

std::pair<int, int> Decoder::product_shape(int index, Product product) const {
    const LayerWeights& layer = weights_.layers[index];
    const Mlp& mlp = layer.is_sparse() ? layer.experts.shared : layer.mlp;
    switch (product) {
        case Product::qkv: return {layer.qkv.inputs, layer.qkv.outputs};
        case Product::output: return {layer.output.inputs, layer.output.outputs};
        case Product::gate_up: return {mlp.first().inputs, mlp.gate.outputs + mlp.up.outputs};
        default: return {mlp.down.inputs, mlp.down.outputs};
    }
}

void Decoder::set_adapter(int slot, const Adapter* adapter) {
    if (slot >= int(adapter_slots_.size())) adapter_slots_.resize(slot + 1);
    adapter_slots_[slot] = adapter;
}

void Decoder::step(const Step& step) {
    adapters_.plan(step, adapter_slots_);
    reserve(step);
    plan_attention(step);
    num_logits_rows_ = step.num_logits;
    team_.run([&](int) {
        if (shape_.first_stage) {
            embed(step);
        } else {
            receive(step);
        }
        for (int index = 0; index < int(weights_.layers.size()); ++index) run_layer(step, index);
        if (shape_.last_stage) {
            compute_logits(step);
        } else {
            send(step);
        }
    });
}

void Decoder::choose(float* logits, const Draw* draws, int rows, int32_t* tokens) {
    const auto choose_row = [&](int row, RowSampler& sampler) {
        tokens[row] = sampler.choose(kernels_, logits + int64_t(row) * shape_.vocab_size, shape_.vocab_size, draws[row]);
    };
    if (rows == 1) {  // too little work for multiple threads
        choose_row(0, samplers_[0]);
        return;
    }
    team_.run([&](int thread) {
        team_.for_each(rows, [&](int row) { choose_row(row, samplers_[thread]); });
    });
}

void Decoder::reserve(const Step& step) {
    const int64_t tokens = step.num_tokens, wanted = step.num_wanted;
    x_.reserve(tokens * x_stride_);
    qkv_.reserve(tokens * qkv_stride_);
    attended_.reserve(tokens * attended_stride_);
    if (shape_.norms_width && all_reduce_) squares_.reserve(2 * tokens);
    if (!adapters_.empty()) adapted_x_.reserve(std::max(tokens, wanted) * x_stride_);
    wanted_x_.reserve(wanted * x_stride_);
    wanted_attended_.reserve(wanted * attended_stride_);
    // The last layer has fewer rows, which may need another input layout.
    for (const int rows : {step.num_tokens, step.num_wanted}) {
        for (const LayerWeights& layer : weights_.layers) {
            for (const Matrix* matrix : {&layer.qkv, &layer.output}) {
                input_.reserve(kernels_.describe_input(*matrix, rows));
            }
            if (!adds_directly(layer.attention_post_norm, layer.attention_sum_norm) ||
                !adds_directly(layer.mlp_post_norm, layer.mlp_sum_norm)) {
                branch_.reserve(rows * x_stride_);
            }
            if (!layer.is_sparse()) {
                reserve_mlp(layer.mlp, rows);
                continue;
            }
            experts_.reserve(layer.experts, rows);
            input_.reserve(kernels_.describe_input(layer.experts.router, rows));
            normed_.reserve(rows * x_stride_);
            if (!layer.experts.has_shared()) continue;
            shared_.reserve(rows * x_stride_);
            reserve_mlp(layer.experts.shared, rows);
        }
    }
    if (shape_.last_stage) input_.reserve(kernels_.describe_input(weights_.lm_head, step.num_logits));
    if (!weights_.positions) return;
    positions_.resize(step.num_tokens);
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        for (int token = step.query_start[sequence]; token < step.query_start[sequence + 1]; ++token) {
            positions_[token] = step.position(sequence, token);
        }
    }
}

void Decoder::reserve_mlp(const Mlp& mlp, int rows) {
    input_.reserve(kernels_.describe_input(mlp.first(), rows));
    input_.reserve(kernels_.describe_input(mlp.up, rows));
    activated_.reserve(kernels_.describe_input(mlp.down, rows));
    if (!adapters_.empty()) adapted_activated_.reserve(rows * float_stride(mlp.up.outputs));
    if (can_fuse_pack(mlp)) return;
    gates_.reserve(rows * float_stride(mlp.up.outputs));
    ups_.reserve(rows * float_stride(mlp.up.outputs));
}

// Whether gate and up share one packed input, and their activated product can be packed for `down` part by part.
bool Decoder::can_fuse_pack(const Mlp& mlp) {
    const bool alike = mlp.gate.kind == mlp.up.kind && mlp.gate.dynamic == mlp.up.dynamic &&
                       mlp.gate.group_size == mlp.up.group_size && !mlp.gate.offsets == !mlp.up.offsets &&
                       mlp.gate.input_order == mlp.up.input_order;
    return (alike || !mlp.is_gated()) && !mlp.down.input_order;
}

void Decoder::embed(const Step& step) {
    team_.for_each(step.num_tokens, [&](int token) {
        float* out = x_.data() + token * x_stride_;
        embed_token(step.token_ids[token], out);
        if (!all_reduce_) add_position(token, out);
    });
    if (all_reduce_) {
        sum_over_ranks(x_.data(), step.num_tokens);
        team_.for_each(step.num_tokens, [&](int token) { add_position(token, x_.data() + token * x_stride_); });
    }
    if (!step.num_embeddings) return;
    team_.for_each(step.num_embeddings, [&](int row) {
        const int token = step.embedding_positions[row];
        float* out = x_.data() + token * x_stride_;
        std::copy_n(step.embeddings + int64_t(row) * shape_.hidden_size, shape_.hidden_size, out);
        add_position(token, out);
    });
}

// The scaled embedding of a token; zeros if another rank has it.
void Decoder::embed_token(int id, float* out) const {
    const int hidden = shape_.hidden_size;
    if (id < shape_.vocab_begin || id >= shape_.vocab_end) {
        std::fill_n(out, hidden, 0.0f);
        return;
    }
    id -= shape_.vocab_begin;
    if (!weights_.embedding) {
        kernels_.matrix_row(weights_.lm_head, id, out);
    } else if (weights_.embedding_kind == WeightKind::f32) {
        copy_row<float>(weights_.embedding, id, hidden, out);
    } else if (weights_.embedding_kind == WeightKind::f16) {
        copy_row<f16>(weights_.embedding, id, hidden, out);
    } else {
        copy_row<bf16>(weights_.embedding, id, hidden, out);
    }
    if (shape_.embedding_scale != 1) {
        for (int i = 0; i < hidden; ++i) out[i] *= shape_.embedding_scale;
    }
}

// Copy the residual stream of the previous stage.
void Decoder::receive(const Step& step) {
    team_.for_each(step.num_tokens, [&](int token) {
        std::copy_n(step.received + int64_t(token) * shape_.hidden_size, shape_.hidden_size,
                    x_.data() + token * x_stride_);
    });
}

// Copy the residual stream for the next stage.
void Decoder::send(const Step& step) {
    team_.for_each(step.num_tokens, [&](int token) {
        std::copy_n(x_.data() + token * x_stride_, shape_.hidden_size,
                    step.sent + int64_t(token) * shape_.hidden_size);
    });
}

// Replace rows of the width of the residual stream by their sum over the ranks.
void Decoder::sum_over_ranks(float* rows, int count) {
    if (all_reduce_) all_reduce_->sum(team_, rows, count * x_stride_);
}

// Add the learned position embedding, if the model has one.
void Decoder::add_position(int token, float* x) const {
    if (!weights_.positions) return;
    const float* row = weights_.positions + int64_t(positions_[token] + shape_.position_offset) * shape_.hidden_size;
    for (int i = 0; i < shape_.hidden_size; ++i) x[i] += row[i];
}

// Pointer to the normed row: `out`, or x if there is no norm.
const float* Decoder::norm_row(const Norm& norm, const float* x, float* out) const {
    if (!norm.weight) return x;
    if (shape_.norm == NormKind::rms) {
        kernels_.rms_norm(x, norm.weight, shape_.norm_eps, shape_.hidden_size, out);
    } else {
        kernels_.layer_norm(x, norm.weight, norm.bias, shape_.norm_eps, shape_.hidden_size, out);
    }
    return out;
}

// Pack the normed rows of x as the input of `matrix`.
Input Decoder::normed(const float* x, const Norm& norm, const Matrix& matrix, int rows) {
    const Input input = input_.attach(kernels_.describe_input(matrix, rows));
    pack_rows(team_, kernels_, input, matrix, [&](int row, float* out) -> const float* {
        if (adapters_.empty()) return norm_row(norm, x + row * x_stride_, out);
        float* kept = adapted_x_.data() + row * x_stride_;
        const float* found = norm_row(norm, x + row * x_stride_, kept);
        if (found != kept) std::copy_n(found, shape_.hidden_size, kept);
        return kept;
    });
    return input;
}

void Decoder::run_layer(const Step& step, int index) {
    const LayerWeights& layer = weights_.layers[index];
    const Input input = normed(x_.data(), layer.attention_norm, layer.qkv, step.num_tokens);
    multiply(team_, kernels_, input, layer.qkv, qkv_.data(), qkv_stride_, false,
             adapters_.shrink(team_, kernels_, index, Product::qkv, adapted_x_.data(), x_stride_, false));
    write_cache(step, index);
    attend(index, step);
    int rows = step.num_tokens;
    float *x = x_.data(), *attended = attended_.data();
    if (is_last(index)) {
        gather_wanted_rows(step);
        rows = step.num_wanted;
        x = wanted_x_.data();
        attended = wanted_attended_.data();
    }
    if (shape_.parallel) {  // x is still the input of attention
        add_mlp(index, x, rows);
        add_attention(index, attended, x, rows);
    } else {
        add_attention(index, attended, x, rows);
        add_mlp(index, x, rows);
    }
}

// Adapter changes of a product after attention, where the last layer has only the requested rows.
LowRankSum Decoder::adapted(int index, Product product, const float* x, int64_t stride) {
    return adapters_.shrink(team_, kernels_, index, product, x, stride, is_last(index));
}

void Decoder::add_attention(int index, const float* attended, float* x, int rows) {
    const LayerWeights& layer = weights_.layers[index];
    const Input result = input_.attach(kernels_.describe_input(layer.output, rows));
    pack_rows(team_, kernels_, result, layer.output,
              [&](int row, float*) { return attended + row * attended_stride_; });
    const bool directly = adds_directly(layer.attention_post_norm, layer.attention_sum_norm);
    multiply(team_, kernels_, result, layer.output, directly ? x : branch_.data(), x_stride_, directly,
             adapted(index, Product::output, attended, attended_stride_));
    if (!directly) add_branch(layer.attention_post_norm, layer.attention_sum_norm, x, rows);
}

void Decoder::add_mlp(int index, float* x, int rows) {
    const LayerWeights& layer = weights_.layers[index];
    // Parallel branches may share a norm.
    const Norm& norm = shape_.parallel && !layer.mlp_norm.weight ? layer.attention_norm : layer.mlp_norm;
    const bool directly = adds_directly(layer.mlp_post_norm, layer.mlp_sum_norm);
    float* out = directly ? x : branch_.data();
    if (layer.is_sparse()) {
        run_experts(index, norm, x, rows, out, directly);
    } else {
        run_mlp(index, layer.mlp, norm, x, rows, out, directly);
    }
    if (!directly) add_branch(layer.mlp_post_norm, layer.mlp_sum_norm, x, rows);
}

// x = sum_norm(x + the branch's normed and scaled result, summed over the ranks).
void Decoder::add_branch(const Norm& post_norm, const Norm& sum_norm, float* x, int rows) {
    sum_over_ranks(branch_.data(), rows);
    team_.for_each(rows, [&](int row) {
        float* result = branch_.data() + row * x_stride_;
        norm_row(post_norm, result, result);
        float* to = x + row * x_stride_;
        for (int i = 0; i < shape_.hidden_size; ++i) to[i] += shape_.residual_scale * result[i];
        norm_row(sum_norm, to, to);
    });
}

void Decoder::run_mlp(int index, const Mlp& mlp, const Norm& norm, const float* x, int rows, float* out, bool accumulate) {
    const Input activated = activated_.attach(kernels_.describe_input(mlp.down, rows));
    const Input input = normed(x, norm, mlp.first(), rows);
    const int width = mlp.up.outputs;
    const int64_t stride = float_stride(width);
    const LowRankSum low_rank = adapted(index, Product::gate_up, adapted_x_.data(), x_stride_);
    float* copy = adapters_.change(index, Product::down) ? adapted_activated_.data() : nullptr;
    if (can_fuse_pack(mlp)) {
        multiply_activated(team_, kernels_, input, mlp, shape_.activation, activated, {low_rank, copy, stride});
    } else {
        if (mlp.is_gated()) multiply(team_, kernels_, input, mlp.gate, gates_.data(), stride, false, low_rank);
        const Input again = mlp.is_gated() ? normed(x, norm, mlp.up, rows) : input;
        multiply(team_, kernels_, again, mlp.up, ups_.data(), stride, false, low_rank.from(mlp.gate.outputs));
        pack_rows(team_, kernels_, activated, mlp.down, [&](int row, float* to) {
            if (copy) to = copy + row * stride;
            const float *gates = gates_.data() + row * stride, *ups = ups_.data() + row * stride;
            if (mlp.is_gated()) {
                kernels_.gated(shape_.activation, gates, ups, width, to);
            } else {
                kernels_.activate(shape_.activation, ups, width, to);
            }
            return to;
        });
    }
    multiply(team_, kernels_, activated, mlp.down, out, x_stride_, accumulate,
             adapted(index, Product::down, copy, stride));
}

void Decoder::run_experts(int index, const Norm& norm, const float* x, int rows, float* out, bool accumulate) {
    const Experts& experts = weights_.layers[index].experts;
    if (experts.has_shared()) run_mlp(index, experts.shared, norm, x, rows, shared_.data(), false);
    const Input input = input_.attach(kernels_.describe_input(experts.router, rows));
    pack_rows(team_, kernels_, input, experts.router, [&](int row, float*) {
        float* to = normed_.data() + row * x_stride_;
        const float* row_normed = norm_row(norm, x + row * x_stride_, to);
        if (row_normed != to) std::copy_n(row_normed, shape_.hidden_size, to);
        return to;
    });
    experts_.run(experts, input, normed_.data(), rows, x_stride_, shared_.data(), out, accumulate);
}

void Decoder::compute_logits(const Step& step) {
    const int vocab = shape_.num_logits_columns();
    const Input input = normed(wanted_x_.data(), weights_.final_norm, weights_.lm_head, step.num_logits);
    multiply(team_, kernels_, input, weights_.lm_head, step.logits, vocab, false);
    compute_hidden(step);
    if (shape_.logit_scale == 1 && shape_.logit_softcap == 0) return;
    team_.for_each(step.num_logits, [&](int row) {
        float* logits = step.logits + int64_t(row) * vocab;
        for (int i = 0; shape_.logit_scale != 1 && i < vocab; ++i) logits[i] *= shape_.logit_scale;
        if (shape_.logit_softcap > 0) kernels_.softcap(logits, vocab, shape_.logit_softcap);
    });
}

// The rows after the logits rows are requested hidden states.
void Decoder::compute_hidden(const Step& step) {
    if (step.num_wanted == step.num_logits) return;
    team_.for_each(step.num_wanted - step.num_logits, [&](int row) {
        float* out = step.hidden + int64_t(row) * shape_.hidden_size;
        const float* x = norm_row(weights_.final_norm, wanted_x_.data() + (step.num_logits + row) * x_stride_, out);
        if (x != out) std::copy_n(x, shape_.hidden_size, out);
    });
}

void Decoder::row_states(const int32_t* rows, int count, float* out) const {
    for (int i = 0; i < count; ++i) {
        float* to = out + int64_t(i) * shape_.hidden_size;
        const float* normed = norm_row(weights_.final_norm, wanted_x_.data() + rows[i] * x_stride_, to);
        if (normed != to) std::copy_n(normed, shape_.hidden_size, to);
    }
}

void Decoder::gather_wanted_rows(const Step& step) {
    team_.for_each(step.num_wanted, [&](int row) {
        const int64_t token = step.wanted_rows[row];
        std::copy_n(x_.data() + token * x_stride_, shape_.hidden_size, wanted_x_.data() + row * x_stride_);
        std::copy_n(attended_.data() + token * attended_stride_, shape_.query_size(),
                    wanted_attended_.data() + row * attended_stride_);
    });
}

}  // namespace neso
