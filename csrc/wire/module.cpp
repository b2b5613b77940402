// Extension module `_wire`: fast paths that parse common requests and write common responses in one call.

#include <nanobind/nanobind.h>

#include "wire/http_request.h"
#include "wire/infer_request.h"
#include "wire/infer_response.h"

namespace nb = nanobind;

namespace {

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
        "write_plain_infer",
        [](nb::handle id, nb::handle model_name, nb::handle model_version, nb::handle outputs, nb::handle binary,
           bool binary_by_default) {
            return or_none(neso::wire::write_plain_infer(id.ptr(), model_name.ptr(), model_version.ptr(), outputs.ptr(),
                                                         binary.ptr(), binary_by_default));
        },
        nb::arg("id"), nb::arg("model_name"), nb::arg("model_version"), nb::arg("outputs"), nb::arg("binary"),
        nb::arg("binary_by_default"));
}
