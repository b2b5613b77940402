// Checks of protobuf messages before protobuf parses them: a small message can make it create millions of objects.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace neso::wire {

struct ScanLimits {
    std::uint64_t max_messages;  // nested messages: inputs, outputs, parameters and their parts
    std::uint64_t max_values;    // fields at all levels, and elements of packed fields
};

struct Scan {
    const char* error = nullptr;            // a static text, or null
    bool exceeds_limits = false;            // the error is a limit, not malformed input
    std::uint64_t values = 0;               // counted fields and elements
    std::vector<std::string_view> raw;      // raw_input_contents
    std::vector<std::string_view> rest;     // all other top-level fields, in order
};

// Scans a ModelInferRequest. `split`: fill `raw` and `rest`. Accepts every message that protobuf accepts, within limits.
Scan scan_infer_request(std::string_view data, const ScanLimits& limits, bool split);

// Scans a RepositoryModelLoadRequest.
Scan scan_load_request(std::string_view data, const ScanLimits& limits);

}  // namespace neso::wire
