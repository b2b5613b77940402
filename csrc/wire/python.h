// Owning references to Python objects for the plain C API. These objects are built for every request; the checks of
// nanobind's wrappers would double the cost.
#pragma once

#include <Python.h>

#include <string_view>
#include <utility>

namespace neso::wire {

class Reference {
  public:
    Reference() = default;
    // Steals a new reference; null if the call that created it failed.
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

// Releases the interpreter lock in its scope, if `large`. The scope must not use Python objects.
class WithoutGil {
  public:
    explicit WithoutGil(bool large) : state_(large ? PyEval_SaveThread() : nullptr) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        if (state_ != nullptr) PyEval_RestoreThread(state_);
    }

  private:
    PyThreadState* state_;
};

// A str from UTF-8; null without an exception if the bytes are invalid.
inline Reference text(std::string_view bytes) {
    PyObject* object = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "strict");
    if (object == nullptr) PyErr_Clear();
    return Reference(object);
}

inline Reference bytes(std::string_view data) {
    return Reference(PyBytes_FromStringAndSize(data.data(), static_cast<Py_ssize_t>(data.size())));
}

}  // namespace neso::wire
