#include "bindings/bindings.h"
#include "parallel/all_reduce.h"

namespace neso {

void bind_parallel(nb::module_& m) {
    nb::class_<AllReduce>(m, "AllReduce", "Sums over the ranks of a tensor-parallel group.")
        .def(
            "sum",
            [](AllReduce& self, MutableArray<float> values) {
                float* data = values.data();
                const int64_t count = int64_t(values.size());
                nb::gil_scoped_release release;
                ThreadTeam team(1);
                self.sum(team, data, count);
            },
            nb::arg("values"), "Replace float32[n] by the sum over the ranks; all ranks must call it.");

    nb::class_<SharedAllReduce, AllReduce>(m, "SharedAllReduce", "Ranks on one host with a shared memory segment each.")
        .def("__init__",
             [](SharedAllReduce* self, const std::vector<MutableArray<uint8_t>>& segments, int rank, int64_t piece) {
                 require(segments.size() > 1 && rank >= 0 && rank < int(segments.size()),
                         "there must be two segments or more, and one of the rank");
                 require(piece > 0, "a piece must have a value");
                 std::vector<char*> pointers;
                 for (const auto& segment : segments) {
                     require(int64_t(segment.size()) >= SharedAllReduce::segment_bytes(piece), "a segment is too small");
                     require(reinterpret_cast<uintptr_t>(segment.data()) % 64 == 0, "a segment must be aligned");
                     pointers.push_back(reinterpret_cast<char*>(segment.data()));
                 }
                 new (self) SharedAllReduce(std::move(pointers), rank, piece);
             },
             nb::arg("segments"), nb::arg("rank"), nb::arg("piece"),
             "segments uint8[segment_bytes(piece)] of all ranks, zeroed and aligned to 64 bytes; the caller keeps them alive. "
             "piece: floats that are exchanged at once.")
        .def_static("segment_bytes", &SharedAllReduce::segment_bytes, nb::arg("piece"));

    nb::class_<MpiAllReduce, AllReduce>(m, "MpiAllReduce", "Ranks that communicate by MPI_Allreduce.")
        .def("__init__",
             [](MpiAllReduce* self, intptr_t function, intptr_t in_place, intptr_t type, intptr_t operation,
                intptr_t group) {
                 new (self) MpiAllReduce(reinterpret_cast<MpiAllReduce::Function>(function), in_place, type, operation, group);
             },
             nb::arg("function"), nb::arg("in_place"), nb::arg("type"), nb::arg("operation"), nb::arg("group"),
             "function: address of MPI_Allreduce; the others are its arguments as the library represents them.");
}

}  // namespace neso
