#include "model/attention_plan.h"

#include <algorithm>

namespace neso {
namespace {

// Queries per task: enough to reuse cached keys, but few enough to balance threads.
constexpr int kTileQueries = 48;
// Minimum keys per part: merging shorter parts costs more than they gain.
constexpr int kPartKeys = 512;
// Tasks per thread, for load balancing.
constexpr int kTasksPerThread = 4;

}  // namespace

AttentionPlan::AttentionPlan(const AttentionShape& shape, const Step& step, int window, int sinks, int num_threads,
                             const char* wanted)
    : window_(window), sinks_(window ? sinks : 0) {
    const int tile = std::max(1, kTileQueries / shape.group());
    // With few sequences, the keys of a token are split (flash decoding).
    const int parts_per_task = std::max(1, num_threads * kTasksPerThread / (step.num_sequences * shape.kv_heads));
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int end = step.query_start[sequence + 1];
        for (int token = step.query_start[sequence]; token < end; token += tile) {
            const int count = std::min(tile, end - token);
            if (wanted && std::none_of(wanted + token, wanted + token + count, [](char w) { return w != 0; })) continue;
            const int position = step.num_computed[sequence] + token - step.query_start[sequence];
            // The position of a token of a tree is at most that of its slot, and at least that of the first token.
            const int oldest = step.in_tree(token) ? step.num_computed[sequence] : position;
            plan_tile(shape, sequence, token, count, position, oldest, count == 1 ? parts_per_task : 1);
        }
    }
    // Longest first, for load balancing.
    const auto work = [](const PlannedTask& task) { return (task.key_end - task.key_begin) * (task.num_tokens + 1); };
    std::stable_sort(tasks_.begin(), tasks_.end(), [&](const auto& a, const auto& b) { return work(a) > work(b); });
}

void AttentionPlan::plan_tile(const AttentionShape& shape, int sequence, int first_token, int num_tokens,
                              int first_position, int oldest_position, int parts) {
    const int end = first_position + num_tokens;
    int begin = window_ ? std::max(0, oldest_position - window_ + 1) : 0;
    // Sinks and window are one range unless whole blocks lie between them.
    const int sinks_end = int(round_up(sinks_, shape.block_size));
    const bool apart = sinks_ && begin / shape.block_size * shape.block_size > sinks_end;
    if (sinks_ && !apart) begin = 0;
    parts = std::clamp((end - begin) / kPartKeys, 1, parts);
    // Parts end at block boundaries.
    const int keys = int(round_up((end - begin + parts - 1) / parts, shape.block_size));
    for (int head = 0; head < shape.kv_heads; ++head) {
        PlannedTask task{sequence, head, first_token, num_tokens, first_position, begin, end, apart, -1, -1};
        if (parts == 1) {
            tasks_.push_back(task);
            continue;
        }
        const int first_part = num_parts_;
        for (int from = begin; from < end;) {
            const int to = std::min(end, (from / shape.block_size) * shape.block_size + keys);
            task.key_begin = from;
            task.key_end = to;
            task.adds_sinks = apart && from == begin;
            task.part = num_parts_++;
            task.group = int(merges_.size());
            tasks_.push_back(task);
            from = to;
        }
        merges_.push_back({first_token, head, first_part, num_parts_ - first_part});
    }
}

}  // namespace neso
