// Binds threads to CPUs, and memory to NUMA nodes. On systems other than Linux, these functions do nothing.
#pragma once

#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace neso {

// The logical CPUs of each thread; empty: threads are not bound.
using CpuSets = std::vector<std::vector<int>>;

// Bind the calling thread. Ignored if none of the CPUs is available any more, such as after a change of the cpuset.
void bind_thread(const std::vector<int>& cpus);

// Binds the calling thread, and undoes it at the end of the scope. Threads that it starts afterwards are not bound.
class BoundScope {
   public:
    explicit BoundScope(const std::vector<int>* cpus);  // null: does nothing
    ~BoundScope();
    BoundScope(const BoundScope&) = delete;
    BoundScope& operator=(const BoundScope&) = delete;

   private:
#if defined(__linux__)
    bool bound_ = false;
    cpu_set_t before_;
#endif
};

// Spread the pages of memory that is not yet allocated over NUMA nodes. Returns whether the system did it.
bool interleave(void* memory, int64_t bytes, const std::vector<int>& nodes);

}  // namespace neso
