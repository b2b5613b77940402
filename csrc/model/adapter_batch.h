// The adapters of one step and their rows.
#pragma once

#include <vector>

#include "kernels/kernels.h"
#include "model/adapter.h"
#include "model/step.h"
#include "threads/thread_team.h"

namespace neso {

// `rows` is sorted by adapter; each group is a range of it.
struct AdapterRows {
    struct Group {
        const Adapter* adapter;
        int begin, end;
    };
    std::vector<int32_t> rows;
    std::vector<Group> groups;
};

// The change to a product by the adapters of a batch. The products with A are already computed. False: no change.
class LowRankSum {
   public:
    LowRankSum() = default;
    LowRankSum(const Kernels& kernels, const AdapterRows& rows, int layer, Product product, const float* h, int64_t stride)
        : kernels_(&kernels), rows_(&rows), layer_(layer), product_(product), h_(h), h_stride_(stride) {}

    explicit operator bool() const { return rows_ != nullptr; }
    // The same for a matrix with the outputs of the product from `first_output` on.
    LowRankSum from(int first_output) const {
        LowRankSum shifted = *this;
        shifted.first_output_ = first_output;
        return shifted;
    }
    // Add to the rows [first_row, last_row) of out; output o of the matrix is out[row * stride + o].
    void add(int first_row, int last_row, int first_output, int last_output, float* out, int64_t stride) const;

   private:
    const Kernels* kernels_ = nullptr;
    const AdapterRows* rows_ = nullptr;
    int layer_ = 0;
    Product product_ = Product::qkv;
    int first_output_ = 0;
    const float* h_ = nullptr;
    int64_t h_stride_ = 0;
};

class AdapterBatch {
   public:
    // Sort the rows of a step by adapter.
    void plan(const Step& step, const std::vector<const Adapter*>& slots);
    bool empty() const { return all_.groups.empty(); }
    // Whether any adapter changes this product.
    bool change(int layer, Product product) const;

    // Inside ThreadTeam::run, by all threads: multiply rows of floats with the matrices A of a product.
    // `wanted`: the rows are Step::wanted_rows instead of all tokens.
    LowRankSum shrink(ThreadTeam& team, const Kernels& kernels, int layer, Product product, const float* x, int64_t stride,
                      bool wanted);

   private:
    AdapterRows all_, wanted_;
    Buffer<float> h_;
    int64_t h_stride_ = 0;
};

}  // namespace neso
