#include "threads/affinity.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace neso {

#if defined(__linux__)

namespace {

bool set_affinity(const std::vector<int>& cpus) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) {
        if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
    }
    return sched_setaffinity(0, sizeof(set), &set) == 0;
}

}  // namespace

void bind_thread(const std::vector<int>& cpus) { set_affinity(cpus); }

BoundScope::BoundScope(const std::vector<int>* cpus) {
    if (!cpus || sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    bound_ = set_affinity(*cpus);
}

BoundScope::~BoundScope() {
    if (bound_) sched_setaffinity(0, sizeof(before_), &before_);
}

bool interleave(void* memory, int64_t bytes, const std::vector<int>& nodes) {
    constexpr int kInterleave = 3, kMaxNodes = 1024, kBits = 8 * sizeof(unsigned long);  // MPOL_INTERLEAVE
    unsigned long mask[kMaxNodes / kBits] = {};
    for (int node : nodes) {
        if (node >= 0 && node < kMaxNodes) mask[node / kBits] |= 1ul << (node % kBits);
    }
    // The range must begin at a page.
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes);
    return begin >= end || syscall(SYS_mbind, begin, end - begin, kInterleave, mask, kMaxNodes, 0) == 0;
}

#else

void bind_thread(const std::vector<int>&) {}
BoundScope::BoundScope(const std::vector<int>*) {}
BoundScope::~BoundScope() {}
bool interleave(void*, int64_t, const std::vector<int>&) { return false; }

#endif

}  // namespace neso
