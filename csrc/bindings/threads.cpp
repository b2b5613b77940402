// Bindings of the thread team, for tests and benchmarks, and of the placement of memory on NUMA nodes.
#include <algorithm>
#include <thread>

#include "bindings/bindings.h"
#include "model/product.h"
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

// Seconds per loop of `loops` loops with a chunk per thread that does nothing.
double loop_seconds(int threads, int loops, const CpuSets& cpus) {
    require(threads > 0 && loops > 0, "there must be a thread and a loop");
    nb::gil_scoped_release release;
    ThreadTeam team(threads, cpus);
    const auto turn = [&](int count) {
        const auto begin = std::chrono::steady_clock::now();
        team.run([&](int) {
            for (int loop = 0; loop < count; ++loop) team.for_each(threads, [](int) {});
        });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    turn(1 + loops / 10);  // warm-up
    return turn(loops) / loops;
}

// The logical CPUs on which the threads of a team may run within `run`, by thread.
std::vector<std::vector<int>> bound_cpus([[maybe_unused]] int threads, [[maybe_unused]] const CpuSets& cpus) {
    std::vector<std::vector<int>> found(threads);
#if defined(__linux__)
    nb::gil_scoped_release release;
    ThreadTeam team(threads, cpus);
    std::atomic<int> arrived{0};
    team.run([&](int thread) {
        cpu_set_t set;
        sched_getaffinity(0, sizeof(set), &set);
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &set)) found[thread].push_back(cpu);
        }
        ++arrived;
        while (arrived.load() < threads) std::this_thread::yield();
    });
#endif
    return found;
}

// Write to each page of the panels of each thread, on that thread's CPUs.
void touch_panels(MutableArray<uint8_t> data, int panels, const CpuSets& cpus) {
    require(panels > 0 && !cpus.empty(), "there must be panels and threads");
    constexpr int64_t kPage = 4096;
    const int64_t panel_bytes = int64_t(data.size()) / panels;
    const PanelPartition partition(panels, int(cpus.size()));
    volatile uint8_t* bytes = data.data();
    nb::gil_scoped_release release;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < int(cpus.size()); ++thread) {
        const int64_t begin = partition.begin(thread) * panel_bytes, end = partition.begin(thread + 1) * panel_bytes;
        if (begin == end) continue;
        threads.emplace_back([bytes, begin, end, &mine = cpus[thread]] {
            bind_thread(mine);
            for (int64_t at = begin; at < end; at += kPage) bytes[at] = bytes[at];
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// Panels [first, last) and rows [first, last) of the chunks that each thread is assigned.
std::vector<std::vector<std::array<int, 4>>> chunks_by_thread(const std::string& kind, int outputs, int inputs, int rows,
                                                              int threads, const std::string& isa) {
    Matrix matrix;
    matrix.kind = weight_kind(kind);
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    matrix.depth = int(round_up(inputs, kDepthAlign));
    matrix.panels = int(round_up(outputs, kPanel)) / kPanel;
    const ProductChunks chunks(kernels_for(isa_from_name(isa)), matrix, rows, threads);
    std::vector<std::vector<std::array<int, 4>>> ranges(threads);
    for (int chunk = 0; chunk < chunks.count(); ++chunk) {
        const GemmRange range = chunks[chunk];
        if (range.empty()) continue;
        ranges[int64_t(chunk) * threads / chunks.count()].push_back(
            {range.first_panel, range.last_panel, range.first_row, range.last_row});
    }
    return ranges;
}

}  // namespace

void bind_threads(nb::module_& m) {
    m.def("count_chunks", &count_chunks, nb::arg("counts"), nb::arg("threads"), nb::arg("calls") = 1,
          nb::arg("alone") = false,
          "How often a team of threads executes each chunk of loops with these counts; `alone`: the other threads enter the "
          "loops only after the caller has finished them.");
    m.def("loop_seconds", &loop_seconds, nb::arg("threads"), nb::arg("loops"), nb::arg("cpus") = CpuSets(),
          "Seconds of a loop of a team of threads that does nothing: the cost of a barrier.");
    m.def("bound_cpus", &bound_cpus, nb::arg("threads"), nb::arg("cpus"),
          "The logical CPUs that each thread of a team may run on within a call.");
    m.def("touch_panels", &touch_panels, nb::arg("data"), nb::arg("panels"), nb::arg("cpus"),
          "Let each thread allocate the pages of the panels that it will multiply; `data`: the packed matrix, untouched.");
    m.def(
        "panel_owners",
        [](int panels, int threads) {
            require(panels > 0 && threads > 0, "there must be panels and threads");
            const PanelPartition partition(panels, threads);
            std::vector<int> owners;
            for (int thread = 0; thread < threads; ++thread) {
                owners.resize(partition.begin(thread + 1), thread);
            }
            return owners;
        },
        nb::arg("panels"), nb::arg("threads"), "The thread that each panel of a matrix belongs to.");
    m.def("chunks_by_thread", &chunks_by_thread, nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("rows"),
          nb::arg("threads"), nb::arg("isa"),
          "By thread: (first panel, last panel, first row, last row) of its chunks of a product; ends are exclusive.");
    m.def(
        "interleave",
        [](MutableArray<uint8_t> memory, const std::vector<int>& nodes) {
            return interleave(memory.data(), int64_t(memory.size()), nodes);
        },
        nb::arg("memory"), nb::arg("nodes"),
        "Spread the untouched pages of an array over NUMA nodes; returns whether the system supports it.");
}

}  // namespace neso
