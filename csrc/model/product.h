// Matrix products distributed among the threads of a team.
#pragma once

#include <algorithm>

#include "kernels/kernels.h"
#include "model/adapter_batch.h"
#include "model/decoder_weights.h"
#include "model/panel_partition.h"
#include "threads/thread_team.h"

namespace neso {

// Splits a product into chunks of a block of cached rows times a few panels, in the order of the threads that execute
// them.
//
// Each thread has the panels of its part (see PanelPartition). Every part has the same number of chunks, some of which
// may be empty. With at least a block of rows per thread, the threads have rows instead: a row is then packed, multiplied
// and normed by the same thread, from its cache. Weights are read once per block, so their memory is not the limit.
class ProductChunks {
   public:
    // `unit`: see PanelPartition. `owned`: whether panels belong to threads.
    ProductChunks(const Kernels& kernels, const Matrix& matrix, int rows, int threads, int unit = 1, bool owned = true)
        : threads_(threads), rows_(rows), row_step_(kernels.block_rows(matrix)),
          row_chunks_((rows + row_step_ - 1) / row_step_),
          parts_(matrix.panels, owned && rows < threads * row_step_ ? threads : 1, unit),
          panel_step_(panel_step(matrix.panels)), panel_chunks_((parts_.longest() + panel_step_ - 1) / panel_step_) {}

    int count() const { return parts_.threads() * row_chunks_ * panel_chunks_; }

    // Part of the product that the busiest thread is assigned.
    double largest_share() const {
        if (parts_.threads() > 1) return double(parts_.longest()) / parts_.panels();
        return double((count() + threads_ - 1) / threads_) / std::max(count(), 1);
    }

    GemmRange operator[](int chunk) const {
        const int part = chunk / (row_chunks_ * panel_chunks_), own = chunk % (row_chunks_ * panel_chunks_);
        const int row = own / panel_chunks_ * row_step_, end = parts_.begin(part + 1);
        const int panel = std::min(parts_.begin(part) + own % panel_chunks_ * panel_step_, end);
        return {row, std::min(row + row_step_, rows_), panel, std::min(panel + panel_step_, end)};
    }

   private:
    // Enough chunks that a thread that is ahead can help the others.
    static constexpr int kMaxPanels = 64, kChunksPerThread = 8;

    int panel_step(int panels) const {
        const int unit = std::max(PanelPartition::kPreferredUnit, parts_.unit());
        return std::clamp(panels / (threads_ * kChunksPerThread) / unit * unit, unit, std::max(unit, kMaxPanels));
    }

    const int threads_, rows_, row_step_, row_chunks_;
    const PanelPartition parts_;
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
        if (range.empty()) return;
        kernels.gemm(input, matrix, range, out, stride, accumulate);
        if (low_rank) {
            low_rank.add(range.first_row, range.last_row, range.first_panel * kPanel,
                         std::min(range.last_panel * kPanel, matrix.outputs), out, stride);
        }
    }, chunks.largest_share());
}

// Adapter changes of gate and up (concatenated), and where to store activated floats for the adapters of down, or null.
struct AdaptedMlp {
    LowRankSum low_rank;
    float* copy = nullptr;
    int64_t copy_stride = 0;
};

// Panels whose outputs can be packed as part of another product's input: a group of codes, or the padding.
inline int packed_unit(const Input& input) {
    return std::max(input.group_size, kDepthAlign) / kPanel;
}

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
    const ProductChunks chunks(kernels, mlp.first(), input.rows, team.size(), packed_unit(result));
    team.for_each(chunks.count(), [&](int chunk) {
        const GemmRange range = chunks[chunk];
        if (!range.empty()) activate_chunk(kernels, input, mlp, activation, range, result, adapted);
    }, chunks.largest_share());
}

}  // namespace neso
