#include <algorithm>
#include <memory>

#include <nanobind/stl/pair.h>

#include "bindings/bindings.h"
#include "bindings/step_checks.h"
#include "model/decoder.h"

namespace neso {
namespace {

struct OwnedMlp {
    Mlp mlp;
};

struct OwnedExperts {
    Experts experts;
};

// Arrays by name. They must outlive all pointers to them.
const float* vector_named(const nb::dict& vectors, const char* name) {
    if (!vectors.contains(name)) return nullptr;
    return nb::cast<Array<float>>(vectors[name], false).data();
}

Norm norm_named(const nb::dict& vectors, const std::string& name) {
    return {vector_named(vectors, name.c_str()), vector_named(vectors, (name + "_bias").c_str())};
}

struct OwnedLayer {
    LayerWeights weights;
};

struct OwnedWeights {
    DecoderWeights weights;
};

}  // namespace

Activation activation_named(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "quick_gelu") return Activation::quick_gelu;
    if (name == "relu") return Activation::relu;
    throw std::invalid_argument("unknown activation '" + name + "'");
}

void bind_decoder(nb::module_& m) {
    nb::class_<OwnedMlp>(m, "Mlp", "The weights of an MLP; a plain one has no gate.")
        .def("__init__",
             [](OwnedMlp* self, const OwnedMatrix* gate, const OwnedMatrix& up, const OwnedMatrix& down) {
                 new (self) OwnedMlp{{gate ? gate->matrix : Matrix{}, up.matrix, down.matrix}};
             },
             nb::arg("gate").none(), nb::arg("up"), nb::arg("down"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>());

    nb::class_<OwnedExperts>(m, "Experts", "Mixture of experts; the router has one output per expert, and one for "
                                           "the shared expert's gate, if there is one.")
        .def("__init__",
             [](OwnedExperts* self, const OwnedMatrix& router, const std::vector<const OwnedMlp*>& experts,
                const OwnedMlp* shared) {
                 Experts made{router.matrix, {}, shared ? shared->mlp : Mlp{}};
                 for (const OwnedMlp* expert : experts) made.experts.push_back(expert->mlp);
                 new (self) OwnedExperts{std::move(made)};
             },
             nb::arg("router"), nb::arg("experts"), nb::arg("shared").none(), nb::keep_alive<1, 2>(),
             nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());

    nb::class_<OwnedLayer>(m, "Layer", "The weights of one decoder layer: norms by name, matrices, an MLP or experts.")
        .def("__init__",
             [](OwnedLayer* self, const nb::dict& vectors, const OwnedMatrix& qkv, const OwnedMatrix& output,
                const OwnedMlp* mlp, const OwnedExperts* experts, int window, int rotary) {
                 new (self) OwnedLayer{{norm_named(vectors, "attention_norm"),
                                        norm_named(vectors, "attention_post_norm"),
                                        norm_named(vectors, "attention_sum_norm"), norm_named(vectors, "mlp_norm"),
                                        norm_named(vectors, "mlp_post_norm"), norm_named(vectors, "mlp_sum_norm"),
                                        qkv.matrix,
                                        vector_named(vectors, "query_norm"), vector_named(vectors, "key_norm"),
                                        output.matrix, mlp ? mlp->mlp : Mlp{}, experts ? experts->experts : Experts{},
                                        window, rotary}};
             },
             nb::arg("vectors"), nb::arg("qkv"), nb::arg("output"), nb::arg("mlp").none(), nb::arg("experts").none(),
             nb::arg("window"), nb::arg("rotary"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>());

    nb::class_<OwnedWeights>(m, "Weights", "All weights of a decoder; keeps its layers and arrays alive.")
        .def("__init__",
             [](OwnedWeights* self, const std::vector<const OwnedLayer*>& layers, const nb::dict& vectors,
                const OwnedMatrix* lm_head, std::optional<Array<uint8_t>> embedding, const std::string& embedding_kind,
                std::optional<Array<float, 2>> positions) {
                 DecoderWeights weights;
                 for (const OwnedLayer* layer : layers) weights.layers.push_back(layer->weights);
                 weights.final_norm = norm_named(vectors, "final_norm");
                 weights.lm_head = lm_head ? lm_head->matrix : Matrix{};
                 weights.embedding = embedding ? embedding->data() : nullptr;
                 weights.embedding_kind = weight_kind(embedding_kind);
                 weights.positions = positions ? positions->data() : nullptr;
                 weights.num_positions = positions ? int(positions->shape(0)) : 0;
                 new (self) OwnedWeights{std::move(weights)};
             },
             nb::arg("layers"), nb::arg("vectors"), nb::arg("lm_head").none(), nb::arg("embedding").none(),
             nb::arg("embedding_kind"), nb::arg("positions").none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 7>());

    nb::class_<Decoder>(m, "Decoder", "Executes a decoder; see the native runner. The caller must keep its weights alive.")
        .def("__init__",
             [](Decoder* self, int vocab_size, int hidden_size, int heads, int kv_heads, int head_dim, const std::string& norm,
                float norm_eps, const std::string& activation, bool parallel, bool norms_width, float attention_scale,
                float attention_softcap, float embedding_scale, float residual_scale, float logit_scale,
                float logit_softcap, int top_k, bool normalized, int position_offset, std::optional<int> all_heads,
                std::optional<int> all_kv_heads, bool owns_kv_heads, int vocab_begin,
                std::optional<int> vocab_end, bool first_stage, bool last_stage, const OwnedWeights& weights,
                const std::string& cache_kind, const std::string& isa, int threads, const CpuSets& cpus) {
                 const DecoderShape shape{
                     vocab_size, hidden_size, heads, kv_heads, head_dim,
                     norm == "rms" ? NormKind::rms : NormKind::layer, norm_eps, activation_named(activation), parallel,
                     norms_width, attention_scale, attention_softcap, embedding_scale, residual_scale, logit_scale,
                     logit_softcap, top_k, normalized, position_offset, all_heads.value_or(heads),
                     all_kv_heads.value_or(kv_heads), owns_kv_heads, vocab_begin,
                     vocab_end.value_or(vocab_size), first_stage, last_stage};
                 require(0 <= shape.vocab_begin && shape.vocab_begin <= shape.vocab_end && shape.vocab_end <= vocab_size,
                         "the part of the vocabulary must be in it");
                 for (const LayerWeights& layer : weights.weights.layers) {
                     require(!layer.is_sparse() || (top_k > 0 && top_k <= int(layer.experts.experts.size()) &&
                                                    layer.experts.router.outputs >= int(layer.experts.experts.size())),
                             "there must be at least top_k experts, and each must have an output of the router");
                 }
                 const CacheKind cache = cache_kind == "f32" ? CacheKind::f32 : CacheKind::bf16;
                 new (self) Decoder(shape, weights.weights, cache, isa_from_name(isa), threads, cpus);
             },
             nb::kw_only(), nb::arg("vocab_size"), nb::arg("hidden_size"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("norm") = "rms", nb::arg("norm_eps"), nb::arg("activation"),
             nb::arg("parallel") = false, nb::arg("norms_width") = false, nb::arg("attention_scale"),
             nb::arg("attention_softcap") = 0.0f, nb::arg("embedding_scale") = 1.0f, nb::arg("residual_scale") = 1.0f,
             nb::arg("logit_scale") = 1.0f, nb::arg("logit_softcap") = 0.0f, nb::arg("top_k") = 0,
             nb::arg("normalized") = false, nb::arg("position_offset") = 0, nb::arg("all_heads").none() = nb::none(),
             nb::arg("all_kv_heads").none() = nb::none(), nb::arg("owns_kv_heads") = true, nb::arg("vocab_begin") = 0,
             nb::arg("vocab_end").none() = nb::none(), nb::arg("first_stage") = true, nb::arg("last_stage") = true,
             nb::arg("weights"), nb::arg("cache_kind"),
             nb::arg("isa"), nb::arg("threads"), nb::arg("cpus") = CpuSets())
        .def(
            "set_weights", [](Decoder& self, const OwnedWeights& weights) { self.set_weights(weights.weights); },
            nb::arg("weights"), "Use another copy of the same weights, between two steps.")
        .def(
            "choose",
            [](Decoder& self, MutableArray<float, 2> logits, Array<float> temperature, Array<int32_t> top_k,
               Array<float> top_p, Array<float> min_p, Array<double> uniforms, MutableArray<int32_t> tokens,
               Array<int32_t> masked_rows, Array<int32_t, 2> masks) {
                const int rows = int(tokens.size());
                if (int(logits.shape(0)) < rows || int(logits.shape(1)) != self.vocab_size()) {
                    throw std::invalid_argument("logits must have a row of vocab_size for each token");
                }
                std::vector<Draw> draws(rows);
                for (int i = 0; i < rows; ++i) {
                    draws[i] = {temperature.data()[i], top_p.data()[i], min_p.data()[i], top_k.data()[i],
                                uniforms.data()[i]};
                }
                const int64_t mask_width = int64_t(masks.shape(1));
                if (masks.shape(0) != masked_rows.size() ||
                    (masked_rows.size() && mask_width * 32 < int64_t(logits.shape(1)))) {
                    throw std::invalid_argument("masks must have a bit of each masked row for each token");
                }
                check_range(masked_rows.data(), int64_t(masked_rows.size()), rows, "masked row");
                for (size_t i = 0; i < masked_rows.size(); ++i) {
                    draws[masked_rows.data()[i]].allowed = masks.data() + int64_t(i) * mask_width;
                }
                float* from = logits.data();
                int32_t* to = tokens.data();
                nb::gil_scoped_release release;
                self.choose(from, draws.data(), rows, to);
            },
            nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"),
            nb::arg("uniforms"), nb::arg("tokens"), nb::arg("masked_rows"), nb::arg("masks"),
            "Sample a token from each row of float32[rows, vocab_size] into int32[rows]; -1 where a logit is NaN. "
            "masks int32[masked rows, words] as in RowMasks: logits of masked tokens become -inf.")
        .def(
            "set_adapter",
            [](Decoder& self, int slot, const OwnedAdapter* adapter) {
                if (slot < 0) throw std::invalid_argument("a slot must not be negative");
                if (adapter) check_adapter(self, adapter->adapter);
                self.set_adapter(slot, adapter ? &adapter->adapter : nullptr);
            },
            nb::arg("slot"), nb::arg("adapter").none(),
            "Set the adapter of a slot from the next step on; the caller must keep it alive.")
        .def("set_all_reduce", &Decoder::set_all_reduce, nb::arg("all_reduce"), nb::keep_alive<1, 2>(),
             "Sum over the ranks of a tensor-parallel group in each step.")
        .def(
            "record_loops",
            [](Decoder& self, const std::function<void()>& work) {
                std::vector<ThreadTeam::LoopTime> times;
                self.record_loops(&times);
                try {
                    work();
                } catch (...) {
                    self.record_loops(nullptr);
                    throw;
                }
                self.record_loops(nullptr);
                std::vector<std::tuple<double, bool, double>> loops;
                for (const auto& time : times) loops.emplace_back(time.share, time.is_product, time.seconds);
                return loops;
            },
            nb::arg("work"), "Call work(), which runs steps. Returns of each loop of the threads the part of the work that the busiest "
            "thread is assigned, whether it is a matrix product, and its seconds.")
        .def("set_sink_tokens", &Decoder::set_sink_tokens, nb::arg("count"),
             "First tokens of a sequence that stay visible in layers with a window.")
        .def(
            "allocate_cache",
            [](Decoder& self, int num_blocks, int block_size, std::optional<MutableArray<uint8_t>> memory) {
                require(!memory || int64_t(memory->size()) == self.cache_bytes_per_block(block_size) * num_blocks,
                        "the memory must have the size of the cache");
                self.allocate_cache(num_blocks, block_size,
                                    memory ? reinterpret_cast<char*>(memory->data()) : nullptr);
            },
            nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("memory").none() = nb::none(), nb::keep_alive<1, 4>(),
            "Allocate the cache, or use zeroed memory uint8[cache_bytes_per_block * num_blocks] for it.")
        .def("cache_bytes_per_block", &Decoder::cache_bytes_per_block, nb::arg("block_size"))
        .def(
            "step",
            [](Decoder& self, Array<int32_t> token_ids, Array<int32_t> query_start, Array<int32_t> num_computed,
               Array<int32_t, 2> block_tables, Array<int32_t, 2> block_copies, Array<int32_t> wanted_rows,
               const std::vector<std::pair<Array<float, 2>, Array<float, 2>>>& rotary, MutableArray<float, 2> logits,
               MutableArray<float, 2> hidden, Array<int32_t> embedding_positions, Array<float, 2> embeddings,
               Array<int32_t, 2> slot_copies, Array<int32_t> tree_depths, Array<uint64_t> tree_masks,
               std::optional<Array<int32_t>> adapter_slots, std::optional<Array<float, 2>> received,
               std::optional<MutableArray<float, 2>> sent) {
                Step step{};
                step.num_sequences = int(num_computed.size());
                step.num_tokens = int(token_ids.size());
                step.table_width = int(block_tables.shape(1));
                step.num_copies = int(block_copies.shape(0));
                step.num_logits = int(logits.shape(0));
                step.num_wanted = int(wanted_rows.size());
                step.num_embeddings = int(embedding_positions.size());
                step.num_slot_copies = int(slot_copies.shape(0));
                require(query_start.size() == num_computed.size() + 1, "query_start must have a place for each end");
                require(block_tables.shape(0) == num_computed.size(), "there must be a block table for each sequence");
                require(!step.num_copies || block_copies.shape(1) == 2, "a copy of a block must be a pair");
                require(!step.num_slot_copies || slot_copies.shape(1) == 3, "a copy of a slot must be three numbers");
                require(wanted_rows.size() == logits.shape(0) + hidden.shape(0),
                        "there must be a row of logits or of hidden states for each wanted token");
                require(!step.num_logits || int(logits.shape(1)) == self.shape().num_logits_columns(),
                        "a row of logits must have a value for each token of the rank's vocabulary");
                require(!hidden.shape(0) || int(hidden.shape(1)) == self.hidden_size(),
                        "a row of hidden states must have hidden_size values");
                require(!step.num_embeddings || (int(embeddings.shape(0)) == step.num_embeddings &&
                                                 int(embeddings.shape(1)) == self.hidden_size()),
                        "embeddings must have a row of hidden_size for each position");
                require(!adapter_slots || adapter_slots->size() == num_computed.size(),
                        "there must be a slot of an adapter for each sequence");
                const auto is_stream = [&](const auto& rows) {
                    return rows && rows->shape(0) == token_ids.size() && int(rows->shape(1)) == self.hidden_size();
                };
                require(self.shape().first_stage || is_stream(received), "a stage must get a row for each token");
                require(self.shape().last_stage || (is_stream(sent) && !step.num_wanted),
                        "a stage must send a row for each token, and has no logits");
                step.received = received ? received->data() : nullptr;
                step.sent = sent ? sent->data() : nullptr;
                step.token_ids = token_ids.data();
                step.query_start = query_start.data();
                step.num_computed = num_computed.data();
                step.block_tables = block_tables.data();
                step.block_copies = block_copies.data();
                step.wanted_rows = wanted_rows.data();
                step.logits = logits.data();
                step.hidden = hidden.data();
                step.embedding_positions = embedding_positions.data();
                step.embeddings = embeddings.data();
                step.adapter_slots = adapter_slots ? adapter_slots->data() : nullptr;
                step.slot_copies = slot_copies.data();
                for (const auto& [cos, sin] : rotary) {
                    require(cos.shape(0) == token_ids.size() && sin.shape(0) == cos.shape(0) &&
                                sin.shape(1) == cos.shape(1),
                            "a rotation must have cosines and sines for each token");
                    step.rotary.push_back({cos.data(), sin.data(), int(cos.shape(1))});
                }
                if (tree_masks.size()) {
                    require(tree_masks.size() == token_ids.size() && tree_depths.size() == token_ids.size(),
                            "a tree must have a mask and a depth for each token");
                    step.tree_depths = tree_depths.data();
                    step.tree_masks = tree_masks.data();
                }
                check_step(self, step);
                nb::gil_scoped_release release;
                self.step(step);
            },
            nb::arg("token_ids"), nb::arg("query_start"), nb::arg("num_computed"), nb::arg("block_tables"),
            nb::arg("block_copies"), nb::arg("wanted_rows"), nb::arg("rotary"), nb::arg("logits"), nb::arg("hidden"),
            nb::arg("embedding_positions"), nb::arg("embeddings"), nb::arg("slot_copies"), nb::arg("tree_depths"),
            nb::arg("tree_masks"), nb::arg("adapter_slots").none() = nb::none(), nb::arg("received").none() = nb::none(),
            nb::arg("sent").none() = nb::none(),
            "Run one step; see StepPlan. rotary: of each rotation that layers have, cosines and sines "
            "float32[tokens, rotary_dim / 2]; logits float32[rows, vocab_size] "
            "is written. received, sent float32[tokens, hidden_size]: the residual stream from the previous stage and for "
            "the next one.")
        .def(
            "row_states",
            [](Decoder& self, Array<int32_t> rows, MutableArray<float, 2> out) {
                check_range(rows.data(), int64_t(rows.size()), self.num_logits_rows(), "row");
                if (out.shape(0) != rows.size() || int(out.shape(1)) != self.hidden_size()) {
                    throw std::invalid_argument("out must have a row of hidden_size for each row");
                }
                self.row_states(rows.data(), int(rows.size()), out.data());
            },
            nb::arg("rows"), nb::arg("out"),
            "Copy final hidden states, normed, of logits rows of the last step into float32[rows, hidden_size].");
}

}  // namespace neso
