// A LoRA adapter of a decoder (arXiv 2106.09685).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace neso {

// The products of a layer. Outputs of a fused product are concatenated: queries, keys and values; gate and up.
enum class Product : uint8_t { qkv, output, gate_up, down };
constexpr int kProducts = 4;

// The ranks [first_rank, first_rank + rank) change the outputs [first_output, first_output + outputs).
struct AdapterPart {
    int first_output, outputs;
    int first_rank, rank;
    const void* b;
};

// The changes to one product. The matrices A are stacked, since they read the same inputs. ranks 0: no change.
struct AdapterProduct {
    int ranks = 0;
    int inputs = 0;
    const void* a = nullptr;
    const float* scales = nullptr;  // [ranks]
    std::vector<AdapterPart> parts;
};

struct Adapter {
    WeightKind kind = WeightKind::f32;  // or bf16
    std::vector<AdapterProduct> products;  // [layers][kProducts]

    const AdapterProduct& product(int layer, Product which) const { return products[layer * kProducts + int(which)]; }
};

}  // namespace neso
