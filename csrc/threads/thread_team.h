// A team of threads that walk the same code together (single program, multiple data).
//
// A step of the engine is one call of `run`: every thread goes through all layers, takes its share of each loop
// (`for_each`), and goes on when the loop is done. So a step costs one wake-up, not one for each operation.
//
// A thread's share are neighbours, which it takes one by one: what it reads from memory is one stream, that can be
// fetched ahead. Who is through with its own helps the others, and a loop is done when its chunks are, whoever did them:
// a thread that the operating system took off its core, or has not woken yet, holds up only the chunk that it has. The
// others do the loops without it, and it walks through these when it comes back. So what is between the loops may run
// late: it must read only what no loop writes, or atomics.
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
    // `num_threads` with the caller of `run`.
    explicit ThreadTeam(int num_threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Call work(thread), as thread 0, beside the others that come in time; returns when its loops are done and nobody is
    // in it. Not reentrant. `work` must not throw, and all that it does must be in loops.
    void run(const std::function<void(int)>& work);

    // Inside `run`, by all threads: do chunks 0 to count - 1 together; returns when they are done.
    template <typename Work>
    void for_each(int count, const Work& work) {
        if (num_threads_ == 1) {
            for (int chunk = 0; chunk < count; ++chunk) work(chunk);
            return;
        }
        const uint32_t loop = current_loop_++;
        const int chunks = std::max(count, 1);  // who does the last one opens the next loop
        int done = 0;
        for (int turn = 0; turn < num_threads_; ++turn) {
            const int owner = (current_thread_ + turn) % num_threads_;
            const int begin = int(int64_t(chunks) * owner / num_threads_);
            const int end = int(int64_t(chunks) * (owner + 1) / num_threads_);
            for (int taken; (taken = shares_[owner].take(loop, end - begin)) >= 0; ++done) {
                if (begin + taken < count) work(begin + taken);
            }
        }
        finish(loop, done, chunks);
    }

   private:
    // A thread's share of the open loop: that loop's number, and how many chunks of it are taken. Apart from each other, as
    // these are written all the time.
    class alignas(64) Share {
       public:
        void open(uint32_t loop) { state_.store(uint64_t(loop) << 32, std::memory_order_release); }

        // The next of `size` chunks; -1 if all are taken, or the loop is done.
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
    void serve(int thread);

    static thread_local int current_thread_;
    static thread_local uint32_t current_loop_;

    const int num_threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<Share> shares_;
    alignas(64) std::atomic<int> done_{0};         // chunks of the open loop
    alignas(64) std::atomic<uint32_t> loop_{0};    // the open loop; from 0 on in each call of run
    alignas(64) std::atomic<uint32_t> call_{0};    // counts calls of run
    alignas(64) std::atomic<uint32_t> inside_{0};  // workers in `work` or at its door, which kOpen says is open
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace neso
