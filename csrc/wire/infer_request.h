// Fast path for the JSON of simple infer requests.
#pragma once

#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// Returns (id, inputs, outputs, binary_by_default) of the JSON of an infer request.
//
// `inputs`: tuples (name, datatype, shape, content). `content` is a bytearray of the elements in row-major order, a list
// of bytes for BYTES, or the int `binary_data_size`. `outputs`: tuples (name, binary), None if not given. Returns null
// without an exception for all other input, valid or not (rare members, lists that are not nested as the shape, escapes in
// strings, errors); the Python parser handles it.
PyObject* parse_plain_infer(std::string_view json);

// Splits a BYTES tensor in the binary format, a uint32 length before each element, into at most `count` elements.
// Returns (list of bytes, position after the last element); null with an exception set if out of memory.
PyObject* split_strings(std::string_view data, std::size_t count);

struct JsonCounts {
    std::size_t values = 0;      // upper bound: one, and one for each comma, array and object outside strings
    std::size_t strings = 0;     // also names of members
    std::size_t containers = 0;  // arrays and objects
};

// Counts what a JSON parser would create, for text that may be invalid. Stops when there are more than `stop` values or
// strings. Needs no interpreter lock.
JsonCounts count_json(std::string_view json, std::size_t stop);

}  // namespace neso::wire
