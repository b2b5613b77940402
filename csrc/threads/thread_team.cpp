#include "threads/thread_team.h"

#include <stdexcept>
#include <utility>

#include "threads/spin.h"

namespace neso {
namespace {

using Clock = std::chrono::steady_clock;

// About the delay of the last chunk. Longer spinning takes CPU time from the server's threads: with 100 µs, the slowest
// 1 % of tokens took 20 % longer.
constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr int kSpinsPerCheck = 32;
// A team of this size looks for chunks of others at once.
constexpr int kSmallTeam = 4;

// Wait until done(value): spin for a while, then sleep.
template <typename Done>
void wait_until(const std::atomic<uint32_t>& value, const Done& done) {
    uint32_t seen = value.load(std::memory_order_acquire);
    if (done(seen)) return;
    const auto end = Clock::now() + kSpinTime;
    do {
        if (spin(kSpinsPerCheck, [&] { return done(value.load(std::memory_order_acquire)); })) return;
    } while (Clock::now() < end);
    while (!done(seen = value.load(std::memory_order_acquire))) value.wait(seen, std::memory_order_acquire);
}

}  // namespace

thread_local int ThreadTeam::current_thread_ = 0;
thread_local uint64_t ThreadTeam::current_loop_ = 0;

ThreadTeam::ThreadTeam(int num_threads, CpuSets cpus)
    : num_threads_(num_threads), cpus_(std::move(cpus)), queues_(num_threads),
      groups_((num_threads + kGroupThreads - 1) / kGroupThreads) {
    if (!cpus_.empty() && int(cpus_.size()) != num_threads) {
        throw std::invalid_argument("there must be a set of CPUs for each thread");
    }
    for (int thread = 1; thread < num_threads; ++thread) {
        workers_.emplace_back([this, thread] { worker_loop(thread); });
    }
}

ThreadTeam::~ThreadTeam() {
    closing_.store(true);
    wake(call_.load() + 1);
    // The first thread of a group may have seen closing_ before this call, and does not wake its group any more.
    for (Group& group : groups_) group.call.notify_all();
    for (auto& worker : workers_) worker.join();
}

// The caller wakes its own group and the first thread of each other group, which wakes its group.
// A value is stored with memory_order_seq_cst before it is notified: notify_all() first reads whether a thread waits, and
// with a weaker order this read may come before the store, so that a thread that begins to wait is not woken.
void ThreadTeam::wake(uint32_t call) {
    for (Group& group : groups_) group.call.store(call);
    call_.store(call);
    call_.notify_all();
    groups_[0].call.notify_all();
}

void ThreadTeam::run(const std::function<void(int)>& work) {
    const BoundScope bound(cpus_.empty() ? nullptr : &cpus_[0]);
    current_thread_ = 0;
    current_loop_ = first_loop_;
    if (num_threads_ == 1) {
        work(0);
        return;
    }
    work_ = &work;
    inside_.fetch_or(kOpen, std::memory_order_release);
    wake(call_.load(std::memory_order_relaxed) + 1);
    work(0);
    inside_.fetch_and(~kOpen, std::memory_order_acq_rel);
    wait_until(inside_, [](uint32_t inside) { return inside == 0; });  // no thread uses `work` after this function returns
    first_loop_ = current_loop_;
}

// `done` more chunks of a group's threads are finished. The last thread opens the next loop; then no thread executes a
// chunk, and the counters are those of the next loop.
void ThreadTeam::report(uint64_t loop, int group, int done, int chunks) {
    if (groups_[group].done.fetch_add(done, std::memory_order_acq_rel) + done < chunks_of(group, chunks)) return;
    groups_[group].done.store(0, std::memory_order_relaxed);
    const int groups = int(groups_.size());
    if (groups > 1) {
        int with_chunks = 0;
        for (int i = 0; i < groups; ++i) with_chunks += chunks_of(i, chunks) > 0;
        if (finished_groups_.fetch_add(1, std::memory_order_acq_rel) + 1 < with_chunks) return;
        finished_groups_.store(0, std::memory_order_relaxed);
    }
    loop_.store(uint32_t(loop + 1));  // see wake()
    loop_.notify_all();
}

// Looking for chunks reads a cache line per thread, which takes about as long as half as many pauses. In a large team, a
// thread first waits that long, since all threads usually finish together.
bool ThreadTeam::others_finish(uint64_t loop) const {
    return num_threads_ > kSmallTeam && spin(num_threads_ / 2, [&] { return is_finished(loop); });
}

void ThreadTeam::wait_for_end(uint64_t loop) const {
    wait_until(loop_, [loop](uint32_t open) { return open != uint32_t(loop); });
}

void ThreadTeam::worker_loop(int thread) {
    if (!cpus_.empty()) bind_thread(cpus_[thread]);
    Group& group = groups_[thread / kGroupThreads];
    const bool leads = thread % kGroupThreads == 0;
    const std::atomic<uint32_t>& calls = leads ? call_ : group.call;
    uint32_t call = 0;
    current_thread_ = thread;
    while (true) {
        wait_until(calls, [call](uint32_t now) { return now != call; });
        call = calls.load();
        if (leads) group.call.notify_all();
        if (closing_.load()) return;
        if (inside_.fetch_add(1, std::memory_order_acquire) & kOpen) {
            current_loop_ = first_loop_;
            (*work_)(thread);
        }
        if (inside_.fetch_sub(1) == 1) inside_.notify_all();
    }
}

}  // namespace neso
