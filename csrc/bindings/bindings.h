// Declarations shared by the parts of the extension module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/kernels.h"
#include "model/adapter.h"

namespace neso {

namespace nb = nanobind;

template <typename T, int Dims = 1>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dims = 1>
using MutableArray = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// A packed matrix, and the arrays that own its memory.
struct OwnedMatrix {
    Matrix matrix;
    Array<uint8_t> data;
    std::optional<Array<uint16_t>> scales, offsets;
    std::optional<Array<int32_t>> input_order;
    std::optional<Array<float>> bias;
};

// An adapter, and the arrays that own its memory.
struct OwnedAdapter {
    Adapter adapter;
    std::vector<Array<uint8_t>> arrays;
    std::vector<Array<float>> scales;
};

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

WeightKind weight_kind(const std::string& name);
Activation activation_named(const std::string& name);

void bind_adapter(nb::module_& m);
void bind_isa(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_encoder(nb::module_& m);
void bind_parallel(nb::module_& m);
void bind_threads(nb::module_& m);

}  // namespace neso
