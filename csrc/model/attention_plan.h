// The attention tasks of a step: planned once, executed in every layer with the same window.
#pragma once

#include <vector>

#include "kernels/kernels.h"
#include "model/step.h"

namespace neso {

// Queries [first_token, first_token + num_tokens) of a sequence, one key-value head, keys [key_begin, key_end).
struct PlannedTask {
    int sequence, kv_head;
    int first_token, num_tokens;   // in the flat batch
    int first_position;
    int key_begin, key_end;
    bool adds_sinks;               // the task also attends to the sinks, which are before key_begin
    int part;                      // index of the part if the keys are split; -1: not split
    int group;                     // index into AttentionPlan::merges, if split
};

// Parts whose results are merged.
struct PlannedMerge {
    int token, kv_head, first_part, parts;
};

class AttentionPlan {
   public:
    // `sinks`: first tokens that stay visible in a window. `wanted`, if given, marks the tokens whose result is needed;
    // other tokens may be skipped.
    AttentionPlan(const AttentionShape& shape, const Step& step, int window, int sinks, int num_threads,
                  const char* wanted);

    int window() const { return window_; }
    int sinks() const { return sinks_; }
    const std::vector<PlannedTask>& tasks() const { return tasks_; }
    const std::vector<PlannedMerge>& merges() const { return merges_; }
    int num_parts() const { return num_parts_; }

   private:
    void plan_tile(const AttentionShape& shape, int sequence, int first_token, int num_tokens, int first_position,
                   int oldest_position, int parts);

    int window_, sinks_;
    std::vector<PlannedTask> tasks_;
    std::vector<PlannedMerge> merges_;
    int num_parts_ = 0;
};

}  // namespace neso
