// A team of threads that execute the same code (single program, multiple data).
//
// An engine step is one call of `run`: every thread iterates over all layers, executes its part of each loop
// (`for_each`), and continues when the loop is finished. A step costs one wake-up instead of one per operation.
//
// Each thread is assigned contiguous chunks and takes them one by one, so its memory reads are one stream that can be
// prefetched. A thread that has finished its own chunks steals chunks of other threads. A loop is finished when all its
// chunks are finished. So a thread that is preempted or not yet awake delays only the chunk that it is executing: the
// other threads finish the loops without it, and it skips these loops when it continues. Code between loops may
// therefore run late: it must read only atomics and data that no loop writes.
//
// A cache line that N threads write one after the other costs N transfers between cores. So that a loop costs about
// 8 + N / 8 transfers, threads are in groups of 8 neighbours: they count their finished chunks on a line of their
// group, and the first thread of each group wakes the others.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "threads/affinity.h"

namespace neso {

class ThreadTeam {
   public:
    // A loop, seen by the caller of `run`. share: part of the work that the busiest thread is assigned.
    struct LoopTime {
        double share;
        bool is_product;
        double seconds;
    };

    // `num_threads` includes the caller of `run`, which is bound to its CPUs only within `run`. Throws
    // std::invalid_argument if `cpus` has another number of threads.
    explicit ThreadTeam(int num_threads, CpuSets cpus = {});
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Call work(thread) on all available threads; the caller is thread 0. Returns when all loops are finished and no
    // thread is inside `work`. Not reentrant. `work` must not throw, and all its effects must be inside loops.
    void run(const std::function<void(int)>& work);

    // Append the time of each loop; null: stop. Call between calls of `run`; the caller owns the vector.
    void record(std::vector<LoopTime>* times) { times_ = times; }

    // Inside `run`, called by all threads: execute chunks 0 to count - 1 together; returns when all are finished.
    // Thread t is assigned the chunks from count * t / size on. `product_share`: if this is a matrix product, the part of
    // it that the busiest thread is assigned (only for `record`).
    template <typename Work>
    void for_each(int count, const Work& work, double product_share = 0) {
        if (times_ == nullptr || current_thread_ != 0) {
            execute(count, work);
            return;
        }
        const auto begin = std::chrono::steady_clock::now();
        execute(count, work);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
        const double share = double((count + num_threads_ - 1) / num_threads_) / std::max(count, 1);
        times_->push_back({product_share > 0 ? product_share : share, product_share > 0, taken.count()});
    }

   private:
    // A thread's part of a loop: the number of the last loop that someone took a chunk of, and how many chunks are taken.
    // Nobody opens it: the first thread that takes a chunk does. On separate cache lines, since they are written often.
    class alignas(64) ChunkQueue {
       public:
        // The next of `size` chunks; -1 if all are taken or the loop is finished.
        int take(uint64_t loop, int size) {
            uint64_t state = state_.load(std::memory_order_acquire);
            while (state >> kCountBits <= loop) {
                const uint64_t taken = state >> kCountBits == loop ? state & kCountMask : 0;
                if (int(taken) >= size) return -1;
                if (state_.compare_exchange_weak(state, loop << kCountBits | (taken + 1), std::memory_order_acq_rel)) {
                    return int(taken);
                }
            }
            return -1;
        }

       private:
        // 2^40 loops take a year, at 30,000 per second.
        static constexpr int kCountBits = 24;
        static constexpr uint64_t kCountMask = (1 << kCountBits) - 1;
        std::atomic<uint64_t> state_{uint64_t(0)};
    };

    struct alignas(64) Group {
        std::atomic<int> done{0};                   // finished chunks of the open loop
        alignas(64) std::atomic<uint32_t> call{0};  // as call_; threads of the group except the first wait for it
    };

    static constexpr uint32_t kOpen = 1u << 31;
    static constexpr int kGroupThreads = 8;

    template <typename Work>
    void execute(int count, const Work& work) {
        if (num_threads_ == 1) {
            for (int chunk = 0; chunk < count; ++chunk) work(chunk);
            return;
        }
        const uint64_t loop = current_loop_++;
        // If the loop is still open now, `count` is not from later (loops store such values with memory_order_release). A
        // finished loop has no chunks for a late thread.
        std::atomic_thread_fence(std::memory_order_acquire);
        if (is_finished(loop)) return;
        const int chunks = std::max(count, 1);  // the thread that finishes the last chunk opens the next loop
        for (int turn = 0; turn < num_threads_; ++turn) {
            const int owner = (current_thread_ + turn) % num_threads_;
            const int begin = first_chunk(chunks, owner), size = first_chunk(chunks, owner + 1) - begin;
            int done = 0;
            for (int taken; (taken = queues_[owner].take(loop, size)) >= 0; ++done) {
                if (begin + taken < count) work(begin + taken);
            }
            if (done) report(loop, owner / kGroupThreads, done, chunks);
            if (turn == 0 && others_finish(loop)) return;
        }
        wait_for_end(loop);
    }

    int first_chunk(int chunks, int thread) const { return int(int64_t(chunks) * thread / num_threads_); }
    int chunks_of(int group, int chunks) const {
        return first_chunk(chunks, std::min((group + 1) * kGroupThreads, num_threads_)) -
               first_chunk(chunks, group * kGroupThreads);
    }

    void report(uint64_t loop, int group, int done, int chunks);
    bool is_finished(uint64_t loop) const { return loop_.load(std::memory_order_acquire) != uint32_t(loop); }
    bool others_finish(uint64_t loop) const;
    void wait_for_end(uint64_t loop) const;
    void worker_loop(int thread);
    void wake(uint32_t call);

    static thread_local int current_thread_;
    static thread_local uint64_t current_loop_;

    const int num_threads_;
    const CpuSets cpus_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<LoopTime>* times_ = nullptr;
    std::vector<ChunkQueue> queues_;
    std::vector<Group> groups_;
    uint64_t first_loop_ = 1;                          // number of the first loop of the call
    alignas(64) std::atomic<int> finished_groups_{0};  // of the open loop
    alignas(64) std::atomic<uint32_t> loop_{1};        // number of the open loop, modulo 2^32
    alignas(64) std::atomic<uint32_t> call_{0};        // counts calls of run
    alignas(64) std::atomic<uint32_t> inside_{0};      // workers inside `work`; the bit kOpen: entering is allowed
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace neso
