// Owning references to Python objects for the C API: nanobind's checks would cost as much as the work, which is done for
// every request.
#pragma once

#include <Python.h>

#include <string_view>
#include <utility>

namespace neso::wire {

class Reference {
  public:
    Reference() = default;
    // Takes ownership of a new reference; null if the call failed.
    explicit Reference(PyObject* object) : object_(object) {}
    Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Reference& operator=(Reference&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    Reference(const Reference&) = delete;
    Reference& operator=(const Reference&) = delete;
    ~Reference() { Py_XDECREF(object_); }

    explicit operator bool() const { return object_ != nullptr; }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }

  private:
    PyObject* object_ = nullptr;
};

// str from UTF-8; null without exception if it is invalid.
inline Reference text(std::string_view bytes) {
    PyObject* object = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "strict");
    if (object == nullptr) PyErr_Clear();
    return Reference(object);
}

inline Reference bytes(std::string_view data) {
    return Reference(PyBytes_FromStringAndSize(data.data(), static_cast<Py_ssize_t>(data.size())));
}

}  // namespace neso::wire
