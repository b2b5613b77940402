// The paged key-value cache: for each layer, blocks; in each block, heads. See AttentionShape for the inside.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/kernels.h"
#include "model/step.h"
#include "model/zero_pages.h"

namespace neso {

class KVCache {
   public:
    KVCache(const AttentionShape& shape, int num_layers, int num_blocks)
        : shape_(shape), num_blocks_(num_blocks), layer_bytes_(shape.block_bytes() * num_blocks),
          pages_(layer_bytes_ * num_layers) {}

    const AttentionShape& shape() const { return shape_; }
    int num_blocks() const { return num_blocks_; }
    char* layer(int index) { return pages_.data() + index * layer_bytes_; }
    char* block(int layer_index, int block_index) { return layer(layer_index) + block_index * shape_.block_bytes(); }

    // Copy blocks in one layer. All sources are read before any write: one block may be a source and a target.
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

   private:
    const AttentionShape shape_;
    const int num_blocks_;
    const int64_t layer_bytes_;
    ZeroPages pages_;
};

}  // namespace neso
