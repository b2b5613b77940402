// Executes a decoder on the CPU. In each step, one call, all threads iterate over the layers together.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "model/adapter_batch.h"
#include "model/attention_plan.h"
#include "model/decoder_weights.h"
#include "model/experts.h"
#include "model/kv_cache.h"
#include "model/sampler.h"
#include "model/step.h"
#include "parallel/all_reduce.h"
#include "threads/thread_team.h"

namespace neso {

class Decoder {
   public:
    Decoder(const DecoderShape& shape, DecoderWeights weights, CacheKind cache_kind, Isa isa, int num_threads,
            CpuSets cpus = {});

    // Use another copy of the same weights. Call between steps.
    void set_weights(DecoderWeights weights) { weights_ = std::move(weights); }
    // First tokens of a sequence that stay visible in layers with a window.
    void set_sink_tokens(int count) { sink_tokens_ = count; }
    int sink_blocks() const { return int(round_up(sink_tokens_, cache_->shape().block_size)) / cache_->shape().block_size; }
    // Sum over the ranks of a tensor-parallel group, null without ranks. Call before the first step. The caller keeps it
    // alive.
    void set_all_reduce(AllReduce* all_reduce) { all_reduce_ = all_reduce; }
    // Set the adapter of a slot, null for none. Call between steps. The caller keeps the adapter alive.
    void set_adapter(int slot, const Adapter* adapter);
    const Adapter* adapter(int slot) const {
        return slot >= 0 && slot < int(adapter_slots_.size()) ? adapter_slots_[slot] : nullptr;
    }
    int num_layers() const { return int(weights_.layers.size()); }
    const LayerWeights& layer(int index) const { return weights_.layers[index]; }
    // Inputs and outputs of a product that adapters can change; 0 if the layer does not have the product.
    std::pair<int, int> product_shape(int index, Product product) const;
    // memory: see KVCache; it must outlive the decoder.
    void allocate_cache(int num_blocks, int block_size, char* memory = nullptr);
    int64_t cache_bytes_per_block(int block_size) const;
    // Not reentrant; requires allocate_cache. Ids and block tables must be valid, see check_step.
    void step(const Step& step);

    // Sample a token from each row of logits [rows][vocab_size]; masks modify the logits.
    void choose(float* logits, const Draw* draws, int rows, int32_t* tokens);

    // Copy the final normed hidden states of logits rows of the last step to out float[count][hidden_size].
    void row_states(const int32_t* rows, int count, float* out) const;

    // See ThreadTeam::record.
    void record_loops(std::vector<ThreadTeam::LoopTime>* times) { team_.record(times); }

    Isa isa() const { return kernels_.isa; }
    int num_threads() const { return team_.size(); }
    const DecoderShape& shape() const { return shape_; }
    int vocab_size() const { return shape_.vocab_size; }
    int hidden_size() const { return shape_.hidden_size; }
    int num_logits_rows() const { return num_logits_rows_; }  // of the last step
    int block_size() const { return cache_ ? cache_->shape().block_size : 1; }
    int num_blocks() const { return cache_ ? cache_->num_blocks() : 0; }
    bool has_position(int position) const {
        return !weights_.positions || position + shape_.position_offset < weights_.num_positions;
    }
    // The range of a block table that a step reads or writes, except the sinks; blocks outside the window of every
    // layer may have been freed.
    std::pair<int, int> blocks_read(const Step& step, int sequence) const;

   private:
    AttentionShape attention_shape(int block_size) const;
    void reserve(const Step& step);
    void plan_attention(const Step& step);
    void plan_cache_writes(const Step& step);
    const AttentionPlan& plan_for(int layer) const;
    void reserve_mlp(const Mlp& mlp, int rows);
    static bool can_fuse_pack(const Mlp& mlp);
    // Whether the result of a branch is added to the residual stream unchanged, and nothing follows.
    bool adds_directly(const Norm& post_norm, const Norm& sum_norm) const {
        return !post_norm.weight && !sum_norm.weight && shape_.residual_scale == 1 && !all_reduce_;
    }
    // Whether only requested rows pass the layer's MLP. No layer of the other pipeline stages does that.
    bool is_last(int layer) const { return shape_.last_stage && layer + 1 == int(weights_.layers.size()); }

    // The following functions run on all threads at once.
    void embed(const Step& step);
    void embed_token(int id, float* out) const;
    void receive(const Step& step);
    void send(const Step& step);
    void sum_over_ranks(float* rows, int count);
    void add_position(int token, float* x) const;
    void run_layer(const Step& step, int index);
    void write_cache(const Step& step, int index);
    void norm_width(int index, int tokens);
    void attend(int index, const Step& step);
    void gather_wanted_rows(const Step& step);
    const float* norm_row(const Norm& norm, const float* x, float* out) const;
    Input normed(const float* x, const Norm& norm, const Matrix& matrix, int rows);
    void add_attention(int index, const float* attended, float* x, int rows);
    void add_mlp(int index, float* x, int rows);
    void run_mlp(int index, const Mlp& mlp, const Norm& norm, const float* x, int rows, float* out, bool accumulate);
    void run_experts(int index, const Norm& norm, const float* x, int rows, float* out, bool accumulate);
    void add_branch(const Norm& post_norm, const Norm& sum_norm, float* x, int rows);
    LowRankSum adapted(int index, Product product, const float* x, int64_t stride);
    void compute_logits(const Step& step);
    void compute_hidden(const Step& step);

    const DecoderShape shape_;
    DecoderWeights weights_;
    const CacheKind cache_kind_;
    int sink_tokens_ = 0;
    AllReduce* all_reduce_ = nullptr;
    const Kernels& kernels_;
    ThreadTeam team_;
    std::unique_ptr<KVCache> cache_;
    std::vector<const Adapter*> adapter_slots_;
    AdapterBatch adapters_;
    std::vector<RowSampler> samplers_;  // one per thread
    ExpertsRunner experts_;

    // The plans of this step, one per window, and the plans of the last layer.
    std::vector<AttentionPlan> plans_, last_plans_;
    std::vector<char> wanted_;
    // New tokens [begin, end) of a sequence in one cache block.
    struct CacheWrite {
        int sequence, begin, end;
    };
    std::vector<CacheWrite> cache_writes_;
    int num_logits_rows_ = 0;

    InputStorage input_, activated_;
    // Rows are [tokens][stride]; from its attention on, the last layer has only the requested tokens.
    const int64_t x_stride_, qkv_stride_, attended_stride_;
    Buffer<float> x_, wanted_x_;                // the residual stream
    Buffer<float> qkv_;                         // queries, keys, values
    Buffer<float> attended_, wanted_attended_;  // results of attention
    Buffer<float> gates_, ups_;                 // used if the activation cannot be fused into their product
    Buffer<float> squares_;                     // of norms over the heads of all ranks
    Buffer<float> branch_;                      // result of a branch that is normed or scaled before it is added
    Buffer<float> normed_, shared_;             // sparse layers: input, and output of the shared expert
    std::vector<int> positions_;                // of each token, if position embeddings are learned
    Buffer<float> adapted_x_, adapted_activated_;  // unpacked inputs of adapters
    Buffer<float> partial_, part_maxima_, part_sums_;
};

}  // namespace neso
