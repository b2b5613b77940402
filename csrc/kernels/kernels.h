// The table of kernels: one implementation per instruction set, with the same semantics.
#pragma once

#include <cstdint>

#include "isa/isa.h"
#include "kernels/matrix.h"

namespace neso {

enum class Activation : uint8_t { silu, gelu, gelu_tanh, quick_gelu, relu };
enum class CacheKind : uint8_t { f32, bf16 };

// Shape of attention, and layout of a cache block. For each block and key-value head:
//
//   keys     [padded_dim / I][slots][I]            I = 1 for f32, 2 for bf16
//   values   [padded_dim / 16][slots / I][16][I]
//
// so that queries times keys and weights times values are ordinary products with packed panels.
struct AttentionShape {
    CacheKind kind;
    int heads, kv_heads, head_dim;
    int block_size;
    float scale;
    float softcap;  // scores become softcap * tanh(score / softcap); 0: no cap

    int group() const { return heads / kv_heads; }
    int padded_dim() const { return int(round_up(head_dim, kDepthAlign)); }
    int slots() const { return int(round_up(block_size, kPanel)); }
    int element_bytes() const { return kind == CacheKind::f32 ? 4 : 2; }
    int64_t head_bytes() const { return int64_t(2) * padded_dim() * slots() * element_bytes(); }
    int64_t block_bytes() const { return head_bytes() * kv_heads; }
};

// Queries of one sequence and key-value head that attend to the keys [key_begin, key_end).
struct AttentionTask {
    const int32_t* block_table;
    int kv_head;
    int first_position;        // of the first query
    int num_tokens;            // queries are num_tokens x group
    int key_begin, key_end;
    int window;                // keys that each query attends to, including its own; 0: all
    int sinks;                 // first tokens that it also attends to
    bool adds_sinks;           // this task also attends to the sinks, which are before key_begin
    const float* queries;      // of the first token and the first head of the group; heads are contiguous
    int64_t query_stride;      // floats from token to token
    float* out;                // result, with the same layout
    int64_t out_stride;
    // If the keys of a query are split among tasks, out receives the unnormalized result, and these arrays by token
    // and head the maximum of the scores and the sum of their exponentials. Otherwise null.
    float* maxima;
    float* sums;
    // If the new tokens of the sequence are a tree: for each node, its depth below the root and the bit mask of visible
    // nodes. Node i is at key tree_begin + i. Otherwise null.
    const int32_t* tree_depths;
    const uint64_t* tree_masks;
    int tree_begin;
};

// The inputs of adapter matrices A are zero-padded to a multiple of this.
constexpr int kLowRankBlock = 32;

// Product with the matrix A of an adapter: h[i][k] = scales[k] * (x[rows[i]] . a[k]). Ranks are even, padded with zeros.
//
//   f32    a[rank][inputs], padded
//   bf16   a[rank][block][16][2]: inputs j and 16 + j of each block of 32
struct ShrinkTask {
    WeightKind kind;
    const void* a;
    const float* scales;   // [ranks]
    int ranks, inputs;
    const int32_t* rows;
    int num_rows;
    const float* x;
    int64_t x_stride;
    float* h;
    int64_t h_stride;
};

// Product with the matrix B: out[rows[i]][o] += h[i] . b[o] for the outputs [first_output, last_output).
//
//   f32    b[panel][rank][16]
//   bf16   b[panel][rank / 2][16][2]
struct ExpandTask {
    WeightKind kind;
    const void* b;
    int rank;
    int first_output, last_output;
    const int32_t* rows;
    int num_rows;
    const float* h;
    int64_t h_stride;
    float* out;
    int64_t out_stride;
};

struct Kernels {
    Isa isa;

    // Layout of gemm's input for this matrix and number of rows; the caller attaches memory (InputStorage).
    Input (*describe_input)(const Matrix& matrix, int rows);
    // values float[matrix.inputs] -> row of input.
    void (*pack_input)(const Input& input, int row, const Matrix& matrix, const float* values);
    // values float[count] -> inputs [first, first + count) of a row; first and count are multiples of 32 and, except
    // for count at the end, of the input's group_size. Not for matrices with input_order.
    void (*pack_part)(const Input& input, int row, int first, int count, const float* values);
    // Rows that should be multiplied together to stay in the L2 cache; a multiple of 32.
    int (*block_rows)(const Matrix& matrix);
    // out[row * stride + n] (+)= input[row] . matrix[n] + bias[n], for a range of the product.
    void (*gemm)(const Input& input, const Matrix& matrix, const GemmRange& range, float* out, int64_t stride,
                 bool accumulate);
    // Row of the matrix as floats.
    void (*matrix_row)(const Matrix& matrix, int row, float* out);

    // Products with the matrices A and B of adapters.
    void (*shrink)(const ShrinkTask& task);
    void (*expand)(const ExpandTask& task);

    // Index of the first maximum; -1 if there is a NaN.
    int (*argmax)(const float* logits, int count);
    // See softmax.h.
    int (*softmax_weights)(const float* logits, int count, float maximum, float temperature, float floor, float* weights,
                        int32_t* ids, double* total);

    void (*rms_norm)(const float* x, const float* weight, float eps, int count, float* out);
    // bias may be null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int count, float* out);
    // out[i] = activation(x[i])
    void (*activate)(Activation activation, const float* x, int count, float* out);
    // out[i] = activation(gate[i]) * up[i]
    void (*gated)(Activation activation, const float* gate, const float* up, int count, float* out);
    // x[i] = cap * tanh(x[i] / cap)
    void (*softcap)(float* x, int count, float cap);
    // Rotate pairs (i, half + i).
    void (*rotate)(float* head, const float* cos, const float* sin, int half);

    void (*write_cache)(const AttentionShape& shape, char* block, int slot, int kv_head, const float* key,
                        const float* value);
    void (*attend)(const AttentionShape& shape, const char* cache, const AttentionTask& task);
    // Merge the results of `parts` tasks: partial[part][count][dim], maxima and sums [part][count] -> out[dim].
    void (*merge_parts)(const float* partial, int64_t part_stride, const float* maxima, const float* sums,
                        int64_t statistic_stride, int parts, int dim, float* out);
};

// Throws std::invalid_argument if the instruction set was not compiled in.
const Kernels& kernels_for(Isa isa);

}  // namespace neso
