#include "bindings/bindings.h"

namespace neso {
namespace {

// Set the stacked matrices A of a product; `add_part` then adds the matrices B, in the same order.
void add_product(OwnedAdapter& owned, int layer, int product, int inputs, Array<uint8_t> a, Array<float> scales) {
    Adapter& adapter = owned.adapter;
    const int ranks = int(scales.size());
    const int64_t row_bytes = round_up(inputs, kLowRankBlock) * (adapter.kind == WeightKind::f32 ? 4 : 2);
    const size_t index = size_t(layer) * kProducts + product;
    require(layer >= 0 && product >= 0 && product < kProducts && index < adapter.products.size(), "no such product");
    require(ranks > 0 && ranks % 2 == 0 && inputs > 0, "ranks must be even");
    require(int64_t(a.size()) == ranks * row_bytes, "a must have a padded row for each rank");
    AdapterProduct& changes = adapter.products[index];
    changes = AdapterProduct{};
    changes.ranks = ranks;
    changes.inputs = inputs;
    changes.a = a.data();
    changes.scales = scales.data();
    owned.arrays.push_back(a);
    owned.scales.push_back(scales);
}

void add_part(OwnedAdapter& owned, int layer, int product, int first_output, int outputs, int rank, Array<uint8_t> b) {
    AdapterProduct& changes = owned.adapter.products.at(size_t(layer) * kProducts + product);
    const int first_rank = changes.parts.empty() ? 0 : changes.parts.back().first_rank + changes.parts.back().rank;
    require(rank > 0 && rank % 2 == 0 && first_rank + rank <= changes.ranks, "the ranks do not fit those of a");
    require(first_output >= 0 && outputs > 0, "a part must have outputs");
    const int64_t element = owned.adapter.kind == WeightKind::f32 ? 4 : 2;
    require(int64_t(b.size()) == round_up(outputs, kPanel) * rank * element, "b must have whole panels");
    changes.parts.push_back({first_output, outputs, first_rank, rank, b.data()});
    owned.arrays.push_back(b);
}

}  // namespace

void bind_adapter(nb::module_& m) {
    nb::class_<OwnedAdapter>(m, "Adapter", "LoRA adapter of a decoder; keeps its arrays alive.")
        .def("__init__",
             [](OwnedAdapter* self, const std::string& kind, int layers) {
                 const WeightKind found = weight_kind(kind);
                 require(found == WeightKind::f32 || found == WeightKind::bf16, "adapters are f32 or bf16");
                 new (self) OwnedAdapter{};
                 self->adapter.kind = found;
                 self->adapter.products.resize(size_t(layers) * kProducts);
             },
             nb::arg("kind"), nb::arg("layers"))
        .def("add_product", &add_product, nb::arg("layer"), nb::arg("product"), nb::arg("inputs"), nb::arg("a"),
             nb::arg("scales"),
             "Set the matrices A of a product (0 qkv, 1 output, 2 gate and up, 3 down), see ShrinkTask.")
        .def("add_part", &add_part, nb::arg("layer"), nb::arg("product"), nb::arg("first_output"), nb::arg("outputs"),
             nb::arg("rank"), nb::arg("b"), "Add the next matrix B of a product, see ExpandTask.");
}

}  // namespace neso
