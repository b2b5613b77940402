#include "wire/infer_response.h"

#include <string>
#include <type_traits>

#include "wire/json_writer.h"

namespace neso::wire {
namespace {

// Maximum size of all outputs in bytes that is copied; larger outputs are written without a copy.
constexpr Py_ssize_t kMaxBytes = 64 << 10;

// Interned attribute names.
struct Names {
    PyObject* name = PyUnicode_InternFromString("name");
    PyObject* datatype = PyUnicode_InternFromString("datatype");
    PyObject* array = PyUnicode_InternFromString("array");
};

// The memory of an array, valid while this object lives.
class Memory {
  public:
    explicit Memory(PyObject* array) { held_ = PyObject_GetBuffer(array, &view_, PyBUF_ND) == 0; }
    Memory(const Memory&) = delete;
    ~Memory() {
        if (held_) PyBuffer_Release(&view_);
    }
    explicit operator bool() const { return held_; }
    const Py_buffer* operator->() const { return &view_; }
    std::string_view bytes() const { return {static_cast<const char*>(view_.buf), static_cast<std::size_t>(view_.len)}; }

  private:
    Py_buffer view_{};
    bool held_ = false;
};

// UTF-8 cached in the string object; false if the object is not a string or cannot be encoded.
bool utf8(PyObject* object, std::string_view& out) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
    if (data == nullptr) return false;
    out = {data, static_cast<std::size_t>(size)};
    return true;
}

bool write_text(JsonWriter& json, PyObject* object) {
    std::string_view content;
    return utf8(object, content) && json.string(content);
}

template <typename T>
bool write_elements(JsonWriter& json, std::string_view bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
        if (at != 0) json.raw(",");
        if constexpr (std::is_same_v<T, bool>) {
            json.number(bytes[at] != 0);  // any nonzero byte is true
        } else {
            T value;
            std::memcpy(&value, bytes.data() + at, sizeof(T));
            if (!json.number(value)) return false;
        }
    }
    return true;
}

bool write_data(JsonWriter& json, std::string_view datatype, std::string_view bytes) {
    if (datatype == "FP32") return write_elements<float>(json, bytes);
    if (datatype == "FP64") return write_elements<double>(json, bytes);
    if (datatype == "INT32") return write_elements<std::int32_t>(json, bytes);
    if (datatype == "INT64") return write_elements<std::int64_t>(json, bytes);
    if (datatype == "BOOL") return write_elements<bool>(json, bytes);
    if (datatype == "UINT8") return write_elements<std::uint8_t>(json, bytes);
    if (datatype == "INT8") return write_elements<std::int8_t>(json, bytes);
    if (datatype == "UINT16") return write_elements<std::uint16_t>(json, bytes);
    if (datatype == "INT16") return write_elements<std::int16_t>(json, bytes);
    if (datatype == "UINT32") return write_elements<std::uint32_t>(json, bytes);
    if (datatype == "UINT64") return write_elements<std::uint64_t>(json, bytes);
    return false;
}

void write_shape(JsonWriter& json, const Memory& memory) {
    json.raw(",\"shape\":[");
    for (int i = 0; i < memory->ndim; ++i) {
        if (i != 0) json.raw(",");
        json.number(memory->shape[i]);
    }
    json.raw("]");
}

bool write_output(JsonWriter& json, std::string& blobs, Py_ssize_t& room, PyObject* tensor, PyObject* binary,
                  bool in_binary) {
    static const Names names;
    Reference name(PyObject_GetAttr(tensor, names.name)), datatype(PyObject_GetAttr(tensor, names.datatype)),
        array(PyObject_GetAttr(tensor, names.array));
    std::string_view kind;
    if (!name || !datatype || !array || !utf8(datatype.get(), kind) || kind == "BYTES") return false;
    json.raw("{\"name\":");
    if (!write_text(json, name.get())) return false;
    json.raw(",\"datatype\":\"");
    json.raw(kind);
    json.raw("\"");
    Memory memory(array.get());
    if (!memory || memory->len > room) return false;
    room -= memory->len;
    write_shape(json, memory);
    if (PyObject* chosen = PyDict_GetItemWithError(binary, name.get())) in_binary = chosen == Py_True;
    if (in_binary) {
        json.raw(",\"parameters\":{\"binary_data_size\":");
        json.number(memory->len);
        json.raw("}}");
        blobs.append(memory.bytes());
        return true;
    }
    json.raw(",\"data\":[");
    if (!write_data(json, kind, memory.bytes())) return false;
    json.raw("]}");
    return true;
}

}  // namespace

PyObject* write_plain_infer(PyObject* id, PyObject* model_name, PyObject* model_version, PyObject* outputs,
                            PyObject* binary, bool binary_by_default) {
    static thread_local std::string text, blobs;
    JsonWriter json(text);
    blobs.clear();
    json.raw("{");
    bool good = PyList_Check(outputs) && PyDict_Check(binary);
    if (good && PyObject_IsTrue(id) == 1) {
        json.raw("\"id\":");
        good = write_text(json, id);
        json.raw(",");
    }
    json.raw("\"model_name\":");
    good = good && write_text(json, model_name);
    json.raw(",\"model_version\":");
    good = good && write_text(json, model_version);
    json.raw(",\"outputs\":[");
    Py_ssize_t room = kMaxBytes;
    for (Py_ssize_t i = 0; good && i < PyList_Size(outputs); ++i) {
        if (i != 0) json.raw(",");
        good = write_output(json, blobs, room, PyList_GetItem(outputs, i), binary, binary_by_default);
    }
    json.raw("]}");
    PyObject* result = nullptr;
    if (good) {
        const std::size_t length = text.size();
        text.append(blobs);
        Reference body = bytes(text), size(PyLong_FromSize_t(length));
        if (body && size) result = PyTuple_Pack(2, body.get(), size.get());
    }
    if (result == nullptr) PyErr_Clear();
    return result;
}

}  // namespace neso::wire
