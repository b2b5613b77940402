// Samples a token from a row of logits in time linear in the vocabulary: only weights at the threshold are sorted.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace neso {

// temperature 0: greedy. top_k 0, top_p 1 and min_p 0: no filter. `uniform` in [0, 1): the random number.
struct Draw {
    float temperature, top_p, min_p;
    int top_k;
    double uniform;
    const int32_t* allowed = nullptr;  // bit t % 32 of word t / 32: token t is allowed; null: all are
};

class RowSampler {
   public:
    // Returns a token, or -1 if there is a NaN or no logit above -inf. Logits of masked tokens are set to -inf.
    int choose(const Kernels& kernels, float* logits, int count, const Draw& draw);

   private:
    // The smallest kept weight. Of the weights equal to it, the first `kept_at_threshold` by id are kept.
    struct Threshold {
        float weight;
        int kept_at_threshold;
    };

    static float min_kept_weight(int count, const Draw& draw);
    // Drop the other weights; returns the sum of the rest.
    double drop_below(const Threshold& threshold);
    Threshold filter_threshold(double mass, const Draw& draw);
    // The threshold of the most likely tokens: at most `max_count`, and only as many as needed to reach `mass`.
    Threshold threshold_of(int max_count, double mass);

    // Candidates in order of ids.
    std::vector<float> weights_;
    std::vector<int32_t> ids_;
    std::vector<double> bucket_mass_;
    std::vector<int> bucket_count_;
    std::vector<float> threshold_bucket_;
};

}  // namespace neso
