// Layouts of packed weights and of their inputs.
#pragma once

#include <cstdint>

#include "kernels/buffer.h"
#include "kernels/dtypes.h"

namespace neso {

enum class WeightKind : uint8_t { f32, f16, bf16, int8, int4 };

// Outputs per panel: 512 bits of float, one tile register of bfloat16 or int8.
constexpr int kPanel = 16;
// Inputs are zero-padded to a multiple of this: one tile of bfloat16, one group of quantized weights.
constexpr int kDepthAlign = 32;
// A tile register holds 16 rows of 32 bfloat16 values.
constexpr int kTileRows = 16, kTileDepth = 32;
// Groups of quantized weights are multiples of this.
constexpr int kGroup = 32;
// The largest group of 8-bit activations that share a scale.
constexpr int kDynamicGroup = 256;

// A packed weight matrix [outputs, inputs]. Panel p has the outputs 16 p to 16 p + 15:
//
//   f32, f16   [panel][k][16]                 one vector of outputs per input
//   bf16       [panel][k / 2][16][2]          pairs of inputs, for vdpbf16ps and tdpbf16ps
//   int8       [panel][k / 4][16][4]          unsigned codes, groups of 4 inputs, for vpdpbusd
//   int4       [panel][k / 8][16][4]          low nibbles: inputs 8 j to 8 j + 3, high nibbles: 8 j + 4 to 8 j + 7
//
// A quantized weight is (scale * code + offset) * scale_factor, with a scale and an offset per panel, group and
// output: [panel][group][16]. Without offsets, codes are symmetric around 128 or 8.
struct Matrix {
    WeightKind kind = WeightKind::f32;
    int outputs = 0, inputs = 0;
    int depth = 0;   // inputs, padded
    int panels = 0;
    const void* data = nullptr;

    int group_size = 0, groups = 0;
    const f16* scales = nullptr;
    const f16* offsets = nullptr;
    float scale_factor = 1.0f;
    bool dynamic = false;  // whether activations are quantized to 8 bits
    const int32_t* input_order = nullptr;

    const float* bias = nullptr;  // [outputs]

    bool quantized() const { return kind == WeightKind::int8 || kind == WeightKind::int4; }
    int64_t panel_bytes() const {
        switch (kind) {
            case WeightKind::f32: return int64_t(depth) * kPanel * 4;
            case WeightKind::int8: return int64_t(depth) * kPanel;
            case WeightKind::int4: return int64_t(depth) * kPanel / 2;
            default: return int64_t(depth) * kPanel * 2;
        }
    }
    const char* panel(int index) const { return static_cast<const char*>(data) + index * panel_bytes(); }
};

enum class InputKind : uint8_t { f32, bf16, bf16_tiles, integer, integer_tiles };

// Rows of activations, packed for one kind of matrix. A view of memory owned by an InputStorage.
//
//   f32, bf16   values[rows][stride]
//   bf16_tiles  values[rows / 16][depth / 32][16][32]: each tile register is loaded from contiguous memory
//   integer     scale[rows][group] * codes[rows][k], codes in 16 bits (or 8, for a dynamic matrix). With dot
//               products of 8-bit integers they are two planes of 8 bits, code = 256 * high + low; 8-bit codes have
//               only the low plane.
//               sums[rows][group] are the sums of the codes of each group.
//   integer_tiles  scale[rows][group] * codes[rows / 16][depth / 64][16][64] in 8 bits. sums[rows][group] are 128 times
//               the sums of the codes of each group: what weight codes around 128 add to products.
struct Input {
    InputKind kind = InputKind::f32;
    int rows = 0, depth = 0;
    int64_t stride = 0;      // elements from row to row
    int planes = 1;          // integer with dot products of 8-bit integers: 1 or 2
    int group_size = 0;      // integer: inputs that share a scale
    int64_t value_bytes = 0, num_groups = 0;
    char* values = nullptr;
    float* scales = nullptr;
    int32_t* sums = nullptr;

    template <typename T>
    T* row(int index) const {
        return reinterpret_cast<T*>(values) + index * stride;
    }
};

// Range of a product: rows of the input and panels of the matrix, ends exclusive.
struct GemmRange {
    int first_row, last_row, first_panel, last_panel;

    int rows() const { return last_row - first_row; }
    bool empty() const { return first_row >= last_row || first_panel >= last_panel; }
};

class InputStorage {
   public:
    void reserve(const Input& input) {
        values_.reserve(input.value_bytes);
        scales_.reserve(input.num_groups);
        sums_.reserve(input.num_groups);
    }
    Input attach(Input input) {
        input.values = values_.data();
        input.scales = scales_.data();
        input.sums = sums_.data();
        return input;
    }

   private:
    Buffer<char> values_;
    Buffer<float> scales_;
    Buffer<int32_t> sums_;
};

}  // namespace neso
