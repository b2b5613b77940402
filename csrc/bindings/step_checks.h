// Validation of steps and adapters from Python. It prevents out-of-bounds reads and writes.
#pragma once

#include "model/decoder.h"

namespace neso {

// Throws std::invalid_argument naming `what` for a value outside of [0, end).
void check_range(const int32_t* values, int64_t count, int64_t end, const char* what);

// Validates the values of a step whose array shapes are valid. Throws std::invalid_argument.
void check_step(const Decoder& decoder, const Step& step);

// Validates that an adapter matches the decoder's products and their sizes. Throws std::invalid_argument.
void check_adapter(const Decoder& decoder, const Adapter& adapter);

}  // namespace neso
