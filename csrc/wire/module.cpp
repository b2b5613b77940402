// Extension module `_wire`: fast paths that parse common requests and write common responses in one call.

#include <nanobind/nanobind.h>

#include <algorithm>

#include "wire/http_request.h"
#include "wire/infer_request.h"
#include "wire/infer_response.h"
#include "wire/protobuf_scan.h"
#include "wire/python.h"

namespace nb = nanobind;

namespace {

constexpr std::size_t kLarge = 64 << 10;  // bytes that are scanned without the interpreter lock

class Buffer {
  public:
    explicit Buffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }
    std::string_view get() const { return {static_cast<const char*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

  private:
    Py_buffer view_{};
};

nb::object or_none(PyObject* object) { return object == nullptr ? nb::none() : nb::steal(object); }

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

void check(const neso::wire::Scan& scan) {
    if (scan.error == nullptr) return;
    // Limits are reported as OverflowError, malformed messages as ValueError.
    PyErr_SetString(scan.exceeds_limits ? PyExc_OverflowError : PyExc_ValueError, scan.error);
    throw nb::python_error();
}

nb::bytes join(const std::vector<std::string_view>& parts) {
    std::size_t size = 0;
    for (const auto& part : parts) size += part.size();
    nb::bytes joined = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!joined.is_valid()) throw nb::python_error();
    char* pos = PyBytes_AsString(joined.ptr());
    for (const auto& part : parts) pos = std::copy(part.begin(), part.end(), pos);
    return joined;
}

}  // namespace

NB_MODULE(_wire, module) {
    module.def(
        "parse_plain_request",
        [](nb::bytes data, std::size_t max_head, std::size_t max_body) {
            return or_none(neso::wire::parse_plain_request({data.c_str(), data.size()}, max_head, max_body));
        },
        nb::arg("data"), nb::arg("max_head"), nb::arg("max_body"));
    module.def(
        "parse_plain_infer",
        [](nb::handle json) { return or_none(neso::wire::parse_plain_infer(Buffer(json).get())); }, nb::arg("json"));
    module.def(
        "count_json",
        [](nb::handle json, std::size_t stop) {
            const Buffer buffer(json);
            neso::wire::JsonCounts counts;
            {
                const neso::wire::WithoutGil released(buffer.get().size() > kLarge);
                counts = neso::wire::count_json(buffer.get(), stop);
            }
            return nb::make_tuple(counts.values, counts.strings, counts.containers);
        },
        nb::arg("json"), nb::arg("stop"));
    module.def(
        "split_strings",
        [](nb::handle data, std::size_t count) {
            PyObject* split = neso::wire::split_strings(Buffer(data).get(), count);
            if (split == nullptr) throw nb::python_error();
            return nb::steal(split);
        },
        nb::arg("data"), nb::arg("count"));
    module.def(
        "write_plain_infer",
        [](nb::handle id, nb::handle model_name, nb::handle model_version, nb::handle outputs, nb::handle binary,
           bool binary_by_default) {
            return or_none(neso::wire::write_plain_infer(id.ptr(), model_name.ptr(), model_version.ptr(), outputs.ptr(),
                                                         binary.ptr(), binary_by_default));
        },
        nb::arg("id"), nb::arg("model_name"), nb::arg("model_version"), nb::arg("outputs"), nb::arg("binary"),
        nb::arg("binary_by_default"));
    module.def(
        "scan_infer_request",
        [](nb::bytes data, std::uint64_t max_messages, std::uint64_t max_values) {
            const auto scan = neso::wire::scan_infer_request(view(data), {max_messages, max_values}, false);
            check(scan);
            return scan.values;
        },
        nb::arg("data"), nb::arg("max_messages"), nb::arg("max_values"));
    module.def(
        "split_infer_request",
        [](nb::bytes data, std::uint64_t max_messages, std::uint64_t max_values) {
            neso::wire::Scan scan;
            {
                const neso::wire::WithoutGil released(data.size() > kLarge);
                scan = neso::wire::scan_infer_request(view(data), {max_messages, max_values}, true);
            }
            check(scan);
            nb::list raw;
            for (const auto& content : scan.raw) raw.append(nb::bytes(content.data(), content.size()));
            return nb::make_tuple(scan.values, join(scan.rest), raw);
        },
        nb::arg("data"), nb::arg("max_messages"), nb::arg("max_values"));
    module.def(
        "scan_load_request",
        [](nb::bytes data, std::uint64_t max_messages, std::uint64_t max_values) {
            check(neso::wire::scan_load_request(view(data), {max_messages, max_values}));
        },
        nb::arg("data"), nb::arg("max_messages"), nb::arg("max_values"));
}
