// Fast path for simple infer responses in JSON.
#pragma once

#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// (body, length of its JSON) of a response without parameters, or null, without exception, if an output is not simple.
//
// `outputs`: objects with the attributes `name`, `datatype` (a str) and `array` (C order, native bytes). `binary`: a
// dict by name, whether an output is appended to the JSON as raw bytes; `binary_by_default` for the others. Not simple are
// strings that need escaping, BYTES, FP16 and BF16 as JSON, numbers that JSON does not have, and outputs of more than
// 64 KiB in total.
PyObject* write_plain_infer(PyObject* id, PyObject* model_name, PyObject* model_version, PyObject* outputs,
                            PyObject* binary, bool binary_by_default);

}  // namespace neso::wire
