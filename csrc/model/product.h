// Matrix products distributed among the threads of a team.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "model/adapter_batch.h"
#include "model/decoder_weights.h"
#include "threads/thread_team.h"

namespace neso {

// Splits a product into chunks of a block of cached rows times a few panels.
class ProductChunks {
   public:
    // next: the input of the next product, if it is packed from chunks of this one.
    ProductChunks(const Kernels& kernels, const Matrix& matrix, int rows, int threads, const Input& next = {})
        : rows_(rows), panels_(matrix.panels), row_step_(kernels.block_rows(matrix)),
          row_chunks_((rows + row_step_ - 1) / row_step_), panels_per_step_(std::max(8, next.group_size / kPanel)),
          panel_step_(best_panel_step(threads)),
          panel_chunks_(chunks_of(panel_step_)) {}

    int count() const { return row_chunks_ * panel_chunks_; }

    GemmRange operator[](int chunk) const {
        const int row = chunk / panel_chunks_ * row_step_, panel = chunk % panel_chunks_ * panel_step_;
        return {row, std::min(row + row_step_, rows_), panel, std::min(panel + panel_step_, panels_)};
    }

   private:
    static constexpr int kMaxPanels = 64, kChunksPerThread = 8;

    int chunks_of(int panel_step) const { return (panels_ + panel_step - 1) / panel_step; }

    // The largest step that minimizes the maximum work per thread: on 2 threads, 11 chunks take as long as 12.
    int best_panel_step(int threads) const {
        const auto longest = [&](int step) { return (row_chunks_ * chunks_of(step) + threads - 1) / threads * step; };
        int best = std::clamp(int(round_up(panels_ / (threads * kChunksPerThread), panels_per_step_)),
                              panels_per_step_, kMaxPanels);
        for (int step = best - panels_per_step_; step > 0; step -= panels_per_step_) {
            if (longest(step) < longest(best)) best = step;
        }
        return best;
    }

    const int rows_, panels_, row_step_, row_chunks_;
    // Chunks are multiples of the panels of a kernel step and of a group of inputs of the next product.
    const int panels_per_step_;
    const int panel_step_, panel_chunks_;
};

// A product by all threads of a team. row_of(row, scratch) returns each row of the input float[inputs], in `scratch` or
// elsewhere.
template <typename RowOf>
void pack_rows(ThreadTeam& team, const Kernels& kernels, const Input& input, const Matrix& matrix,
               const RowOf& row_of) {
    team.for_each(input.rows, [&](int row) {
        thread_local Buffer<float> scratch;
        scratch.reserve(matrix.inputs);
        kernels.pack_input(input, row, matrix, row_of(row, scratch.data()));
    });
}

// out (+)= input . matrix + low_rank
inline void multiply(ThreadTeam& team, const Kernels& kernels, const Input& input, const Matrix& matrix, float* out,
                     int64_t stride, bool accumulate, const LowRankSum& low_rank = {}) {
    const ProductChunks chunks(kernels, matrix, input.rows, team.size());
    team.for_each(chunks.count(), [&](int chunk) {
        const GemmRange range = chunks[chunk];
        kernels.gemm(input, matrix, range, out, stride, accumulate);
        if (low_rank) {
            low_rank.add(range.first_row, range.last_row, range.first_panel * kPanel,
                         std::min(range.last_panel * kPanel, matrix.outputs), out, stride);
        }
    });
}

// Adapter changes of gate and up (concatenated), and where to store activated floats for the adapters of down, or null.
struct AdaptedMlp {
    LowRankSum low_rank;
    float* copy = nullptr;
    int64_t copy_stride = 0;
};

// Computes a chunk of activation(input . gate) * (input . up), or of activation(input . up) in a plain MLP, and packs it
// as input of `down`. The sums, four times as large as the packed result, stay in the cache.
inline void activate_chunk(const Kernels& kernels, const Input& input, const Mlp& mlp, Activation activation,
                           const GemmRange& range, const Input& result, const AdaptedMlp& adapted = {}) {
    thread_local Buffer<float> scratch;
    const int first = range.first_panel * kPanel;
    const int width = std::min(range.last_panel * kPanel, mlp.up.outputs) - first;
    const int padded = int(round_up(width, kDepthAlign));
    const int64_t stride = spread_stride(int64_t(padded) * 4) / 4;
    scratch.reserve(2 * range.rows() * stride + padded);
    // Kernels write to output 16 * panel of row `row`.
    float* gates = scratch.data() - range.first_row * stride - first;
    float* ups = gates + range.rows() * stride;
    if (mlp.is_gated()) kernels.gemm(input, mlp.gate, range, gates, stride, false);
    kernels.gemm(input, mlp.up, range, ups, stride, false);
    if (const LowRankSum& low_rank = adapted.low_rank) {
        if (mlp.is_gated()) low_rank.add(range.first_row, range.last_row, first, first + width, gates, stride);
        low_rank.from(mlp.gate.outputs).add(range.first_row, range.last_row, first, first + width, ups, stride);
    }
    float* activated = scratch.data() + 2 * range.rows() * stride;
    std::fill(activated + width, activated + padded, 0.0f);
    for (int row = range.first_row; row < range.last_row; ++row) {
        const int64_t at = row * stride + first;
        if (mlp.is_gated()) {
            kernels.gated(activation, gates + at, ups + at, width, activated);
        } else {
            kernels.activate(activation, ups + at, width, activated);
        }
        kernels.pack_part(result, row, first, padded, activated);
        if (adapted.copy) std::copy_n(activated, width, adapted.copy + row * adapted.copy_stride + first);
    }
}

inline void multiply_activated(ThreadTeam& team, const Kernels& kernels, const Input& input, const Mlp& mlp,
                               Activation activation, const Input& result, const AdaptedMlp& adapted = {}) {
    const ProductChunks chunks(kernels, mlp.first(), input.rows, team.size(), result);
    team.for_each(chunks.count(), [&](int chunk) {
        activate_chunk(kernels, input, mlp, activation, chunks[chunk], result, adapted);
    });
}

}  // namespace neso
