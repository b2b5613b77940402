#include "bindings/step_checks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"

namespace neso {
namespace {

constexpr int kMaskBits = 64;

// Every sequence has at least one token, and every token belongs to a sequence.
void check_sequences(const Step& step) {
    require(step.num_sequences > 0, "a step must have a sequence");
    const int32_t* start = step.query_start;
    require(start[0] == 0 && start[step.num_sequences] == step.num_tokens,
            "query_start must go from 0 to the number of tokens");
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        require(start[sequence] < start[sequence + 1], "query_start must ascend");
    }
}

void check_rotary(const Decoder& decoder, const Step& step) {
    for (int index = 0; index < decoder.num_layers(); ++index) {
        require(decoder.layer(index).rotary < int(step.rotary.size()), "there must be a table for each rotation");
    }
    for (const RotaryRows& rows : step.rotary) {
        require(2 * rows.half <= decoder.shape().head_dim, "a rotation is wider than a head");
    }
}

// The blocks that a sequence reads and writes, and the positions of its tokens.
void check_sequence(const Decoder& decoder, const Step& step, int sequence) {
    const auto [first, last] = decoder.blocks_read(step, sequence);
    require(last <= step.table_width, "a block table is too short");
    const int32_t* table = step.block_tables + int64_t(sequence) * step.table_width;
    check_range(table + first, last - first, decoder.num_blocks(), "block");
    check_range(table, std::min(last, decoder.sink_blocks()), decoder.num_blocks(), "block");
    const int begin = step.query_start[sequence], end = step.query_start[sequence + 1];
    int deepest = end - begin - 1;
    if (step.tree_depths) {
        check_range(step.tree_depths + begin, end - begin, end - begin, "depth");
        require(!step.in_tree(begin) || end - begin <= kMaskBits, "a tree has more nodes than a mask has bits");
        deepest = *std::max_element(step.tree_depths + begin, step.tree_depths + end);
    }
    require(decoder.has_position(step.num_computed[sequence] + deepest), "a sequence is longer than the positions");
}

void check_slot_copies(const Decoder& decoder, const Step& step) {
    for (int i = 0; i < step.num_slot_copies; ++i) {
        const int32_t* copy = step.slot_copies + 3 * i;
        check_range(copy, 1, step.num_sequences, "sequence");
        check_range(copy + 1, 2, int64_t(step.table_width) * decoder.block_size(), "position");
        for (const int position : {copy[1], copy[2]}) {
            check_range(step.block_tables + int64_t(copy[0]) * step.table_width + position / decoder.block_size(), 1,
                        decoder.num_blocks(), "block");
        }
    }
}

}  // namespace

void check_range(const int32_t* values, int64_t count, int64_t end, const char* what) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= end) {
            throw std::invalid_argument(std::string(what) + " " + std::to_string(values[i]) + " is not in [0, " +
                                        std::to_string(end) + ")");
        }
    }
}

void check_step(const Decoder& decoder, const Step& step) {
    require(decoder.num_blocks() > 0, "allocate_cache must come before the first step");
    check_sequences(step);
    check_rotary(decoder, step);
    check_range(step.token_ids, step.num_tokens, decoder.vocab_size(), "token id");
    check_range(step.wanted_rows, step.num_wanted, step.num_tokens, "wanted row");
    check_range(step.embedding_positions, step.num_embeddings, step.num_tokens, "embedding position");
    check_range(step.block_copies, int64_t(step.num_copies) * 2, decoder.num_blocks(), "block");
    check_range(step.num_computed, step.num_sequences, int64_t(step.table_width) * decoder.block_size(),
                "number of computed tokens");
    check_slot_copies(decoder, step);
    for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
        check_sequence(decoder, step, sequence);
        const int slot = step.adapter_slots ? step.adapter_slots[sequence] : -1;
        require(slot < 0 || decoder.adapter(slot), "a slot has no adapter");
    }
}

void check_adapter(const Decoder& decoder, const Adapter& adapter) {
    require(int(adapter.products.size()) == decoder.num_layers() * kProducts,
            "the adapter has another number of layers");
    for (int layer = 0; layer < decoder.num_layers(); ++layer) {
        for (int number = 0; number < kProducts; ++number) {
            const AdapterProduct& changes = adapter.product(layer, Product(number));
            if (!changes.ranks) continue;
            const auto [inputs, outputs] = decoder.product_shape(layer, Product(number));
            require(changes.inputs == inputs, "the adapter has another number of inputs");
            for (const AdapterPart& part : changes.parts) {
                require(int64_t(part.first_output) + part.outputs <= outputs, "the adapter has more outputs");
            }
        }
    }
}

}  // namespace neso
