// Quantizes dense weights by groups of inputs.
#pragma once

#include <cstdint>

#include "kernels/matrix.h"

namespace neso {

// Quantizes [rows][inputs] to codes uint8[rows][inputs] around 2^(bits - 1) and scales float[rows][groups]. The scale of
// a group is the candidate with the least square error. `source` may be unaligned.
void quantize(WeightKind source_kind, const void* source, int rows, int inputs, int bits, int group_size,
              uint8_t* codes, float* scales, int threads);

}  // namespace neso
