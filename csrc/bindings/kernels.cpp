// Single kernels, for tests against numpy and for microbenchmarks.
#include <algorithm>
#include <vector>

#include "bindings/bindings.h"
#include "model/product.h"

namespace neso {
namespace {

// Multiplies x[rows, inputs] by each of the matrices, which have one shape and kind, `repeats` times. `result` holds
// the last product; returns its row stride.
int64_t run_products(const std::vector<const OwnedMatrix*>& matrices, const float* x, int rows, const Kernels& kernels,
                     int threads, int repeats, Buffer<float>& result) {
    const Matrix& first = matrices.front()->matrix;
    ThreadTeam team(threads);
    InputStorage storage;
    const int64_t stride = spread_stride(int64_t(first.outputs) * 4) / 4;
    result.reserve(rows * stride);
    const Input described = kernels.describe_input(first, rows);
    storage.reserve(described);
    const Input input = storage.attach(described);
    team.run([&](int) {
        for (int repeat = 0; repeat < repeats; ++repeat) {
            for (const OwnedMatrix* owned : matrices) {
                pack_rows(team, kernels, input, owned->matrix,
                          [&](int row, float*) { return x + int64_t(row) * first.inputs; });
                multiply(team, kernels, input, owned->matrix, result.data(), stride, false);
            }
        }
    });
    return stride;
}

// out[rows, outputs] = x[rows, inputs] . matrix, `repeats` times (to time it without Python overhead).
void matmul(const OwnedMatrix& owned, Array<float, 2> x, MutableArray<float, 2> out, const std::string& isa,
            int threads, int repeats) {
    const Matrix& matrix = owned.matrix;
    if (int(x.shape(1)) != matrix.inputs || int(out.shape(1)) != matrix.outputs || x.shape(0) != out.shape(0)) {
        throw std::invalid_argument("shapes of x, matrix and out do not match");
    }
    const Kernels& kernels = kernels_for(isa_from_name(isa));
    const int rows = int(x.shape(0));
    const float* from = x.data();
    float* to = out.data();
    nb::gil_scoped_release release;
    Buffer<float> result;
    const int64_t stride = run_products({&owned}, from, rows, kernels, threads, repeats, result);
    for (int row = 0; row < rows; ++row) {
        std::copy_n(result.data() + row * stride, matrix.outputs, to + int64_t(row) * matrix.outputs);
    }
}

// Multiplies x[rows, inputs] by each of the matrices, which have one shape and kind, `repeats` times, like the layers
// of a model. The results are discarded.
void multiply_each(const std::vector<const OwnedMatrix*>& matrices, Array<float, 2> x, const std::string& isa,
                   int threads, int repeats) {
    if (matrices.empty()) throw std::invalid_argument("matrices must not be empty");
    const Matrix& first = matrices.front()->matrix;
    for (const OwnedMatrix* owned : matrices) {
        const Matrix& matrix = owned->matrix;
        if (int(x.shape(1)) != matrix.inputs || matrix.outputs != first.outputs || matrix.kind != first.kind ||
            matrix.dynamic != first.dynamic || matrix.group_size != first.group_size) {
            throw std::invalid_argument("matrices must have one kind and shape, which matches x");
        }
    }
    const Kernels& kernels = kernels_for(isa_from_name(isa));
    const int rows = int(x.shape(0));
    const float* from = x.data();
    nb::gil_scoped_release release;
    Buffer<float> result;
    run_products(matrices, from, rows, kernels, threads, repeats, result);
}

// Sum of an array by all threads, to measure memory bandwidth.
double read_memory(Array<uint8_t> array, int threads, int repeats) {
    const uint8_t* data = array.data();
    const int64_t size = int64_t(array.size()) / 8;
    nb::gil_scoped_release release;
    ThreadTeam team(threads);
    std::atomic<uint64_t> total{0};
    constexpr int64_t kChunk = 1 << 17;
    team.run([&](int) {
        for (int repeat = 0; repeat < repeats; ++repeat) {
            team.for_each(int((size + kChunk - 1) / kChunk), [&](int chunk) {
                uint64_t sum = 0;
                const int64_t end = std::min(size, (chunk + 1) * kChunk);
                for (int64_t i = chunk * kChunk; i < end; ++i) {
                    uint64_t word;
                    std::memcpy(&word, data + i * 8, 8);
                    sum += word;
                }
                total += sum;
            });
        }
    });
    return double(total.load());
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def("matmul", &matmul, nb::arg("matrix"), nb::arg("x"), nb::arg("out"), nb::arg("isa"), nb::arg("threads") = 1,
          nb::arg("repeats") = 1, "out float32[rows, outputs] = x float32[rows, inputs] @ matrix.T + bias");
    m.def("multiply_each", &multiply_each, nb::arg("matrices"), nb::arg("x"), nb::arg("isa"), nb::arg("threads") = 1,
          nb::arg("repeats") = 1, "Multiply x float32[rows, inputs] with each matrix in turn; no result is kept.");
    m.def("read_memory", &read_memory, nb::arg("array"), nb::arg("threads"), nb::arg("repeats") = 1,
          "Read an array at full memory bandwidth; returns the sum of its words.");
    m.def(
        "rms_norm",
        [](Array<float> x, Array<float> weight, float eps, MutableArray<float> out, const std::string& isa) {
            kernels_for(isa_from_name(isa)).rms_norm(x.data(), weight.data(), eps, int(x.size()), out.data());
        },
        nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("isa"));
    m.def(
        "layer_norm",
        [](Array<float> x, Array<float> weight, std::optional<Array<float>> bias, float eps, MutableArray<float> out,
           const std::string& isa) {
            kernels_for(isa_from_name(isa))
                .layer_norm(x.data(), weight.data(), bias ? bias->data() : nullptr, eps, int(x.size()), out.data());
        },
        nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("eps"), nb::arg("out"), nb::arg("isa"));
    m.def(
        "activate",
        [](const std::string& activation, Array<float> x, MutableArray<float> out, const std::string& isa) {
            kernels_for(isa_from_name(isa))
                .activate(activation_named(activation), x.data(), int(out.size()), out.data());
        },
        nb::arg("activation"), nb::arg("x"), nb::arg("out"), nb::arg("isa"));
    m.def(
        "softcap",
        [](MutableArray<float> x, float cap, const std::string& isa) {
            kernels_for(isa_from_name(isa)).softcap(x.data(), int(x.size()), cap);
        },
        nb::arg("x"), nb::arg("cap"), nb::arg("isa"), "x = cap * tanh(x / cap), in place");
    m.def(
        "gated",
        [](const std::string& activation, Array<float> gate_up, MutableArray<float> out, const std::string& isa) {
            const auto kind = activation_named(activation);
            const int count = int(out.size());
            kernels_for(isa_from_name(isa)).gated(kind, gate_up.data(), gate_up.data() + count, count, out.data());
        },
        nb::arg("activation"), nb::arg("gate_up"), nb::arg("out"), nb::arg("isa"),
        "out = activation(first half of gate_up) * second half");
    m.def(
        "rotate",
        [](MutableArray<float> head, Array<float> cos, Array<float> sin, const std::string& isa) {
            kernels_for(isa_from_name(isa)).rotate(head.data(), cos.data(), sin.data(), int(cos.size()));
        },
        nb::arg("head"), nb::arg("cos"), nb::arg("sin"), nb::arg("isa"));
    m.def(
        "matrix_row",
        [](const OwnedMatrix& owned, int row, MutableArray<float> out, const std::string& isa) {
            kernels_for(isa_from_name(isa)).matrix_row(owned.matrix, row, out.data());
        },
        nb::arg("matrix"), nb::arg("row"), nb::arg("out"), nb::arg("isa"));
}

}  // namespace neso
