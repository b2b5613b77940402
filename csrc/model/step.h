// One engine step: a flat batch of new tokens. Points to the arrays of StepPlan in Python.
#pragma once

#include <cstdint>
#include <vector>

namespace neso {

// Cosines and sines of each token [num_tokens][half] for one rotation of the model.
struct RotaryRows {
    const float* cos;
    const float* sin;
    int half;
};

struct Step {
    int num_sequences, num_tokens, table_width, num_copies, num_logits, num_wanted;
    const int32_t* token_ids;     // [num_tokens]
    const int32_t* query_start;   // [num_sequences + 1]
    const int32_t* num_computed;  // [num_sequences]
    const int32_t* block_tables;  // [num_sequences][table_width]
    const int32_t* block_copies;  // [num_copies][2]
    const int32_t* wanted_rows;   // [num_wanted]: tokens with requested logits, then those with requested hidden states
    const int32_t* adapter_slots; // [num_sequences], -1: none; null: no sequence has an adapter
    int num_slot_copies;
    const int32_t* slot_copies;   // [num_slot_copies][3]: sequence, position from, position to
    const int32_t* tree_depths;   // [num_tokens], or null if no token is in a tree
    const uint64_t* tree_masks;   // [num_tokens] or null; 0: not in a tree
    std::vector<RotaryRows> rotary;
    float* logits;                // [num_logits][vocab_end - vocab_begin]
    float* hidden;                // [num_wanted - num_logits][hidden_size]: after the last norm
    int num_embeddings;
    const int32_t* embedding_positions;  // [num_embeddings]: tokens given as embedding rows
    const float* embeddings;             // [num_embeddings][hidden_size]
    const float* received;        // [num_tokens][hidden_size]: the residual stream of the previous stage, or null
    float* sent;                  // [num_tokens][hidden_size]: the residual stream for the next stage, or null

    bool in_tree(int token) const { return tree_masks && tree_masks[token] != 0; }
    // Position of a token in its sequence. For tokens of a tree it differs from the slot index.
    int position(int sequence, int token) const {
        return num_computed[sequence] + (tree_depths ? tree_depths[token] : token - query_start[sequence]);
    }
};

}  // namespace neso
