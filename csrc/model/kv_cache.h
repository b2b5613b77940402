// The paged KV cache [layer][block][head]. See AttentionShape for the layout within a head.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "model/step.h"
#include "model/zero_pages.h"

namespace neso {

class KVCache {
   public:
    // memory: zeroed and of the size of the cache, owned by the caller; null to allocate it here.
    KVCache(const AttentionShape& shape, int num_layers, int num_blocks, char* memory = nullptr)
        : shape_(shape), num_blocks_(num_blocks), layer_bytes_(shape.block_bytes() * num_blocks),
          pages_(memory ? nullptr : std::make_unique<ZeroPages>(layer_bytes_ * num_layers)),
          data_(memory ? memory : pages_->data()) {}

    const AttentionShape& shape() const { return shape_; }
    int num_blocks() const { return num_blocks_; }
    char* layer(int index) { return data_ + index * layer_bytes_; }
    char* block(int layer_index, int block_index) { return layer(layer_index) + block_index * shape_.block_bytes(); }

    // Copy blocks in one layer. All sources are read before any write, so a block may be both source and target.
    void copy_blocks(int layer_index, const Step& step) {
        std::vector<char> sources(step.num_copies * shape_.block_bytes());
        for (int i = 0; i < step.num_copies; ++i) {
            std::memcpy(sources.data() + i * shape_.block_bytes(), block(layer_index, step.block_copies[2 * i]),
                        shape_.block_bytes());
        }
        for (int i = 0; i < step.num_copies; ++i) {
            std::memcpy(block(layer_index, step.block_copies[2 * i + 1]), sources.data() + i * shape_.block_bytes(),
                        shape_.block_bytes());
        }
    }

    // Copy single tokens within their sequences, in one layer. The copies of a sequence are ordered so that none reads a
    // slot written by an earlier one.
    void copy_slots(int layer_index, const Step& step) {
        for (int i = 0; i < step.num_slot_copies; ++i) {
            const int32_t* copy = step.slot_copies + 3 * i;
            const int32_t* table = step.block_tables + int64_t(copy[0]) * step.table_width;
            const int size = shape_.block_size;
            char* from = block(layer_index, table[copy[1] / size]);
            char* to = block(layer_index, table[copy[2] / size]);
            if (shape_.kind == CacheKind::f32) {
                copy_slot<float>(from, copy[1] % size, to, copy[2] % size);
            } else {
                copy_slot<uint16_t>(from, copy[1] % size, to, copy[2] % size);
            }
        }
    }

   private:
    // T has the size of a cached value; see `write_cache` for the layout.
    template <typename T>
    void copy_slot(const char* from_block, int from, char* to_block, int to) const {
        constexpr int kInterleave = 4 / sizeof(T);
        const int slots = shape_.slots(), dim = shape_.padded_dim();
        const int64_t panel_size = int64_t(slots) * kPanel;
        for (int head = 0; head < shape_.kv_heads; ++head) {
            const T* source = reinterpret_cast<const T*>(from_block + head * shape_.head_bytes());
            T* target = reinterpret_cast<T*>(to_block + head * shape_.head_bytes());
            for (int d = 0; d < shape_.head_dim; ++d) {
                const int64_t row = int64_t(d / kInterleave) * slots * kInterleave + d % kInterleave;
                target[row + to * kInterleave] = source[row + from * kInterleave];
            }
            source += int64_t(dim) * slots;
            target += int64_t(dim) * slots;
            const auto value = [&](int slot, int d) {
                return int64_t(slot / kInterleave) * kPanel * kInterleave + slot % kInterleave +
                       d / kPanel * panel_size + d % kPanel * kInterleave;
            };
            for (int d = 0; d < shape_.head_dim; ++d) target[value(to, d)] = source[value(from, d)];
        }
    }

    const AttentionShape shape_;
    const int num_blocks_;
    const int64_t layer_bytes_;
    std::unique_ptr<ZeroPages> pages_;
    char* data_;
};

}  // namespace neso
