// Mixture of experts: each expert processes only the rows that are routed to it.
#pragma once

#include <atomic>
#include <vector>

#include "model/decoder_weights.h"
#include "model/product.h"
#include "threads/thread_team.h"

namespace neso {

class ExpertsRunner {
   public:
    ExpertsRunner(ThreadTeam& team, const Kernels& kernels, const DecoderShape& shape)
        : team_(team), kernels_(kernels), shape_(shape) {}

    // Allocate memory for this many rows. Call before a step.
    void reserve(const Experts& experts, int rows);

    // Called by all threads: out[rows] (+)= the weighted sum of the experts' outputs for x, plus `shared_out` times its
    // gate if there is a shared expert. x, out and shared_out have a row stride of `stride` floats; `router_input`
    // holds the rows of x packed for the router.
    void run(const Experts& experts, const Input& router_input, const float* x, int rows, int64_t stride,
             const float* shared_out, float* out, bool accumulate);

   private:
    // The rows of one expert: slots [first, first + count).
    struct Group {
        int expert, first, count;
        Input input, activated;
        int64_t input_at[3], activated_at[3];  // offsets of their values, scales and sums
    };

    // The chunks of all chosen experts are distributed together, so panels do not belong to threads.
    ProductChunks chunks_of(const Matrix& matrix, int rows, int unit = 1) const {
        return ProductChunks(kernels_, matrix, rows, team_.size(), unit, false);
    }
    void choose(const Experts& experts, int row);
    void group_rows(const Experts& experts, int rows);
    void allocate(const Input& input, int64_t (&at)[3]);
    Input with_memory(Input input, const int64_t (&at)[3]);
    void add_results(const Experts& experts, int row, int64_t stride, const float* shared_out, float* out,
                     bool accumulate);
    // The end of each group's chunks, and the total number; read between loops.
    struct GroupEnds {
        std::vector<int> ends;
        std::atomic<int> count{0};
    };

    template <typename Chunk>
    void for_each_chunk(const GroupEnds& all, const Chunk& chunk);

    ThreadTeam& team_;
    const Kernels& kernels_;
    const DecoderShape& shape_;
    Buffer<float> scores_, expert_weights_, results_;
    std::vector<int> chosen_, slots_, row_of_slot_;  // by row and place; by slot
    std::vector<int> firsts_;
    std::vector<Group> groups_;
    GroupEnds first_chunks_, down_chunks_;
    int64_t sizes_[3];
    Buffer<char> values_;
    Buffer<float> scales_;
    Buffer<int32_t> sums_;
};

}  // namespace neso
