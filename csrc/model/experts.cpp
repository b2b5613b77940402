#include "model/experts.h"

#include <algorithm>
#include <cmath>

namespace neso {

void ExpertsRunner::reserve(const Experts& experts, int rows) {
    const int64_t slots = int64_t(rows) * shape_.top_k;
    scores_.reserve(int64_t(rows) * experts.router.outputs);
    expert_weights_.reserve(slots);
    results_.reserve(slots * (spread_stride(int64_t(shape_.hidden_size) * 4) / 4));
    chosen_.resize(slots);
    slots_.resize(slots);
    row_of_slot_.resize(slots);
}

void ExpertsRunner::run(const Experts& experts, const Input& router_input, const float* x, int rows, int64_t stride,
                        const float* shared_out, float* out, bool accumulate) {
    if (!rows) return;  // in the last layer, if no outputs are requested
    multiply(team_, kernels_, router_input, experts.router, scores_.data(), experts.router.outputs, false);
    team_.for_each(rows, [&](int row) { choose(experts, row); });
    team_.for_each(1, [&](int) { group_rows(experts, rows); });
    team_.for_each(rows * shape_.top_k, [&](int slot) {
        const auto after = [](int value, const Group& group) { return value < group.first; };
        const Group& group = *(std::upper_bound(groups_.begin(), groups_.end(), slot, after) - 1);
        kernels_.pack_input(group.input, slot - group.first, experts.experts[group.expert].first(),
                            x + row_of_slot_[slot] * stride);
    });
    for_each_chunk(first_chunks_, [&](const Group& group, int chunk) {
        const Mlp& mlp = experts.experts[group.expert];
        const ProductChunks chunks = chunks_of(mlp.first(), group.count, packed_unit(group.activated));
        activate_chunk(kernels_, group.input, mlp, shape_.activation, chunks[chunk], group.activated);
    });
    for_each_chunk(down_chunks_, [&](const Group& group, int chunk) {
        const Matrix& down = experts.experts[group.expert].down;
        const ProductChunks chunks = chunks_of(down, group.count);
        kernels_.gemm(group.activated, down, chunks[chunk], results_.data() + group.first * stride, stride, false);
    });
    team_.for_each(rows, [&](int row) { add_results(experts, row, stride, shared_out, out, accumulate); });
}

// The most probable experts of a row and their weights; ties go to the lower index.
void ExpertsRunner::choose(const Experts& experts, int row) {
    const int count = int(experts.experts.size()), top_k = shape_.top_k;
    const float* scores = scores_.data() + int64_t(row) * experts.router.outputs;
    const float maximum = *std::max_element(scores, scores + count);
    float total = 0;
    for (int i = 0; i < count; ++i) total += std::exp(scores[i] - maximum);
    int* chosen = chosen_.data() + int64_t(row) * top_k;
    float* weights = expert_weights_.data() + int64_t(row) * top_k;
    float kept = 0;
    for (int rank = 0; rank < top_k; ++rank) {
        int best = -1;
        for (int i = 0; i < count; ++i) {
            if (std::find(chosen, chosen + rank, i) != chosen + rank) continue;
            if (best < 0 || scores[i] > scores[best]) best = i;
        }
        chosen[rank] = best;
        weights[rank] = std::exp(scores[best] - maximum) / total;
        kept += weights[rank];
    }
    for (int rank = 0; shape_.normalized && rank < top_k; ++rank) weights[rank] /= kept;
}

// Sort the chosen experts, and assign memory to each expert's rows.
void ExpertsRunner::group_rows(const Experts& experts, int rows) {
    const int count = int(experts.experts.size()), top_k = shape_.top_k;
    firsts_.assign(count + 1, 0);
    for (int i = 0; i < rows * top_k; ++i) ++firsts_[chosen_[i] + 1];
    for (int expert = 0; expert < count; ++expert) firsts_[expert + 1] += firsts_[expert];
    groups_.clear();
    first_chunks_.ends.clear();
    down_chunks_.ends.clear();
    std::fill(std::begin(sizes_), std::end(sizes_), 0);
    int first_chunks = 0, down_chunks = 0;
    for (int expert = 0; expert < count; ++expert) {
        Group group{};
        group.expert = expert;
        group.first = firsts_[expert];
        group.count = firsts_[expert + 1] - group.first;
        if (!group.count) continue;
        const Mlp& mlp = experts.experts[expert];
        group.input = kernels_.describe_input(mlp.first(), group.count);
        group.activated = kernels_.describe_input(mlp.down, group.count);
        allocate(group.input, group.input_at);
        allocate(group.activated, group.activated_at);
        first_chunks += chunks_of(mlp.first(), group.count, packed_unit(group.activated)).count();
        down_chunks += chunks_of(mlp.down, group.count).count();
        groups_.push_back(group);
        first_chunks_.ends.push_back(first_chunks);
        down_chunks_.ends.push_back(down_chunks);
    }
    first_chunks_.count.store(first_chunks, std::memory_order_release);  // see ThreadTeam::for_each
    down_chunks_.count.store(down_chunks, std::memory_order_release);
    for (int i = 0; i < rows * top_k; ++i) {
        slots_[i] = firsts_[chosen_[i]]++;
        row_of_slot_[slots_[i]] = i / top_k;
    }
    values_.reserve(sizes_[0]);
    scales_.reserve(sizes_[1]);
    sums_.reserve(sizes_[2]);
    for (Group& group : groups_) {
        group.input = with_memory(group.input, group.input_at);
        group.activated = with_memory(group.activated, group.activated_at);
    }
}

void ExpertsRunner::allocate(const Input& input, int64_t (&at)[3]) {
    const int64_t sizes[3] = {input.value_bytes, input.num_groups, input.num_groups};
    for (int i = 0; i < 3; ++i) {
        at[i] = sizes_[i];
        sizes_[i] += round_up(sizes[i], kAlignment);
    }
}

Input ExpertsRunner::with_memory(Input input, const int64_t (&at)[3]) {
    input.values = values_.data() + at[0];
    input.scales = scales_.data() + at[1];
    input.sums = sums_.data() + at[2];
    return input;
}

// Summed in the order of the weights, so that a row's result does not depend on other rows.
void ExpertsRunner::add_results(const Experts& experts, int row, int64_t stride, const float* shared_out, float* out,
                                bool accumulate) {
    float* to = out + row * stride;
    const int hidden = shape_.hidden_size;
    if (!accumulate) std::fill_n(to, hidden, 0.0f);
    for (int i = row * shape_.top_k; i < (row + 1) * shape_.top_k; ++i) {
        const float* from = results_.data() + slots_[i] * stride;
        const float weight = expert_weights_.data()[i];
        for (int k = 0; k < hidden; ++k) to[k] += weight * from[k];
    }
    if (!experts.has_shared()) return;
    const float* from = shared_out + row * stride;
    const float* scores = scores_.data() + int64_t(row) * experts.router.outputs;
    const float gate = experts.shared_is_gated() ? 1.0f / (1.0f + std::exp(-scores[experts.experts.size()])) : 1.0f;
    for (int k = 0; k < hidden; ++k) to[k] += gate * from[k];
}

// Distribute the chunks of all groups among the threads.
template <typename Chunk>
void ExpertsRunner::for_each_chunk(const GroupEnds& all, const Chunk& chunk) {
    team_.for_each(all.count.load(std::memory_order_relaxed), [&](int number) {
        const std::vector<int>& ends = all.ends;
        const int index = int(std::upper_bound(ends.begin(), ends.end(), number) - ends.begin());
        chunk(groups_[index], number - (index ? ends[index - 1] : 0));
    });
}

}  // namespace neso
