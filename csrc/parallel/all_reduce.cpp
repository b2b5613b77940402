#include "parallel/all_reduce.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "threads/spin.h"

namespace neso {
namespace {

using Clock = std::chrono::steady_clock;

// Floats that one thread copies and sums without the others.
constexpr int64_t kSmall = 16384;
// Then a waiting rank gives its core to others, which may be the rank that it waits for. After the longer time it sleeps,
// for a part of the time that it has waited, so that it does not delay the step much and a hanging rank costs little.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr auto kYieldTime = std::chrono::milliseconds(2);
constexpr auto kLongestSleep = std::chrono::milliseconds(1);
constexpr int kSleepPart = 32;
constexpr int kSpinsPerCheck = 32;

// Wait until `value` is at least `number`, modulo 2^32.
void wait_for(const std::atomic<uint32_t>& value, uint32_t number) {
    const auto reached = [&] { return int32_t(value.load(std::memory_order_acquire) - number) >= 0; };
    if (reached()) return;
    const auto begin = Clock::now();
    while (!spin(kSpinsPerCheck, reached)) {
        const auto waited = Clock::now() - begin;
        if (waited > kYieldTime) {
            std::this_thread::sleep_for(std::min<Clock::duration>(waited / kSleepPart, kLongestSleep));
        } else if (waited > kSpinTime) {
            std::this_thread::yield();
        }
    }
}

}  // namespace

SharedAllReduce::SharedAllReduce(std::vector<char*> segments, int rank, int64_t piece)
    : segments_(std::move(segments)), rank_(rank), piece_(piece) {}

void SharedAllReduce::sum(ThreadTeam& team, float* values, int64_t count) {
    if (count <= std::min(kSmall, piece_)) {
        team.for_each(1, [&](int) {
            if (!count) return;
            const uint32_t number = next_.fetch_add(1, std::memory_order_relaxed);
            std::memcpy(place(rank_, number), values, count * sizeof(float));
            exchange(number);
            add(number, values, 0, count);
        });
        return;
    }
    for (int64_t begin = 0; begin < count; begin += piece_) {
        const int64_t size = std::min(piece_, count - begin);
        const int chunks = int((size + kSmall - 1) / kSmall);
        const auto range = [size](int chunk) {
            return std::pair{chunk * kSmall, std::min(size, (chunk + 1) * kSmall)};
        };
        // next_ changes only in the loop in the middle, so all threads see the same number in the others.
        team.for_each(chunks, [&](int chunk) {
            const auto [first, last] = range(chunk);
            float* to = place(rank_, next_.load(std::memory_order_relaxed));
            std::memcpy(to + first, values + begin + first, (last - first) * sizeof(float));
        });
        team.for_each(1, [&](int) { exchange(next_.fetch_add(1, std::memory_order_relaxed)); });
        team.for_each(chunks, [&](int chunk) {
            const auto [first, last] = range(chunk);
            add(next_.load(std::memory_order_relaxed) - 1, values + begin, first, last);
        });
    }
}

// Publish piece `number`, and wait until it is published by all ranks.
void SharedAllReduce::exchange(uint32_t number) const {
    published(rank_).store(number + 1, std::memory_order_release);
    for (int rank = 0; rank < int(segments_.size()); ++rank) {
        if (rank != rank_) wait_for(published(rank), number + 1);
    }
}

// values[begin:end] = sum of the ranks' pieces.
void SharedAllReduce::add(uint32_t number, float* values, int64_t begin, int64_t end) const {
    const float *first = place(0, number), *second = place(1, number);
    for (int64_t i = begin; i < end; ++i) values[i] = first[i] + second[i];
    for (int rank = 2; rank < int(segments_.size()); ++rank) {
        const float* from = place(rank, number);
        for (int64_t i = begin; i < end; ++i) values[i] += from[i];
    }
}

void MpiAllReduce::sum(ThreadTeam& team, float* values, int64_t count) {
    constexpr int64_t kMaxCount = int64_t(1) << 30;  // MPI counts are int
    team.for_each(1, [&](int) {
        for (int64_t begin = 0; begin < count; begin += kMaxCount) {
            const int size = int(std::min(kMaxCount, count - begin));
            if (function_(in_place_, values + begin, size, type_, operation_, group_) != 0) {
                std::fprintf(stderr, "MPI_Allreduce failed\n");
                std::abort();
            }
        }
    });
}

}  // namespace neso
