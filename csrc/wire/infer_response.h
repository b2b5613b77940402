// Fast path for the body of simple infer responses.
#pragma once

#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// Returns (body, length of its JSON) of a response without parameters. Returns null without an exception for an
// unsupported output.
//
// `outputs`: objects with attributes `name`, `datatype` (str) and `array` (C order, native byte order). `binary`: dict from
// name to whether the output is appended as binary data; `binary_by_default` applies to other names. Unsupported:
// strings that JSON must escape; BYTES, FP16 and BF16 as JSON; NaN and infinite numbers; more than 64 KiB of outputs.
PyObject* write_plain_infer(PyObject* id, PyObject* model_name, PyObject* model_version, PyObject* outputs,
                            PyObject* binary, bool binary_by_default);

}  // namespace neso::wire
