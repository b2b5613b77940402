// Fast path for complete, simple HTTP/1.1 requests.
#pragma once

#include <cstddef>
#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// (method, target, headers by lower-case name, body) if `data` is exactly one request: GET or POST in origin form without
// query, no folded or duplicate fields, with Host, and with a Content-Length or no body. Null for anything else, valid or
// not, which is left to the full parser; no exception is set then.
PyObject* parse_plain_request(std::string_view data, std::size_t max_head, std::size_t max_body);

}  // namespace neso::wire
