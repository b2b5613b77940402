// A whole HTTP/1.1 request of the plainest kind.
#pragma once

#include <cstddef>
#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// (method, target, headers by lower-case name, body) of `data`, if that is exactly one request: GET or POST of an origin
// form without query, fields on one line and each but once, a Host, and a body whose length is given or none. Null for
// all else, valid or not: that is left to the full parser. No exception is set then.
PyObject* parse_plain_request(std::string_view data, std::size_t max_head, std::size_t max_body);

}  // namespace neso::wire
