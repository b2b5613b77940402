#include "wire/infer_request.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace neso::wire {
namespace {

constexpr std::size_t kMaxRank = 16;
constexpr std::size_t kLargeText = 64 << 10;     // bytes
constexpr Py_ssize_t kMaxStrings = 1'000'000;    // as MAX_STRINGS in neso/server/tensor.py
constexpr Py_ssize_t kStringsInARow = 16 << 10;  // created before other threads may run

// Lets other threads run after every kStringsInARow objects.
void let_others_run(Py_ssize_t count) {
    if (count % kStringsInARow == kStringsInARow - 1) const WithoutGil released(true);
}

struct Shape {
    std::int64_t extents[kMaxRank];
    std::size_t rank = 0;
    std::int64_t count = 1;
};

// Returns the position after the quote that ends a string, or `end`.
const char* end_of_string(const char* start, const char* end) {
    const char* at = start;
    while (at != end) {
        const auto* quote = static_cast<const char*>(std::memchr(at, '"', static_cast<std::size_t>(end - at)));
        if (quote == nullptr) break;
        const char* before = quote;
        while (before != start && before[-1] == '\\') --before;
        at = quote + 1;
        if ((quote - before) % 2 == 0) return at;
    }
    return end;
}

// Reads JSON from left to right. Methods return false or null for text that the fast path does not support.
class Reader {
  public:
    explicit Reader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

    bool at_end() {
        skip();
        return at_ == end_;
    }

    // Consumes the next non-blank character if it matches.
    bool take(char c) {
        skip();
        if (at_ == end_ || *at_ != c) return false;
        ++at_;
        return true;
    }

    bool string(std::string_view& out) {
        if (!take('"')) return false;
        const char* start = at_;
        for (; at_ != end_; ++at_) {
            const auto c = static_cast<unsigned char>(*at_);
            if (c == '"') {
                out = std::string_view(start, static_cast<std::size_t>(at_++ - start));
                return true;
            }
            if (c < 0x20 || c == '\\') return false;
        }
        return false;
    }

    bool boolean(bool& out) {
        skip();
        const std::string_view rest(at_, static_cast<std::size_t>(end_ - at_));
        if (rest.starts_with("true")) return out = true, at_ += 4, true;
        if (rest.starts_with("false")) return out = false, at_ += 5, true;
        return false;
    }

    // Integers must be in the type's range, without fraction or exponent; floating-point numbers must be finite, or
    // NaN, Infinity or -Infinity.
    template <typename T>
    bool number(T& out) {
        skip();
        if constexpr (std::is_floating_point_v<T>) {
            if (not_finite(out)) return true;
        }
        const char* start = at_;
        bool whole = true;
        if (!scan_number(whole)) return false;
        if constexpr (std::is_floating_point_v<T>) {
            double value = 0;
            if (!convert(start, value)) return false;
            out = static_cast<T>(value);
            return std::isfinite(out);
        } else {
            return whole && convert(start, out);
        }
    }

    // Calls `each()` to read each element.
    template <typename Each>
    bool array(Each each) {
        if (!take('[')) return false;
        if (take(']')) return true;
        do {
            if (!each()) return false;
        } while (take(','));
        return take(']');
    }

    // Calls `each()` to read each element of an array that is flat, or nested as the shape.
    template <typename Each>
    bool tensor(const Shape& shape, Each each) {
        return starts_nested() ? shape.rank > 1 && nested(shape, 0, each) : array(each);
    }

    // Calls `each(name)` to read the value of each member.
    template <typename Each>
    bool object(Each each) {
        if (!take('{')) return false;
        if (take('}')) return true;
        do {
            std::string_view name;
            if (!string(name) || !take(':') || !each(name)) return false;
        } while (take(','));
        return take('}');
    }

    // Passes over an object or an array without checking it. `out`: its text.
    bool skip_value(std::string_view& out) {
        skip();
        const char* start = at_;
        std::size_t level = 0;
        do {
            if (at_ == end_) return false;
            const char c = *at_++;
            if (c == '{' || c == '[') {
                ++level;
            } else if (level == 0) {
                return false;
            } else if (c == '}' || c == ']') {
                --level;
            } else if (c == '"') {
                at_ = end_of_string(at_, end_);
            }
        } while (level != 0);
        out = std::string_view(start, static_cast<std::size_t>(at_ - start));
        return true;
    }

    // Calls `read()`. If it returns false, passes over the object or array that it could not read; `out`: its text.
    template <typename Read>
    bool read_or_skip(Read read, std::string_view& out) {
        const char* start = at_;
        if (read()) return true;
        at_ = start;
        return skip_value(out);
    }

    std::size_t remaining() const { return static_cast<std::size_t>(end_ - at_); }

  private:
    bool starts_nested() {
        const char* start = at_;
        const bool found = take('[') && take('[');
        at_ = start;
        return found;
    }

    template <typename Each>
    bool nested(const Shape& shape, std::size_t level, Each& each) {
        std::int64_t count = 0;
        const bool good = array([&] {
            ++count;
            return level + 1 == shape.rank ? each() : nested(shape, level + 1, each);
        });
        return good && count == shape.extents[level];
    }

    void skip() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    }

    template <typename T>
    bool not_finite(T& out) {
        if (at_ == end_ || (*at_ != 'N' && *at_ != 'I' && *at_ != '-')) return false;
        const std::string_view rest(at_, static_cast<std::size_t>(end_ - at_));
        constexpr T infinity = std::numeric_limits<T>::infinity();
        if (rest.starts_with("NaN")) return out = std::numeric_limits<T>::quiet_NaN(), at_ += 3, true;
        if (rest.starts_with("Infinity")) return out = infinity, at_ += 8, true;
        if (rest.starts_with("-Infinity")) return out = -infinity, at_ += 9, true;
        return false;
    }

    bool digits() {
        const char* start = at_;
        while (at_ != end_ && *at_ >= '0' && *at_ <= '9') ++at_;
        return at_ != start;
    }

    // Skips a number as defined by the JSON grammar; `from_chars` accepts more.
    bool scan_number(bool& whole) {
        if (at_ != end_ && *at_ == '-') ++at_;
        if (at_ != end_ && *at_ == '0')
            ++at_;
        else if (!digits())
            return false;
        if (at_ != end_ && *at_ == '.') {
            ++at_;
            whole = false;
            if (!digits()) return false;
        }
        if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
            ++at_;
            whole = false;
            if (at_ != end_ && (*at_ == '+' || *at_ == '-')) ++at_;
            if (!digits()) return false;
        }
        return true;
    }

    template <typename T>
    bool convert(const char* start, T& out) {
        const auto [end, error] = std::from_chars(start, at_, out);
        return error == std::errc() && end == at_;
    }

    const char* at_;
    const char* end_;
};

// Reads the elements of the shape into a bytearray.
template <typename T>
Reference read_elements(Reader& reader, const Shape& shape) {
    std::vector<T> elements;
    bool good = false;
    {
        const WithoutGil released(reader.remaining() > kLargeText);  // other threads run while a large tensor is read
        elements.reserve(static_cast<std::size_t>(std::min<std::int64_t>(shape.count, 1 << 16)));
        good = reader.tensor(shape, [&] {
            T value{};
            if constexpr (std::is_same_v<T, bool>) {
                if (!reader.boolean(value)) return false;
            } else {
                if (!reader.number(value)) return false;
            }
            elements.push_back(value);
            return true;
        });
    }
    if (!good || static_cast<std::int64_t>(elements.size()) != shape.count) return {};
    Reference buffer(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(elements.size() * sizeof(T))));
    if (buffer && !elements.empty()) {
        char* out = PyByteArray_AsString(buffer.get());
        if constexpr (std::is_same_v<T, bool>)
            std::copy(elements.begin(), elements.end(), reinterpret_cast<bool*>(out));
        else
            std::memcpy(out, elements.data(), elements.size() * sizeof(T));
    }
    return buffer;
}

Reference read_strings(Reader& reader, const Shape& shape) {
    Reference list(PyList_New(0));
    if (!list) return {};
    const bool good = reader.tensor(shape, [&] {
        std::string_view element;
        // Conversion to text checks that the bytes are UTF-8.
        if (!reader.string(element) || !text(element)) return false;
        Reference item = bytes(element);
        if (!item || PyList_Append(list.get(), item.get()) != 0) return false;
        let_others_run(PyList_Size(list.get()));
        return PyList_Size(list.get()) <= kMaxStrings;
    });
    if (!good || PyList_Size(list.get()) != shape.count) return {};
    return list;
}

Reference read_data(Reader& reader, std::string_view datatype, const Shape& shape) {
    if (datatype == "FP32") return read_elements<float>(reader, shape);
    if (datatype == "FP64") return read_elements<double>(reader, shape);
    if (datatype == "INT32") return read_elements<std::int32_t>(reader, shape);
    if (datatype == "INT64") return read_elements<std::int64_t>(reader, shape);
    if (datatype == "BYTES") return read_strings(reader, shape);
    if (datatype == "BOOL") return read_elements<bool>(reader, shape);
    if (datatype == "UINT8") return read_elements<std::uint8_t>(reader, shape);
    if (datatype == "INT8") return read_elements<std::int8_t>(reader, shape);
    if (datatype == "UINT16") return read_elements<std::uint16_t>(reader, shape);
    if (datatype == "INT16") return read_elements<std::int16_t>(reader, shape);
    if (datatype == "UINT32") return read_elements<std::uint32_t>(reader, shape);
    if (datatype == "UINT64") return read_elements<std::uint64_t>(reader, shape);
    return {};
}

bool read_shape(Reader& reader, Shape& shape) {
    return reader.array([&] {
        std::int64_t extent = 0;
        if (shape.rank == kMaxRank || !reader.number(extent) || extent < 0) return false;
        if (extent != 0 && shape.count > (std::int64_t{1} << 40) / extent) return false;
        shape.extents[shape.rank++] = extent;
        shape.count *= extent;
        return true;
    });
}

Reference as_tuple(const Shape& shape) {
    Reference tuple(PyTuple_New(static_cast<Py_ssize_t>(shape.rank)));
    for (std::size_t i = 0; tuple && i < shape.rank; ++i) {
        PyObject* extent = PyLong_FromLongLong(shape.extents[i]);
        if (extent == nullptr) return {};
        PyTuple_SetItem(tuple.get(), static_cast<Py_ssize_t>(i), extent);
    }
    return tuple;
}

bool append(const Reference& list, Reference item) { return item && PyList_Append(list.get(), item.get()) == 0; }

// Marks a member as seen; false if it is repeated.
bool first_time(unsigned& seen, unsigned member) {
    if (seen & (1u << member)) return false;
    seen |= 1u << member;
    return true;
}

bool read_input(Reader& reader, const Reference& inputs) {
    enum Member : unsigned { kName, kDatatype, kShape, kContent, kParameters };
    unsigned seen = 0;
    Reference name, datatype, content;
    std::string_view datatype_text, early_data;
    Shape shape;
    const bool good = reader.object([&](std::string_view member) {
        std::string_view value;
        if (member == "name")
            return first_time(seen, kName) && reader.string(value) && (name = text(value));
        if (member == "datatype")
            return first_time(seen, kDatatype) && reader.string(datatype_text) && (datatype = text(datatype_text));
        if (member == "shape") return first_time(seen, kShape) && read_shape(reader, shape);
        if (member == "data") {
            if (!first_time(seen, kContent)) return false;
            // Elements can be read only when their datatype and shape are known.
            constexpr unsigned known = (1u << kDatatype) | (1u << kShape);
            if ((seen & known) != known) return reader.skip_value(early_data);
            content = read_data(reader, datatype_text, shape);
            return static_cast<bool>(content);
        }
        return member == "parameters" && first_time(seen, kParameters) && reader.object([&](std::string_view parameter) {
            std::int64_t size = 0;
            if (parameter != "binary_data_size" || !first_time(seen, kContent) || !reader.number(size) || size < 0)
                return false;
            content = Reference(PyLong_FromLongLong(size));
            return static_cast<bool>(content);
        });
    });
    if (!good || !name || !datatype || !(seen & (1u << kShape))) return false;
    if (!early_data.empty()) {
        Reader data(early_data);
        content = read_data(data, datatype_text, shape);
        if (!data.at_end()) return false;
    }
    if (!content) return false;
    Reference extents = as_tuple(shape);
    if (!extents) return false;
    return append(inputs, Reference(PyTuple_Pack(4, name.get(), datatype.get(), extents.get(), content.get())));
}

bool read_output(Reader& reader, const Reference& outputs) {
    enum Member : unsigned { kName, kBinary, kParameters };
    unsigned seen = 0;
    Reference name;
    bool binary = false;
    const bool good = reader.object([&](std::string_view member) {
        std::string_view value;
        if (member == "name") return first_time(seen, kName) && reader.string(value) && (name = text(value));
        return member == "parameters" && first_time(seen, kParameters) && reader.object([&](std::string_view parameter) {
            return parameter == "binary_data" && first_time(seen, kBinary) && reader.boolean(binary);
        });
    });
    return good && name && append(outputs, Reference(PyTuple_Pack(2, name.get(), binary ? Py_True : Py_False)));
}

}  // namespace

PyObject* parse_plain_infer(std::string_view json) {
    enum Member : unsigned { kId, kInputs, kOutputs, kParameters };
    unsigned seen = 0;
    bool binary_by_default = false;
    std::string_view other_outputs, other_parameters;
    Reader reader(json);
    Reference id = text(""), inputs(PyList_New(0)), outputs(PyList_New(0));
    const bool good = id && inputs && outputs && reader.object([&](std::string_view member) {
        std::string_view value;
        if (member == "id") return first_time(seen, kId) && reader.string(value) && (id = text(value));
        if (member == "inputs")
            return first_time(seen, kInputs) && reader.array([&] { return read_input(reader, inputs); });
        if (member == "outputs") {
            const auto read = [&] { return reader.array([&] { return read_output(reader, outputs); }); };
            return first_time(seen, kOutputs) && reader.read_or_skip(read, other_outputs);
        }
        const auto read = [&] {
            return reader.object([&](std::string_view parameter) {
                return parameter == "binary_data_output" && reader.boolean(binary_by_default);
            });
        };
        return member == "parameters" && first_time(seen, kParameters) && reader.read_or_skip(read, other_parameters);
    });
    PyObject* result = nullptr;
    if (good && reader.at_end() && (seen & (1u << kInputs))) {
        PyObject* chosen = seen & (1u << kOutputs) ? outputs.get() : Py_None;
        PyObject* by_default = binary_by_default ? Py_True : Py_False;
        std::string rest;
        for (const auto& [name, value] : {std::pair("outputs", other_outputs), {"parameters", other_parameters}}) {
            if (value.empty()) continue;
            rest.append(rest.empty() ? "{\"" : ",\"").append(name).append("\":").append(value);
        }
        if (rest.empty()) {
            result = PyTuple_Pack(4, id.get(), inputs.get(), chosen, by_default);
        } else if (Reference others = bytes(rest.append("}"))) {
            result = PyTuple_Pack(5, id.get(), inputs.get(), chosen, by_default, others.get());
        }
    }
    if (result == nullptr) PyErr_Clear();
    return result;
}

PyObject* split_strings(std::string_view data, std::size_t count) {
    Reference elements(PyList_New(0));
    if (!elements) return nullptr;
    std::size_t pos = 0;
    for (std::size_t i = 0; i < count && data.size() - pos >= 4; ++i) {
        std::size_t length = 0;
        for (std::size_t byte = 4; byte-- > 0;) length = length << 8 | static_cast<unsigned char>(data[pos + byte]);
        if (length > data.size() - pos - 4) break;
        Reference element = bytes(data.substr(pos + 4, length));
        if (!element || PyList_Append(elements.get(), element.get()) != 0) return nullptr;
        let_others_run(static_cast<Py_ssize_t>(i));
        pos += 4 + length;
    }
    return Py_BuildValue("(Nn)", elements.release(), static_cast<Py_ssize_t>(pos));
}

JsonCounts count_json(std::string_view json, std::size_t stop) {
    static const auto special = [] {
        std::array<bool, 256> table{};
        for (const unsigned char c : {'"', '[', '{', ','}) table[c] = true;
        return table;
    }();
    JsonCounts counts;
    counts.values = 1;
    const char* at = json.data();
    const char* const end = at + json.size();
    while (counts.values <= stop && counts.strings <= stop) {
        while (at != end && !special[static_cast<unsigned char>(*at)]) ++at;
        if (at == end) break;
        const char c = *at++;
        if (c == '"') {
            ++counts.strings;
            at = end_of_string(at, end);
        } else {
            ++counts.values;
            if (c != ',') ++counts.containers;
        }
    }
    return counts;
}

}  // namespace neso::wire
