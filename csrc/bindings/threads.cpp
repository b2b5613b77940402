// Bindings of the thread team, for tests.
#include <thread>

#include "bindings/bindings.h"
#include "threads/thread_team.h"

namespace neso {
namespace {

// Returns how often each chunk of loops with `counts` chunks was executed in `calls` calls, concatenated over loops.
// After each loop, a loop of one chunk sets the number of chunks of the next loop. `alone`: the other threads may enter
// the loops only after the caller has finished them.
std::vector<int> count_chunks(const std::vector<int>& counts, int threads, int calls, bool alone) {
    require(threads > 0, "there must be a thread");
    std::vector<size_t> first_of(1, 0);
    for (int count : counts) first_of.push_back(first_of.back() + size_t(count));
    std::vector<int> done(first_of.back());
    nb::gil_scoped_release release;
    ThreadTeam team(threads);
    for (int call = 0; call < calls; ++call) {
        std::atomic<int> count{counts.empty() ? 0 : counts[0]};
        std::atomic<bool> finished{!alone};
        team.run([&](int thread) {
            while (thread && !finished.load()) std::this_thread::yield();
            for (size_t loop = 0; loop < counts.size(); ++loop) {
                team.for_each(count.load(), [&](int chunk) { ++done[first_of[loop] + chunk]; });
                team.for_each(1, [&](int) { count.store(loop + 1 < counts.size() ? counts[loop + 1] : 0); });
            }
            finished.store(true);
        });
    }
    return done;
}

}  // namespace

void bind_threads(nb::module_& m) {
    m.def("count_chunks", &count_chunks, nb::arg("counts"), nb::arg("threads"), nb::arg("calls") = 1,
          nb::arg("alone") = false,
          "How often a team of threads executes each chunk of loops with these counts; `alone`: the other threads enter the "
          "loops only after the caller has finished them.");
}

}  // namespace neso
