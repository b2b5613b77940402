// Sums over the ranks of a tensor-parallel group, inside a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "threads/thread_team.h"

namespace neso {

class AllReduce {
   public:
    virtual ~AllReduce() = default;
    // Called by all threads of a team: replace values[count] by their sum over the ranks. The sums have the same bits on
    // all ranks. Blocks until all ranks call it.
    virtual void sum(ThreadTeam& team, float* values, int64_t count) = 0;
};

// Ranks on one host with a shared memory segment each.
//
//   segment    [64 bytes: number of published pieces][piece 0][piece 1]
//
// A piece is copied to the rank's segment, published, and summed by every rank in the order of the ranks. Pieces alternate
// between two places: a rank that publishes piece n has read piece n - 1, so piece n + 1 can overwrite piece n - 1 as soon
// as piece n of all ranks is published.
class SharedAllReduce : public AllReduce {
   public:
    // `segments`: of all ranks, at least segment_bytes(piece) each, zeroed; `piece`: floats per piece.
    SharedAllReduce(std::vector<char*> segments, int rank, int64_t piece);

    static int64_t segment_bytes(int64_t piece) { return kHeader + 2 * piece * int64_t(sizeof(float)); }
    void sum(ThreadTeam& team, float* values, int64_t count) override;

   private:
    static constexpr int64_t kHeader = 64;

    std::atomic<uint32_t>& published(int rank) const {
        return *reinterpret_cast<std::atomic<uint32_t>*>(segments_[rank]);
    }
    float* place(int rank, uint32_t number) const {
        return reinterpret_cast<float*>(segments_[rank] + kHeader) + (number & 1) * piece_;
    }
    void exchange(uint32_t number) const;
    void add(uint32_t number, float* values, int64_t begin, int64_t end) const;

    const std::vector<char*> segments_;
    const int rank_;
    const int64_t piece_;
    std::atomic<uint32_t> next_{0};  // number of the next piece
};

// Ranks on several hosts: MPI_Allreduce of the library that mpi4py uses. Handles are passed as the library represents them:
// integers (MPICH) or pointers (Open MPI).
class MpiAllReduce : public AllReduce {
   public:
    using Function = int (*)(const void* send, void* receive, int count, intptr_t type, intptr_t operation, intptr_t group);

    MpiAllReduce(Function function, intptr_t in_place, intptr_t type, intptr_t operation, intptr_t group)
        : function_(function), in_place_(reinterpret_cast<const void*>(in_place)), type_(type), operation_(operation),
          group_(group) {}

    // Ends the process if MPI reports an error, because the other ranks cannot continue.
    void sum(ThreadTeam& team, float* values, int64_t count) override;

   private:
    const Function function_;
    const void* const in_place_;
    const intptr_t type_, operation_, group_;
};

}  // namespace neso
