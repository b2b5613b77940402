#include "bindings/bindings.h"
#include "model/pack.h"
#include "model/quantize.h"

namespace neso {
namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

int64_t size_of(const std::optional<Array<uint16_t>>& array) { return array ? int64_t(array->size()) : 0; }

OwnedMatrix make_matrix(const std::string& kind, int outputs, int inputs, Array<uint8_t> data,
                        std::optional<Array<uint16_t>> scales, std::optional<Array<uint16_t>> offsets, int group_size,
                        float scale_factor, bool dynamic, std::optional<Array<int32_t>> input_order,
                        std::optional<Array<float>> bias) {
    OwnedMatrix owned{Matrix{}, data, scales, offsets, input_order, bias};
    Matrix& matrix = owned.matrix;
    matrix.kind = weight_kind(kind);
    matrix.outputs = outputs;
    matrix.inputs = inputs;
    matrix.depth = int(round_up(inputs, kDepthAlign));
    matrix.panels = int(round_up(outputs, kPanel) / kPanel);
    require(outputs > 0 && inputs > 0, "a matrix must have outputs and inputs");
    require(int64_t(data.size()) == matrix.panels * matrix.panel_bytes(),
            "packed data must have " + std::to_string(matrix.panels * matrix.panel_bytes()) + " bytes, not " +
                std::to_string(data.size()));
    matrix.data = data.data();
    if (matrix.quantized()) {
        require(group_size > 0 && group_size % kGroup == 0, "group_size must be a multiple of 32");
        matrix.group_size = group_size;
        matrix.groups = (inputs + group_size - 1) / group_size;
        // The last group includes the padding of the inputs.
        require(int64_t(matrix.groups) * group_size >= matrix.depth, "group_size must cover the padded inputs");
        const int64_t count = int64_t(matrix.panels) * matrix.groups * kPanel;
        require(size_of(scales) == count, "scales must have " + std::to_string(count) + " values");
        require(!offsets || size_of(offsets) == count, "offsets must have as many values as scales");
        matrix.scales = reinterpret_cast<const f16*>(scales->data());
        matrix.offsets = offsets ? reinterpret_cast<const f16*>(offsets->data()) : nullptr;
        matrix.scale_factor = scale_factor;
        matrix.dynamic = dynamic;
    }
    require(!input_order || int(input_order->size()) == inputs, "input_order must name every input");
    require(!bias || int(bias->size()) == outputs, "bias must have a value for every output");
    matrix.input_order = input_order ? input_order->data() : nullptr;
    matrix.bias = bias ? bias->data() : nullptr;
    return owned;
}

}  // namespace

WeightKind weight_kind(const std::string& name) {
    if (name == "f32") return WeightKind::f32;
    if (name == "f16") return WeightKind::f16;
    if (name == "bf16") return WeightKind::bf16;
    if (name == "int8") return WeightKind::int8;
    if (name == "int4") return WeightKind::int4;
    throw std::invalid_argument("unknown weight kind '" + name + "', known are f32, f16, bf16, int8, int4");
}

void bind_matrix(nb::module_& m) {
    nb::class_<OwnedMatrix>(m, "Matrix", "A packed weight matrix [outputs, inputs]; keeps its arrays alive.")
        .def("__init__",
             [](OwnedMatrix* self, const std::string& kind, int outputs, int inputs, Array<uint8_t> data,
                std::optional<Array<uint16_t>> scales, std::optional<Array<uint16_t>> offsets, int group_size,
                float scale_factor, bool dynamic, std::optional<Array<int32_t>> input_order,
                std::optional<Array<float>> bias) {
                 new (self) OwnedMatrix(make_matrix(kind, outputs, inputs, data, scales, offsets, group_size,
                                                    scale_factor, dynamic, input_order, bias));
             },
             nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), nb::arg("data"), nb::arg("scales").none() = nb::none(),
             nb::arg("offsets").none() = nb::none(), nb::arg("group_size") = 0, nb::arg("scale_factor") = 1.0f,
             nb::arg("dynamic") = false, nb::arg("input_order").none() = nb::none(),
             nb::arg("bias").none() = nb::none());

    m.def(
        "packed_bytes",
        [](const std::string& kind, int outputs, int inputs) {
            Matrix matrix;
            matrix.kind = weight_kind(kind);
            matrix.depth = int(round_up(inputs, kDepthAlign));
            return round_up(outputs, kPanel) / kPanel * matrix.panel_bytes();
        },
        nb::arg("kind"), nb::arg("outputs"), nb::arg("inputs"), "Bytes of a packed matrix [outputs, inputs].");

    // The source is passed as bytes: it may be unaligned, and numpy has no bfloat16.
    m.def(
        "pack_dense",
        [](const std::string& source_kind, Array<uint8_t> source, int inputs, const std::string& kind, int first_output,
           MutableArray<uint8_t> to, int threads) {
            const WeightKind from = weight_kind(source_kind);
            const int64_t row_bytes = int64_t(inputs) * (from == WeightKind::f32 ? 4 : 2);
            const int rows = int(int64_t(source.size()) / row_bytes);
            Matrix matrix;
            matrix.kind = weight_kind(kind);
            matrix.depth = int(round_up(inputs, kDepthAlign));
            require(round_up(first_output + rows, kPanel) / kPanel * matrix.panel_bytes() <= int64_t(to.size()),
                    "the packed matrix is too small for these rows");
            const void* data = source.data();
            void* target = to.data();
            nb::gil_scoped_release release;
            pack_dense(from, data, rows, inputs, matrix.kind, matrix.depth, first_output, target, threads);
        },
        nb::arg("source_kind"), nb::arg("source"), nb::arg("inputs"), nb::arg("kind"), nb::arg("first_output"),
        nb::arg("to"), nb::arg("threads"),
        "Pack rows of a dense matrix, given as bytes, into zeroed `to` from output `first_output` on.");

    m.def(
        "quantize",
        [](const std::string& source_kind, Array<uint8_t> source, int bits, int group_size,
           MutableArray<uint8_t, 2> codes, MutableArray<float, 2> scales, int threads) {
            const WeightKind kind = weight_kind(source_kind);
            const int rows = int(codes.shape(0)), inputs = int(codes.shape(1));
            require(int64_t(source.size()) == int64_t(rows) * inputs * (kind == WeightKind::f32 ? 4 : 2),
                    "source and codes must have the same shape");
            require(bits == 8 || bits == 4, "bits must be 8 or 4");
            require(group_size > 0 && int(scales.shape(0)) == rows &&
                        int(scales.shape(1)) == (inputs + group_size - 1) / group_size,
                    "scales must have one value for each row and group");
            const void* from = source.data();
            uint8_t* to = codes.data();
            float* scale = scales.data();
            nb::gil_scoped_release release;
            quantize(kind, from, rows, inputs, bits, group_size, to, scale, threads);
        },
        nb::arg("source_kind"), nb::arg("source"), nb::arg("bits"), nb::arg("group_size"), nb::arg("codes"),
        nb::arg("scales"), nb::arg("threads"),
        "Quantize a dense matrix, given as bytes, into codes uint8[rows, inputs] and scales float32[rows, groups].");

    m.def(
        "pack_codes",
        [](Array<uint8_t, 2> codes, const std::string& kind, int first_output, MutableArray<uint8_t> to, int threads) {
            Matrix matrix;
            matrix.kind = weight_kind(kind);
            const int rows = int(codes.shape(0)), inputs = int(codes.shape(1));
            matrix.depth = int(round_up(inputs, kDepthAlign));
            require(matrix.quantized(), "codes are packed as int8 or int4");
            require(round_up(first_output + rows, kPanel) / kPanel * matrix.panel_bytes() <= int64_t(to.size()),
                    "the packed matrix is too small for these rows");
            const uint8_t* data = codes.data();
            void* target = to.data();
            nb::gil_scoped_release release;
            pack_codes(data, rows, inputs, matrix.kind, matrix.depth, first_output, target, threads);
        },
        nb::arg("codes"), nb::arg("kind"), nb::arg("first_output"), nb::arg("to"), nb::arg("threads"),
        "Pack codes uint8[rows, inputs] into zeroed `to` from output `first_output` on.");
}

}  // namespace neso
