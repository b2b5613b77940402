// A team of threads that walk the same code together (single program, multiple data).
//
// A step of the engine is one call of `run`: every thread goes through all layers, takes its share of each loop from
// a common counter (`for_each`), and waits for the others at the end of it. So a step costs one wake-up, not one for
// each operation, and a thread that the operating system took off its core holds up only the chunk that it has.
#pragma once

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

    // Have every thread call work(thread), the caller as thread 0; returns when all have. Not reentrant.
    // `work` must not throw.
    void run(const std::function<void(int)>& work);

    // Inside `run`, by all threads: share chunks 0 to count - 1 among them, then wait for each other.
    template <typename Work>
    void for_each(int count, const Work& work) {
        for (int chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed); chunk < count;
             chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed)) {
            work(chunk);
        }
        barrier();
    }

    // Inside `run`, by all threads: wait for each other.
    void barrier();

   private:
    void serve(int thread);

    const int num_threads_;
    const std::function<void(int)>* work_ = nullptr;
    // Apart from each other: these are written by all threads all the time.
    alignas(64) std::atomic<int> next_chunk_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};  // counts barriers passed
    alignas(64) std::atomic<uint32_t> call_{0};   // counts calls of run
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace neso
