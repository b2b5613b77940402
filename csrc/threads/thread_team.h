// A team of threads that walk the same code together (single program, multiple data).
//
// A step of the engine is one call of `run`: every thread goes through all layers, takes its share of each loop
// (`for_each`), and waits for the others at the end of it. So a step costs one wake-up, not one for each operation.
//
// A thread's share are neighbours, which it takes one by one: what it reads from memory is one stream, that can be
// fetched ahead. Who is through with its own helps the others, so that a thread that the operating system took off its
// core holds up only the chunk that it has.
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
        for (int turn = 0; turn < num_threads_; ++turn) {
            const int owner = (current_thread_ + turn) % num_threads_;
            const int begin = int(int64_t(count) * owner / num_threads_);
            const int end = int(int64_t(count) * (owner + 1) / num_threads_);
            std::atomic<int>& taken = shares_[owner].taken;
            while (begin + taken.load(std::memory_order_relaxed) < end) {
                const int chunk = begin + taken.fetch_add(1, std::memory_order_relaxed);
                if (chunk < end) work(chunk);
            }
        }
        barrier();
    }

    // Inside `run`, by all threads: wait for each other.
    void barrier();

   private:
    // Apart from each other, as these are written all the time.
    struct alignas(64) Share {
        std::atomic<int> taken{0};
    };

    void serve(int thread);

    static thread_local int current_thread_;

    const int num_threads_;
    const std::function<void(int)>* work_ = nullptr;
    std::vector<Share> shares_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};  // counts barriers passed
    alignas(64) std::atomic<uint32_t> call_{0};   // counts calls of run
    std::atomic<bool> closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace neso
