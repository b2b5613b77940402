// Fast path for simple infer requests in JSON.
#pragma once

#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// (id, inputs, outputs, binary_by_default) of the JSON of an infer request.
//
// `inputs`: (name, datatype, shape, content) each, where the content is a bytearray of the elements in row-major order, a
// list of bytes for BYTES, or the int `binary_data_size`. `outputs`: (name, binary) each, binary None if unspecified. Null
// for anything else, valid or not (rare members, nested lists, escapes in strings, errors), which is left to the full
// parser; no exception is set then.
PyObject* parse_plain_infer(std::string_view json);

}  // namespace neso::wire
