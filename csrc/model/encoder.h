// Executes a stack of encoder layers on the CPU: bidirectional attention over a flat batch without padding.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "model/decoder_weights.h"
#include "model/kv_cache.h"
#include "model/step.h"
#include "threads/thread_team.h"

namespace neso {

struct EncoderShape {
    int hidden_size, intermediate_size, heads, head_dim;
    float norm_eps, attention_scale;
    Activation activation;
    bool norm_first;  // x += f(norm(x)); else x = norm(x + f(x))

    int attention_size() const { return heads * head_dim; }
};

// Pointers are non-owning.
struct EncoderLayer {
    Norm attention_norm;  // absent in the first layer of some pre-norm stacks
    Matrix qkv;           // queries, keys, values
    Matrix output;
    Norm mlp_norm;
    Mlp mlp;
    int reach;   // a token attends to this many tokens on each side; -1: to all
    int rotary;  // index of the rotation passed to `run`; -1: none
};

class Encoder {
   public:
    Encoder(const EncoderShape& shape, std::vector<EncoderLayer> layers, CacheKind kind, Isa isa, int num_threads,
            CpuSets cpus = {});

    int hidden_size() const { return shape_.hidden_size; }
    int num_rotations() const {
        int count = 0;
        for (const EncoderLayer& layer : layers_) count = std::max(count, layer.rotary + 1);
        return count;
    }
    // Replaces x[starts[num_sequences]][hidden_size] by the last layer's output; sequence s has the tokens starts[s] to
    // starts[s + 1]. `rotary`: rows of each token, of each rotation that layers have. Not reentrant.
    void run(float* x, const int32_t* starts, int num_sequences, const std::vector<RotaryRows>& rotary = {});

   private:
    // Keys and values of up to kBlock tokens of a sequence, in the layout of attention.
    struct Block {
        int first_token, num_tokens;
    };
    // Queries of one head in one attention task; `position` is that of the first one in its sequence.
    struct Task {
        int first_token, num_tokens, head, first_block, length, position;
    };

    void plan(const int32_t* starts, int num_sequences);
    void reserve(int tokens);

    // The following functions run on all threads at once.
    void run_layer(int index, int tokens);
    void finish(float* x, int tokens);
    void write_keys(int index);
    void attend(int index);
    float* x_row(int row) { return x_.data() + row * x_stride_; }
    float* norm_in_place(int row, const Norm& norm);

    const EncoderShape shape_;
    const std::vector<EncoderLayer> layers_;
    const AttentionShape attention_;
    const Kernels& kernels_;
    ThreadTeam team_;
    std::unique_ptr<KVCache> keys_;
    std::vector<int32_t> block_table_;  // 0, 1, 2, ...
    std::vector<Block> blocks_;
    std::vector<Task> tasks_;
    std::vector<RotaryRows> rotary_;

    InputStorage input_, activated_;
    const int64_t x_stride_, qkv_stride_, attended_stride_;
    Buffer<float> x_, qkv_, attended_;
};

}  // namespace neso
