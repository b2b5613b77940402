// A decoder as the interpreter walks it: numbers, packed matrices, and small vectors of floats.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace neso {

struct DecoderShape {
    int vocab_size, hidden_size, intermediate_size;
    int heads, kv_heads, head_dim, rotary_dim;
    float norm_eps, attention_scale;
    Activation activation;

    int query_size() const { return heads * head_dim; }
    int kv_size() const { return kv_heads * head_dim; }
};

// Pointers are into memory that the owner of the weights keeps.
struct LayerWeights {
    const float* attention_norm;
    Matrix qkv;                     // queries, keys, values
    const float* query_norm;        // of each head; null: none
    const float* key_norm;
    Matrix output;
    const float* mlp_norm;
    Matrix gate, up;
    Matrix down;
    int window;                     // tokens that each token sees; 0: all
};

struct DecoderWeights {
    std::vector<LayerWeights> layers;
    const float* final_norm;
    Matrix lm_head;
    // Rows of the embedding, dense; null where lm_head serves as the embedding.
    const void* embedding;
    WeightKind embedding_kind;
};

}  // namespace neso
