// The JSON of an infer request of the plainest kind.
#pragma once

#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// (id, inputs, outputs, binary_by_default) of the JSON of an infer request.
//
// `inputs`: (name, datatype, shape, content) each, where the content is a bytearray of the elements in row-major order, a
// list of bytes for BYTES, or the int that `binary_data_size` holds. `outputs`: (name, binary) each, None where the request
// does not choose. Null for all else, valid or not (members that are rarely used, nested lists, escapes in strings, what is
// wrong in any way): that is left to the full parser. No exception is set then.
PyObject* parse_plain_infer(std::string_view json);

}  // namespace neso::wire
