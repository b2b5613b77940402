// The CPU's hint that the thread spins.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace neso {

inline void pause_cpu() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until done(), with `num_spins` pauses. Returns whether it is done.
template <typename Done>
bool spin(int num_spins, const Done& done) {
    for (int i = 0; i < num_spins; ++i) {
        if (done()) return true;
        pause_cpu();
    }
    return false;
}

}  // namespace neso
