// Fast path for complete, simple HTTP/1.1 requests.
#pragma once

#include <cstddef>
#include <string_view>

#include "wire/python.h"

namespace neso::wire {

// Returns (method, target, headers by lower-case name, body) if `data` is exactly one request with: method GET or POST,
// a target in origin form without query, a Host, no repeated or folded fields, and Content-Length or no body. Returns
// null without an exception for all other input, valid or not; the full parser handles it.
PyObject* parse_plain_request(std::string_view data, std::size_t max_head, std::size_t max_body);

}  // namespace neso::wire
