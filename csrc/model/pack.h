// Packs weights from [outputs][inputs] into the layout of a Matrix.
#pragma once

#include <cstdint>

#include "kernels/matrix.h"

namespace neso {

// Packs rows of a dense matrix to outputs [first_output, first_output + rows), on `threads` threads.
// `to` is the data of the packed matrix, `depth` its padded inputs; the padding must already be zero.
// The source may be unaligned. Integers and float64 must be converted first.
void pack_dense(WeightKind source_kind, const void* source, int rows, int inputs, WeightKind kind, int depth,
                int first_output, void* to, int threads);

// Packs codes uint8[rows][inputs] to int8 or int4.
void pack_codes(const uint8_t* codes, int rows, int inputs, WeightKind kind, int depth, int first_output, void* to,
                int threads);

}  // namespace neso
