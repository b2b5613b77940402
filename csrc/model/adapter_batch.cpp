#include "model/adapter_batch.h"

#include <algorithm>

namespace neso {
namespace {

// Rows and ranks of one task: few enough to stay cached and to balance threads.
constexpr int kRowsPerTask = 32, kRanksPerTask = 8;

// `slot_of`: slot of each row, -1 for none.
void group_rows(const std::vector<int32_t>& slot_of, const std::vector<const Adapter*>& slots, AdapterRows& grouped) {
    grouped.rows.clear();
    grouped.groups.clear();
    for (int row = 0; row < int(slot_of.size()); ++row) {
        if (slot_of[row] >= 0) grouped.rows.push_back(row);
    }
    std::stable_sort(grouped.rows.begin(), grouped.rows.end(),
                     [&](int32_t one, int32_t other) { return slot_of[one] < slot_of[other]; });
    for (int i = 0; i < int(grouped.rows.size()); ++i) {
        const int slot = slot_of[grouped.rows[i]];
        if (i == 0 || slot != slot_of[grouped.rows[i - 1]]) grouped.groups.push_back({slots[slot], i, i});
        grouped.groups.back().end = i + 1;
    }
}

}  // namespace

void LowRankSum::add(int first_row, int last_row, int first_output, int last_output, float* out, int64_t stride) const {
    for (const AdapterRows::Group& group : rows_->groups) {
        const AdapterProduct& product = group.adapter->product(layer_, product_);
        if (!product.ranks) continue;
        const auto begin = rows_->rows.begin() + group.begin, end = rows_->rows.begin() + group.end;
        const auto first = std::lower_bound(begin, end, first_row), last = std::lower_bound(first, end, last_row);
        if (first == last) continue;
        const int64_t position = first - rows_->rows.begin();
        for (const AdapterPart& part : product.parts) {
            const int begins_at = part.first_output - first_output_;
            ExpandTask task{};
            task.first_output = std::max(first_output - begins_at, 0);
            task.last_output = std::min(last_output - begins_at, part.outputs);
            if (task.first_output >= task.last_output) continue;
            task.kind = group.adapter->kind;
            task.b = part.b;
            task.rank = part.rank;
            task.rows = &*first;
            task.num_rows = int(last - first);
            task.h = h_ + position * h_stride_ + part.first_rank;
            task.h_stride = h_stride_;
            task.out = out + begins_at;
            task.out_stride = stride;
            kernels_->expand(task);
        }
    }
}

void AdapterBatch::plan(const Step& step, const std::vector<const Adapter*>& slots) {
    all_.groups.clear();
    if (!step.adapter_slots) return;
    std::vector<int32_t> slot_of(step.num_tokens), wanted(step.num_wanted);
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        std::fill(slot_of.begin() + step.query_start[sequence], slot_of.begin() + step.query_start[sequence + 1],
                  step.adapter_slots[sequence]);
    }
    for (int i = 0; i < step.num_wanted; ++i) wanted[i] = slot_of[step.wanted_rows[i]];
    group_rows(slot_of, slots, all_);
    group_rows(wanted, slots, wanted_);
    int ranks = 0;
    for (const AdapterRows::Group& group : all_.groups) {
        for (const AdapterProduct& product : group.adapter->products) ranks = std::max(ranks, product.ranks);
    }
    h_stride_ = round_up(ranks, 16);
    h_.reserve(int64_t(std::max(all_.rows.size(), wanted_.rows.size())) * h_stride_);
}

bool AdapterBatch::change(int layer, Product product) const {
    return std::any_of(all_.groups.begin(), all_.groups.end(),
                       [&](const auto& group) { return group.adapter->product(layer, product).ranks > 0; });
}

LowRankSum AdapterBatch::shrink(ThreadTeam& team, const Kernels& kernels, int layer, Product product, const float* x,
                                int64_t stride, bool wanted) {
    if (empty()) return {};
    const AdapterRows& grouped = wanted ? wanted_ : all_;
    int ranks = 0, row_chunks = 0;
    for (const AdapterRows::Group& group : grouped.groups) {
        ranks = std::max(ranks, group.adapter->product(layer, product).ranks);
        row_chunks += (group.end - group.begin + kRowsPerTask - 1) / kRowsPerTask;
    }
    if (!ranks) return {};
    const int rank_chunks = (ranks + kRanksPerTask - 1) / kRanksPerTask;
    team.for_each(row_chunks * rank_chunks, [&](int chunk) {
        int rows = chunk / rank_chunks;
        auto group = grouped.groups.begin();
        for (int chunks; rows >= (chunks = (group->end - group->begin + kRowsPerTask - 1) / kRowsPerTask); ++group) {
            rows -= chunks;
        }
        const AdapterProduct& changes = group->adapter->product(layer, product);
        const int rank = chunk % rank_chunks * kRanksPerTask, begin = group->begin + rows * kRowsPerTask;
        if (rank >= changes.ranks) return;
        const bool f32 = group->adapter->kind == WeightKind::f32;
        const int64_t row_bytes = round_up(changes.inputs, kLowRankBlock) * (f32 ? 4 : 2);
        ShrinkTask task{};
        task.kind = group->adapter->kind;
        task.a = static_cast<const char*>(changes.a) + rank * row_bytes;
        task.scales = changes.scales + rank;
        task.ranks = std::min(kRanksPerTask, changes.ranks - rank);
        task.inputs = changes.inputs;
        task.rows = grouped.rows.data() + begin;
        task.num_rows = std::min(kRowsPerTask, group->end - begin);
        task.x = x;
        task.x_stride = stride;
        task.h = h_.data() + begin * h_stride_ + rank;
        task.h_stride = h_stride_;
        kernels.shrink(task);
    });
    return {kernels, grouped, layer, product, h_.data(), h_stride_};
}

}  // namespace neso
