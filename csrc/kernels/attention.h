// Paged attention with online softmax (FlashAttention, arXiv 2205.14135), for prefill and decode.
//
// The queries of a task (tokens x heads of a group) iterate over the cache in chunks of blocks:
//
//   scores = queries . keys        the keys of a block are a packed panel of 16 columns
//   weights = exp(scores - max)    the running maximum; earlier sums are rescaled when it grows
//   sums += weights . values       the values of a block are packed panels of 16 dimensions
#pragma once

#include "kernels/activations.h"
#include "kernels/attention_amx.h"
#include "kernels/dot.h"
#include "kernels/kernels.h"

namespace neso::NESO_ISA {

template <typename T>
struct CachePanel;
template <>
struct CachePanel<float> {
    using Panel = FloatPanel<float>;
};
template <>
struct CachePanel<bf16> {
#if defined(NESO_BF16_DOT)
    using Panel = Bf16Panel;
#else
    using Panel = Bf16PanelAsFloat;
#endif
};

constexpr int kChunkSlots = 256;
// Initial running maximum: low but finite, so that differences are never infinity - infinity.
constexpr float kInitialMax = -1e30f;

NESO_INLINE void store_operand(float* to, F32 v) { store(to, v); }
NESO_INLINE void store_operand(bf16* to, F32 v) { store_bf16(to, v); }

// Executes one task; members are in the order of the computation.
template <typename T>
class Attention {
    using Panel = typename CachePanel<T>::Panel;
    using Operand = typename Panel::Input;

   public:
    Attention(const AttentionShape& shape, const char* cache, const AttentionTask& task)
        : shape_(shape), cache_(cache), task_(task), group_(shape.group()), rows_(task.num_tokens * group_),
          dim_(shape.padded_dim()), slots_(shape.slots()), chunk_blocks_(slots_ < kChunkSlots ? kChunkSlots / slots_ : 1),
          width_(chunk_blocks_ * slots_) {
        static thread_local Scratch scratch;
        scratch_ = &scratch;
        const int64_t whole_tiles = round_up(rows_, kTileRows);
        scratch.queries.reserve(whole_tiles * dim_);
        scratch.scores.reserve(whole_tiles * width_);
        scratch.weights.reserve(whole_tiles * width_);
        scratch.sums.reserve(whole_tiles * dim_);
        scratch.maxima.reserve(rows_);
        scratch.totals.reserve(rows_);
    }

    void run() {
        load_queries();
        if (task_.adds_sinks) attend_to(0, task_.sinks);
        attend_to(task_.key_begin, task_.key_end);
        write_result();
    }

   private:
    struct Scratch {
        Buffer<Operand> queries, weights;
        Buffer<float> scores, sums, maxima, totals;
    };

    // Keys [key_begin, key_end), in chunks of blocks.
    void attend_to(int key_begin, int key_end) {
        const int first_block = key_begin / shape_.block_size;
        const int last_block = (key_end - 1) / shape_.block_size + 1;
        for (int block = first_block; block < last_block; block += chunk_blocks_) {
            const int count = last_block - block < chunk_blocks_ ? last_block - block : chunk_blocks_;
            if (tiled()) {
                compute_scores_in_tiles(block, count);
            } else {
                compute_scores(block, count, last_block);
            }
            if (shape_.softcap > 0) cap_scores(count * slots_);
            mask(block, count, key_begin, key_end);
            for (int row = 0; row < rows_; ++row) update_softmax(row, count * slots_);
            if (tiled()) {
                add_values_in_tiles(block, count);
            } else {
                add_values(block, count);
            }
        }
    }

    const T* keys(int block) const {
        const int64_t at = task_.block_table[block] * shape_.block_bytes() + task_.kv_head * shape_.head_bytes();
        return reinterpret_cast<const T*>(cache_ + at);
    }
    const T* values(int block) const { return keys(block) + int64_t(dim_) * slots_; }

    // Row token * group + head; scaled, padded with zeros.
    void load_queries() {
        for (int row = 0; row < rows_; ++row) {
            const float* from = task_.queries + row / group_ * task_.query_stride + row % group_ * shape_.head_dim;
            Operand* to = scratch_->queries.data() + int64_t(row) * dim_;
            int d = 0;
            for (; d + kLanes <= shape_.head_dim; d += kLanes) store_operand(to + d, load<F32>(from + d) * shape_.scale);
            for (; d < dim_; d += kLanes) {
                alignas(64) float scaled[kLanes] = {};
                if (d < shape_.head_dim) std::memcpy(scaled, from + d, sizeof(float) * (shape_.head_dim - d));
                store_operand(to + d, load<F32>(scaled) * shape_.scale);
            }
        }
        std::memset(scratch_->sums.data(), 0, sizeof(float) * rows_ * dim_);
        for (int row = 0; row < rows_; ++row) {
            scratch_->maxima.data()[row] = kInitialMax;
            scratch_->totals.data()[row] = 0;
        }
    }

    // The keys of a panel of 16 slots; panels are counted from the first slot of a block.
    const T* key_panel(int first_block, int panel) const {
        const int panels_per_block = slots_ / kPanel;
        return keys(first_block + panel / panels_per_block) + panel % panels_per_block * kPanel * kInterleave;
    }

    // Two panels at a time: with the few rows of a decode step, a single panel of sums would stall on latency. The task
    // ends at `last_block`.
    void compute_scores(int first_block, int count, int last_block) {
        const int panels_per_block = slots_ / kPanel, panels = count * panels_per_block;
        const int panels_of_task = (last_block - first_block) * panels_per_block;
        int panel = 0;
        for (; panel + 2 <= panels; panel += 2) {
            const T* at = key_panel(first_block, panel);
            const T* ahead = panel + 2 < panels_of_task ? key_panel(first_block, panel + 2) : at;
            const T* ahead2 = panel + 3 < panels_of_task ? key_panel(first_block, panel + 3) : at;
            score_panels<2>(at, key_panel(first_block, panel + 1) - at, panel * kPanel, ahead, ahead2);
        }
        if (panel < panels) {
            const T* at = key_panel(first_block, panel);
            score_panels<1>(at, 0, panel * kPanel, at, at);
        }
    }

    // Like `dot`, but the row stride of a panel is the number of slots of the block, and panels are `stride` apart.
    //
    // Blocks are scattered and small, so the hardware prefetcher is always late: the first rows prefetch the values of
    // these panels and the keys at `ahead` and `ahead2`.
    template <int Panels>
    void score_panels(const T* keys, int64_t stride, int first_slot, const T* ahead, const T* ahead2) {
        const int64_t to_values = int64_t(dim_) * slots_;
        for_row_blocks<kAttentionRows>(rows_, [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
            F32 sums[Rows][Panels][kVectors] = {};
            const Operand* queries = scratch_->queries.data() + int64_t(row) * dim_;
#pragma GCC unroll 4
            for (int d = 0; d < dim_; d += kInterleave) {
                const int64_t at = int64_t(d) * slots_;
                if (row == 0) {
                    __builtin_prefetch(ahead + at, 0, 2);
                    __builtin_prefetch(keys + to_values + at, 0, 2);
                    if constexpr (Panels > 1) {
                        __builtin_prefetch(ahead2 + at, 0, 2);
                        __builtin_prefetch(keys + stride + to_values + at, 0, 2);
                    }
                }
                Panel::step(queries + d, dim_, keys + at, stride, sums);
            }
            float* out = scratch_->scores.data() + int64_t(row) * width_ + first_slot;
            for_each_vector<Rows, Panels>([&](int r, int p, int v) NESO_INLINE_LAMBDA {
                store(out + int64_t(r) * width_ + p * kPanel + v * kLanes, sums[r][p][v]);
            });
        });
    }

    void cap_scores(int count) {
        for (int row = 0; row < rows_; ++row) {
            softcap(scratch_->scores.data() + int64_t(row) * width_, count, shape_.softcap);
        }
    }

    // Set scores of invisible slots to minus infinity.
    void mask(int first_block, int count, int key_begin, int key_end) {
        const int begin = first_block * shape_.block_size;
        const int end = begin + count * shape_.block_size;
        const int last_position = task_.first_position + task_.num_tokens - 1;
        // Keys up to the first query, or the root of the tree, are visible to all queries.
        const int common = task_.tree_masks ? task_.tree_begin : task_.first_position;
        const bool all_visible = slots_ == shape_.block_size && begin >= key_begin && end <= key_end &&
                              end <= common + 1 && (!task_.window || begin > last_position - task_.window);
        if (all_visible) return;
        for (int row = 0; row < rows_; ++row) {
            if (task_.tree_masks) {
                mask_in_tree(row, begin, count, key_begin, key_end);
                continue;
            }
            const int position = task_.first_position + row / group_;
            const int oldest = task_.window ? position - task_.window + 1 : 0;
            const int last = position + 1 < key_end ? position + 1 : key_end;
            for (int block = 0; block < count; ++block) {
                float* scores = scratch_->scores.data() + int64_t(row) * width_ + block * slots_;
                const int start = begin + block * shape_.block_size;
                const bool block_visible = slots_ == shape_.block_size && start >= key_begin && start >= oldest &&
                                           start + slots_ <= last;
                if (block_visible) continue;
                for (int slot = 0; slot < slots_; ++slot) {
                    const int key = start + slot;
                    const bool in_window = key >= oldest || key < task_.sinks;
                    if (!in_window || key < key_begin || key >= last || slot >= shape_.block_size) {
                        scores[slot] = -__builtin_inff();
                    }
                }
            }
        }
    }

    // The same for a token of a tree, which attends to the context and to the tree nodes in its bit mask.
    void mask_in_tree(int row, int begin, int count, int key_begin, int key_end) {
        const int number = task_.first_position + row / group_ - task_.tree_begin;
        const uint64_t seen = task_.tree_masks[number];
        const int position = task_.tree_begin + task_.tree_depths[number];
        for (int block = 0; block < count; ++block) {
            float* scores = scratch_->scores.data() + int64_t(row) * width_ + block * slots_;
            for (int slot = 0; slot < slots_; ++slot) {
                const int key = begin + block * shape_.block_size + slot;
                bool visible = slot < shape_.block_size && key >= key_begin && key < key_end;
                if (visible) {
                    const int node = key - task_.tree_begin;
                    visible = node < 0 || (seen >> node & 1);
                    const int key_pos = visible && node >= 0 ? task_.tree_begin + task_.tree_depths[node] : key;
                    if (task_.window && key_pos <= position - task_.window && key >= task_.sinks) visible = false;
                }
                if (!visible) scores[slot] = -__builtin_inff();
            }
        }
    }

    // Convert the scores of a row to weights, and rescale earlier sums to the new maximum.
    void update_softmax(int row, int count) {
        const float* scores = scratch_->scores.data() + int64_t(row) * width_;
        F32 peak = splat(scratch_->maxima.data()[row]);
        for (int i = 0; i < count; i += kLanes) peak = max(load<F32>(scores + i), peak);
        const float before = scratch_->maxima.data()[row], maximum = largest(peak);
        F32 total{};
        Operand* weights = scratch_->weights.data() + int64_t(row) * width_;
        for (int i = 0; i < count; i += kLanes) {
            const F32 weight = exp(load<F32>(scores + i) - maximum);
            total += weight;
            store_operand(weights + i, weight);
        }
        if (before == maximum) {
            scratch_->totals.data()[row] += sum(total);
            return;
        }
        const float shrink = exp(splat(before - maximum))[0];
        scratch_->maxima.data()[row] = maximum;
        scratch_->totals.data()[row] = scratch_->totals.data()[row] * shrink + sum(total);
        float* sums = scratch_->sums.data() + int64_t(row) * dim_;
        for (int d = 0; d < dim_; d += kLanes) store(sums + d, load<F32>(sums + d) * shrink);
    }

    void add_values(int first_block, int count) {
        const int panels = dim_ / kPanel;
        int panel = 0;
        for (; panel + kValuePanels <= panels; panel += kValuePanels) {
            add_value_panels<kValuePanels>(first_block, count, panel);
        }
        for (; panel < panels; ++panel) add_value_panels<1>(first_block, count, panel);
    }

    template <int Panels>
    void add_value_panels(int first_block, int count, int panel) {
        const int64_t stride = int64_t(slots_) * kPanel;
        for_row_blocks<kAttentionRows>(rows_, [&]<int Rows>(int row) NESO_INLINE_LAMBDA {
            F32 sums[Rows][Panels][kVectors];
            float* to = scratch_->sums.data() + int64_t(row) * dim_ + panel * kPanel;
            for_each_vector<Rows, Panels>([&](int r, int p, int v) NESO_INLINE_LAMBDA {
                sums[r][p][v] = load<F32>(to + int64_t(r) * dim_ + p * kPanel + v * kLanes);
            });
            for (int block = 0; block < count; ++block) {
                const Operand* weights = scratch_->weights.data() + int64_t(row) * width_ + block * slots_;
                const T* from = values(first_block + block) + panel * stride;
                dot<Panel, Rows, Panels>(weights, width_, from, stride, slots_, sums);
            }
            for_each_vector<Rows, Panels>([&](int r, int p, int v) NESO_INLINE_LAMBDA {
                store(to + int64_t(r) * dim_ + p * kPanel + v * kLanes, sums[r][p][v]);
            });
        });
    }

    template <int Rows, int Panels, typename Body>
    static NESO_INLINE void for_each_vector(const Body& body) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) body(r, p, v);
            }
        }
    }

#if defined(__AMX_BF16__)
    bool tiled() const { return sizeof(T) == 2 && rows_ >= kAttentionTileRows; }

    void compute_scores_in_tiles(int first_block, int count) {
        if constexpr (sizeof(T) == 2) {
            const Tiles tiles;
            const int panels = count * slots_ / kPanel;
            for (int row = 0; row < rows_; row += kTileRows) {
                const Operand* queries = scratch_->queries.data() + int64_t(row) * dim_;
                float* scores = scratch_->scores.data() + int64_t(row) * width_;
                for (int panel = 0; panel < panels;) {
                    const auto keys_of = [&](int p) { return key_panel(first_block, panel + p); };
                    float* to = scores + panel * kPanel;
                    if (panel + 4 <= panels) {
                        tile_scores<4>(queries, dim_, keys_of, slots_, to, width_);
                        panel += 4;
                    } else {
                        tile_scores<1>(queries, dim_, keys_of, slots_, to, width_);
                        panel += 1;
                    }
                }
            }
        }
    }

    void add_values_in_tiles(int first_block, int count) {
        if constexpr (sizeof(T) == 2) {
            const ValueTiles tiles;
            for (int row = 0; row < rows_; row += kTileRows) {
                const bf16* weights = scratch_->weights.data() + int64_t(row) * width_;
                // The padded dimension is a multiple of two panels.
                for (int panel = 0; panel < dim_ / kPanel;) {
                    const int64_t at = int64_t(panel) * slots_ * kPanel;
                    const auto values_of = [&](int block) { return values(first_block + block) + at; };
                    float* sums = scratch_->sums.data() + int64_t(row) * dim_ + panel * kPanel;
                    if (panel + 4 <= dim_ / kPanel) {
                        tile_values<4>(weights, width_, values_of, count, slots_, sums, dim_);
                        panel += 4;
                    } else {
                        tile_values<2>(weights, width_, values_of, count, slots_, sums, dim_);
                        panel += 2;
                    }
                }
            }
        }
    }
#else
    static constexpr bool tiled() { return false; }
    void compute_scores_in_tiles(int, int) {}
    void add_values_in_tiles(int, int) {}
#endif

    void write_result() {
        for (int row = 0; row < rows_; ++row) {
            float* to = task_.out + row / group_ * task_.out_stride + row % group_ * shape_.head_dim;
            const float* sums = scratch_->sums.data() + int64_t(row) * dim_;
            const float total = scratch_->totals.data()[row];
            if (task_.maxima) {
                task_.maxima[row] = scratch_->maxima.data()[row];
                task_.sums[row] = total;
                std::memcpy(to, sums, sizeof(float) * shape_.head_dim);
            } else {
                for (int d = 0; d < shape_.head_dim; ++d) to[d] = sums[d] / total;
            }
        }
    }

    static constexpr int kInterleave = 4 / sizeof(T);
    // Register blocking; see `kBlockRows`.
    static constexpr int kAttentionRows = kLanes == 16 ? 6 : 2, kValuePanels = kLanes == 16 ? 4 : 1;

    const AttentionShape& shape_;
    const char* cache_;
    const AttentionTask& task_;
    const int group_, rows_, dim_, slots_, chunk_blocks_, width_;
    Scratch* scratch_;
};

inline void attend(const AttentionShape& shape, const char* cache, const AttentionTask& task) {
    if (shape.kind == CacheKind::f32) {
        Attention<float>(shape, cache, task).run();
    } else {
        Attention<bf16>(shape, cache, task).run();
    }
}

inline void merge_parts(const float* partial, int64_t part_stride, const float* maxima, const float* sums,
                        int64_t statistic_stride, int parts, int dim, float* out) {
    float maximum = kInitialMax, total = 0;
    for (int part = 0; part < parts; ++part) {
        maximum = maxima[part * statistic_stride] > maximum ? maxima[part * statistic_stride] : maximum;
    }
    for (int d = 0; d < dim; ++d) out[d] = 0;
    for (int part = 0; part < parts; ++part) {
        const float weight = exp(splat(maxima[part * statistic_stride] - maximum))[0];
        total += weight * sums[part * statistic_stride];
        for (int d = 0; d < dim; ++d) out[d] += weight * partial[part * part_stride + d];
    }
    for (int d = 0; d < dim; ++d) out[d] /= total;
}

}  // namespace neso::NESO_ISA
