// Packs weights from [outputs][inputs] into the layout of a Matrix.
#pragma once

#include <cstdint>

#include "kernels/matrix.h"

namespace neso {

// Rows of a dense source matrix -> outputs [first_output, first_output + rows) of a packed one, on `threads` threads.
// `to` is the data of the packed matrix, `depth` its padded inputs; the padding must be zero already.
// The source may be unaligned. Integers, float64: convert before.
void pack_dense(WeightKind source_kind, const void* source, int rows, int inputs, WeightKind kind, int depth,
                int first_output, void* to, int threads);

// Codes uint8[rows][inputs] -> int8 or int4.
void pack_codes(const uint8_t* codes, int rows, int inputs, WeightKind kind, int depth, int first_output, void* to,
                int threads);

}  // namespace neso
