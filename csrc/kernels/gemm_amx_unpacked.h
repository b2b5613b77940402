// bfloat16 products with quantized panels in tile registers: while two panels are multiplied, vector instructions
// unpack the next two. The two units work at the same time.
#pragma once

#include <utility>

#include "kernels/gemm_amx_many_rows.h"
#include "kernels/unpack.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

// Unpacks up to two panels to [panel][depth / 2][16][2] in steps, kGroup inputs of a panel at a time.
template <WeightKind Kind>
class UnpackAhead {
   public:
    // `steps`: the number of steps after which everything is unpacked.
    UnpackAhead(const Matrix& matrix, int first_panel, int last_panel, bf16* to, int steps)
        : matrix_(matrix), panel_(first_panel), last_panel_(last_panel), to_(to) {
        const int pieces = (last_panel - first_panel) * (matrix.depth / kGroup);
        pieces_per_step_ = (pieces + steps - 1) / steps;
    }

    NESO_INLINE void step() {
        for (int i = 0; i < pieces_per_step_; ++i) unpack_piece();
    }

    void finish() {
        while (panel_ < last_panel_) unpack_piece();
    }

   private:
    NESO_INLINE void unpack_piece() {
        if (panel_ >= last_panel_) return;
        constexpr int kPieceBytes = kGroup * kPanel / (Kind == WeightKind::int8 ? 1 : 2);
        const char* later = matrix_.panel(panel_) + k_ / kGroup * kPieceBytes + kAheadBytes;
        for (int at = 0; at < kPieceBytes; at += 64) _mm_prefetch(later + at, _MM_HINT_T1);
        unpack_inputs<Kind>(matrix_, panel_, k_, to_);
        k_ += kGroup;
        if (k_ < matrix_.depth) return;
        k_ = 0;
        ++panel_;
        to_ += int64_t(matrix_.depth) * kPanel;
    }

    // Codes are prefetched this far ahead into the L2 cache.
    static constexpr int kAheadBytes = 4096;

    const Matrix& matrix_;
    int panel_;
    const int last_panel_;
    bf16* to_;
    int k_ = 0, pieces_per_step_;
};

template <WeightKind Kind>
inline void gemm_amx_unpacked(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                              int64_t stride, bool accumulate) {
    static thread_local Buffer<bf16> unpacked;
    const Tiles tiles;
    const int64_t pair = 2 * int64_t(matrix.depth) * kPanel;
    unpacked.reserve(2 * pair);
    bf16 *now = unpacked.data(), *next = now + pair;
    // The steps of `gemm_tiles`.
    const int steps = row_blocks_of(range) * (matrix.depth / kTileDepth);
    UnpackAhead<Kind>(matrix, range.first_panel, end_of_pair(range, range.first_panel), now, steps).finish();
    for (int panel = range.first_panel; panel < range.last_panel; panel += 2) {
        const int end = end_of_pair(range, panel);
        UnpackAhead<Kind> ahead(matrix, end, end_of_pair(range, end), next, steps);
        const Matrix dense = unpacked_panels(matrix, panel, WeightKind::bf16, now);
        const GemmRange part{range.first_row, range.last_row, 0, end - panel};
        const auto gemm = end - panel == 2 ? gemm_tiles<true, UnpackAhead<Kind>> : gemm_tiles<false, UnpackAhead<Kind>>;
        gemm(input, dense, part, 0, out + panel * kPanel, stride, accumulate, ahead);
        std::swap(now, next);
    }
}

#endif

}  // namespace neso::NESO_ISA
