// Shape and weights of a decoder: sizes, packed matrices, and small vectors of floats.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace neso {

enum class NormKind : uint8_t { rms, layer };

struct DecoderShape {
    int vocab_size, hidden_size;
    int heads, kv_heads, head_dim;
    NormKind norm;
    float norm_eps;
    Activation activation;
    bool parallel;           // both branches of a layer read the same residual stream
    bool norms_width;        // norms of queries and keys are over all heads together
    float attention_scale, attention_softcap;  // softcap 0: none
    float embedding_scale, residual_scale, logit_scale, logit_softcap;
    int top_k;               // experts per token
    bool normalized;         // whether their weights are divided by their sum
    int position_offset;     // of the first row of learned positions
    int all_heads, all_kv_heads; // of all ranks, for norms over all heads
    bool owns_kv_heads;          // whether the keys count in the sum over the ranks, some of which may have the same
    int vocab_begin, vocab_end;  // token ids of the rows of embedding and lm_head, which are split among ranks
    bool first_stage, last_stage;  // of a pipeline: whether tokens are embedded, and whether logits are computed

    int query_size() const { return heads * head_dim; }
    int num_logits_columns() const { return vocab_end - vocab_begin; }
    int kv_size() const { return kv_heads * head_dim; }
};

// Pointers are non-owning.

// weight is null if the norm is absent, bias is null if the norm has no bias.
struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;
};

struct Mlp {
    Matrix gate;  // without data in a plain MLP, down . activation(up . x)
    Matrix up, down;

    bool is_gated() const { return gate.data != nullptr; }
    // The matrix that reads the input.
    const Matrix& first() const { return is_gated() ? gate : up; }
};

// A mixture of experts. The router has one row per expert, and one for the gate of the shared expert, if present.
struct Experts {
    Matrix router;
    std::vector<Mlp> experts;
    Mlp shared;

    bool has_shared() const { return shared.up.data != nullptr; }
    bool shared_is_gated() const { return router.outputs > int(experts.size()); }
};

struct LayerWeights {
    // Before a branch, after it, and of the sum that the residual stream becomes.
    Norm attention_norm, attention_post_norm, attention_sum_norm, mlp_norm, mlp_post_norm, mlp_sum_norm;
    Matrix qkv;                     // queries, keys, values
    const float* query_norm;        // of each head, or of all; null: none
    const float* key_norm;
    Matrix output;
    Mlp mlp;
    Experts experts;                // used instead of the MLP if not empty
    int window;                     // tokens that each token attends to; 0: all
    int rotary;                     // index of the step's rotary table; -1: no rotation

    bool is_sparse() const { return !experts.experts.empty(); }
};

struct DecoderWeights {
    std::vector<LayerWeights> layers;
    Norm final_norm;
    Matrix lm_head;
    // Dense rows of the embedding; null if tied to lm_head.
    const void* embedding;
    WeightKind embedding_kind;
    const float* positions;         // [num_positions][hidden_size]; null: not learned
    int num_positions;
};

}  // namespace neso
