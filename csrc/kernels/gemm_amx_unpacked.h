// bfloat16 products with quantized panels in tile registers: while a block of two panels is multiplied, vector
// instructions unpack the next block. The two units work at the same time.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/gemm_amx_many_rows.h"
#include "kernels/unpack.h"

namespace neso::NESO_ISA {

#if defined(__AMX_BF16__)

constexpr int kMaxUnpackDepth = 512;

// Depth of a block. With few rows, two blocks of two panels stay in the L1 cache, since the rows take most of the bandwidth
// of the L2 cache. With many, storing and loading their sums for each block would take more. Measured.
inline int unpack_depth(const GemmRange& range) { return range.rows() <= 128 ? 256 : kMaxUnpackDepth; }
static_assert(256 % kGroup == 0 && kMaxUnpackDepth % kGroup == 0);

// One or two panels and inputs of a matrix.
struct UnpackBlock {
    int first_panel, last_panel, k, depth;
};

// Unpacks a block to [panel][depth / 2][16][2] in steps, kPiece inputs of a panel at a time.
template <WeightKind Kind>
class UnpackAhead {
   public:
    // `steps`: the number of steps after which everything is unpacked, in equal parts.
    UnpackAhead(const Matrix& matrix, const UnpackBlock& block, bf16* to, int steps)
        : matrix_(matrix), block_(block), to_(to), panel_(block.first_panel - 1) {
        left_ = (block.last_panel - block.first_panel) * (block.depth / kPiece);
        pieces_per_step_ = (left_ + steps - 1) / steps;
        // The same inputs of the block after this one.
        const bool last = block.k + block.depth == matrix.depth;
        prefetch_distance_ = (last ? 2 * matrix.depth - block.k : block.depth) * kInputBytes;
    }

    NESO_INLINE void step() {
        for (int i = 0; i < pieces_per_step_ && left_ > 0; ++i) unpack_piece();
    }

   private:
    static constexpr int kPiece = 16, kInputBytes = Kind == WeightKind::int8 ? kPanel : kPanel / 2;

    NESO_INLINE void unpack_piece() {
        if (k_ == end_) {
            ++panel_;
            k_ = block_.k;
            end_ = block_.k + block_.depth;
            codes_ = static_cast<const char*>(matrix_.data) + int64_t(panel_) * matrix_.depth * kInputBytes;
        }
        if (k_ % kGroup == 0) scale_ = scale_of_codes(matrix_, panel_, k_);
#pragma GCC unroll 2
        for (int i = 0; i < kPiece; i += 8) {
            prefetch_codes<Kind>(codes_ + prefetch_distance_, k_ + i);
            unpack_eight<Kind>(codes_, k_ + i, scale_, to_ + i * kPanel);
        }
        to_ += kPiece * kPanel;
        k_ += kPiece;
        --left_;
    }

    const Matrix& matrix_;
    const UnpackBlock block_;
    const char* codes_ = nullptr;
    bf16* to_;
    GroupScale scale_;
    int64_t prefetch_distance_;
    int panel_, k_ = 0, end_ = 0, left_, pieces_per_step_;
};

template <WeightKind Kind>
inline void gemm_amx_unpacked(const Input& input, const Matrix& matrix, const GemmRange& range, float* out,
                              int64_t stride, bool accumulate) {
    const Tiles tiles;
    alignas(64) bf16 unpacked[2][2 * kMaxUnpackDepth * kPanel];
    bf16 *now = unpacked[0], *next = unpacked[1];
    const int block_depth = unpack_depth(range);
    const auto block_at = [&](int panel, int k) {
        return UnpackBlock{panel, end_of_pair(range, panel), k, std::min(block_depth, matrix.depth - k)};
    };
    UnpackBlock block = block_at(range.first_panel, 0);
    UnpackAhead<Kind>(matrix, block, now, 1).step();
    while (block.first_panel < range.last_panel) {
        const int end = block.k + block.depth;
        const UnpackBlock later = end < matrix.depth ? block_at(block.first_panel, end) : block_at(block.last_panel, 0);
        // The steps of `gemm_block`.
        UnpackAhead<Kind> ahead(matrix, later, next, row_blocks_of(range) * (block.depth / kTileDepth));
        const bool two = block.last_panel - block.first_panel == 2;
        const auto gemm = two ? gemm_block<true, UnpackAhead<Kind>> : gemm_block<false, UnpackAhead<Kind>>;
        gemm(input, matrix, range, block.first_panel, block.k, block.depth, now, now + int64_t(block.depth) * kPanel, out,
             stride, accumulate, ahead);
        std::swap(now, next);
        block = later;
    }
}

#endif

}  // namespace neso::NESO_ISA
