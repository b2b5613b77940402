// Which thread multiplies which panels of a matrix.
#pragma once

#include <cstdint>

namespace neso {

// Panels [begin(t), begin(t + 1)) of a matrix belong to thread t. The partition depends only on the matrix and the
// number of threads, so the memory of a panel can be allocated on the NUMA node of its thread. (Other threads may read
// it too: they help a thread that is late.)
class PanelPartition {
   public:
    // Parts begin at multiples of a unit of panels: 8, with which kernels work best, or less (but at least `min_unit`,
    // a power of two) where that makes the largest part smaller.
    PanelPartition(int panels, int threads, int min_unit = 1) : panels_(panels), threads_(threads), unit_(min_unit) {
        for (int unit = kPreferredUnit; unit >= min_unit; unit /= 2) {
            if (unit == kPreferredUnit || longest_with(unit) < longest_with(unit_)) unit_ = unit;
        }
    }

    int panels() const { return panels_; }
    int threads() const { return threads_; }
    int unit() const { return unit_; }
    int begin(int thread) const {
        const int first = int(int64_t(units(unit_)) * thread / threads_) * unit_;
        return first < panels_ ? first : panels_;
    }
    // Panels of the largest part, up to a unit.
    int longest() const { return longest_with(unit_); }

    static constexpr int kPreferredUnit = 8;

   private:
    int units(int unit) const { return (panels_ + unit - 1) / unit; }
    int longest_with(int unit) const { return (units(unit) + threads_ - 1) / threads_ * unit; }

    const int panels_, threads_;
    int unit_;
};

}  // namespace neso
