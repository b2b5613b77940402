#include "model/encoder.h"

#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"

namespace neso {
namespace {

// A layer as passed from Python.
struct OwnedEncoderLayer {
    std::optional<Array<float, 2>> attention_norm;  // weight, and bias if there is one
    const OwnedMatrix* qkv;
    const OwnedMatrix* output;
    Array<float, 2> mlp_norm;
    const OwnedMatrix* gate;
    const OwnedMatrix* up;
    const OwnedMatrix* down;
    int reach, rotary;

    EncoderLayer layer() const {
        return {attention_norm ? norm(*attention_norm) : Norm{},
                qkv->matrix,
                output->matrix,
                norm(mlp_norm),
                {gate ? gate->matrix : Matrix{}, up->matrix, down->matrix},
                reach,
                rotary};
    }
    static Norm norm(const Array<float, 2>& rows) {
        return {rows.data(), rows.shape(0) > 1 ? rows.data() + rows.shape(1) : nullptr};
    }
};

}  // namespace

void bind_encoder(nb::module_& m) {
    nb::class_<OwnedEncoderLayer>(m, "EncoderLayer", "The weights of one encoder layer; norms are [1 or 2, hidden].")
        .def("__init__",
             [](OwnedEncoderLayer* self, std::optional<Array<float, 2>> attention_norm, const OwnedMatrix& qkv,
                const OwnedMatrix& output, Array<float, 2> mlp_norm, const OwnedMatrix* gate, const OwnedMatrix& up,
                const OwnedMatrix& down, int reach, int rotary) {
                 new (self) OwnedEncoderLayer{attention_norm, &qkv, &output, mlp_norm, gate, &up, &down, reach, rotary};
             },
             nb::arg("attention_norm").none(), nb::arg("qkv"), nb::arg("output"), nb::arg("mlp_norm"),
             nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::arg("reach") = -1, nb::arg("rotary") = -1,
             nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
             nb::keep_alive<1, 8>());

    nb::class_<Encoder>(m, "Encoder", "Executes a stack of encoder layers, which the caller must keep alive.")
        .def("__init__",
             [](Encoder* self, int hidden_size, int intermediate_size, int heads, int head_dim, float norm_eps,
                float attention_scale, const std::string& activation, bool norm_first, nb::list layers,
                const std::string& cache_kind, const std::string& isa, int threads, const CpuSets& cpus) {
                 const EncoderShape shape{hidden_size,     intermediate_size,            heads,     head_dim, norm_eps,
                                          attention_scale, activation_named(activation), norm_first};
                 std::vector<EncoderLayer> weights;
                 for (nb::handle layer : layers) {
                     weights.push_back(nb::cast<const OwnedEncoderLayer&>(layer).layer());
                 }
                 const CacheKind kind = cache_kind == "f32" ? CacheKind::f32 : CacheKind::bf16;
                 new (self) Encoder(shape, std::move(weights), kind, isa_from_name(isa), threads, cpus);
             },
             nb::kw_only(), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("heads"), nb::arg("head_dim"),
             nb::arg("norm_eps"), nb::arg("attention_scale"), nb::arg("activation"), nb::arg("norm_first"),
             nb::arg("layers"), nb::arg("cache_kind"), nb::arg("isa"), nb::arg("threads"),
             nb::arg("cpus") = CpuSets())
        .def(
            "run",
            [](Encoder& self, MutableArray<float, 2> x, Array<int32_t> starts,
               const std::vector<std::pair<Array<float, 2>, Array<float, 2>>>& rotary) {
                const int count = int(starts.size()) - 1;
                const int32_t* from = starts.data();
                bool ascending = count > 0 && from[0] == 0 && from[count] == int(x.shape(0));
                for (int i = 0; ascending && i < count; ++i) ascending = from[i] < from[i + 1];
                if (!ascending) throw std::invalid_argument("starts must ascend from 0 to the number of rows");
                if (int(x.shape(1)) != self.hidden_size()) {
                    throw std::invalid_argument("rows must have hidden_size values");
                }
                std::vector<RotaryRows> rotations;
                for (const auto& [cos, sin] : rotary) {
                    if (cos.shape(0) != x.shape(0) || sin.shape(0) != cos.shape(0) || sin.shape(1) != cos.shape(1)) {
                        throw std::invalid_argument("a rotation must have cosines and sines for each token");
                    }
                    rotations.push_back({cos.data(), sin.data(), int(cos.shape(1))});
                }
                if (int(rotations.size()) < self.num_rotations()) {
                    throw std::invalid_argument("there must be rows of each rotation that layers have");
                }
                float* rows = x.data();
                nb::gil_scoped_release release;
                self.run(rows, from, count, rotations);
            },
            nb::arg("x"), nb::arg("starts"), nb::arg("rotary"),
            "Run the layers over float32[tokens, hidden_size], in place; starts int32[sequences + 1]. rotary: of each "
            "rotation that layers have, cosines and sines float32[tokens, rotary_dim / 2].");
}

}  // namespace neso
