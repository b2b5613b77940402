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
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace neso {

class ThreadTeam {
   public:
    // `num_threads` includes the caller of `run`.
    explicit ThreadTeam(int num_threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Call work(thread) on all available threads; the caller is thread 0. Returns when all loops are finished and no
    // thread is inside `work`. Not reentrant. `work` must not throw, and all its effects must be inside loops.
    void run(const std::function<void(int)>& work);

    // Inside `run`, called by all threads: execute chunks 0 to count - 1 together; returns when all are finished.
    template <typename Work>
    void for_each(int count, const Work& work) {
        if (num_threads_ == 1) {
            for (int chunk = 0; chunk < count; ++chunk) work(chunk);
            return;
        }
        const uint32_t loop = current_loop_++;
        const int chunks = std::max(count, 1);  // the thread that finishes the last chunk opens the next loop
        int done = 0;
        for (int turn = 0; turn < num_threads_; ++turn) {
            const int owner = (current_thread_ + turn) % num_threads_;
            const int begin = int(int64_t(chunks) * owner / num_threads_);
            const int end = int(int64_t(chunks) * (owner + 1) / num_threads_);
            for (int taken; (taken = queues_[owner].take(loop, end - begin)) >= 0; ++done) {
                if (begin + taken < count) work(begin + taken);
            }
        }
        finish(loop, done, chunks);
    }

   private:
    // A thread's part of the open loop: the loop's number, and how many of its chunks are taken. On separate cache lines,
    // since they are written often.
    class alignas(64) ChunkQueue {
       public:
        void open(uint32_t loop) { state_.store(uint64_t(loop) << 32, std::memory_order_release); }

        // The next of `size` chunks; -1 if all are taken or the loop is finished.
        int take(uint32_t loop, int size) {
            uint64_t state = state_.load(std::memory_order_acquire);
            while (state >> 32 == loop && int(uint32_t(state)) < size) {
                if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) return int(uint32_t(state));
            }
            return -1;
        }

       private:
        std::atomic<uint64_t> state_{0};
    };

    static constexpr uint32_t kOpen = 1u << 31;

    void open(uint32_t loop);
    void finish(uint32_t loop, int done, int chunks);
    void worker_loop(int thread);

    static thread_local int current_thread_;
    static thread_local uint32_t current_loop_;

    const int num_threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<ChunkQueue> queues_;
    alignas(64) std::atomic<int> done_{0};         // finished chunks of the open loop
    alignas(64) std::atomic<uint32_t> loop_{0};    // number of the open loop, from 0 in each call of run
    alignas(64) std::atomic<uint32_t> call_{0};    // counts calls of run
    alignas(64) std::atomic<uint32_t> inside_{0};  // workers inside `work`; the bit kOpen: entering is allowed
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace neso
