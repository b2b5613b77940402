#include "wire/http_request.h"

#include <array>
#include <charconv>

namespace neso::wire {
namespace {

// Token characters of RFC 9110, section 5.6.2.
constexpr std::array<char, 256> make_lower_tokens() {
    std::array<char, 256> lower{};
    for (int c = '0'; c <= '9'; ++c) lower[c] = static_cast<char>(c);
    for (int c = 'a'; c <= 'z'; ++c) lower[c] = static_cast<char>(c);
    for (int c = 'A'; c <= 'Z'; ++c) lower[c] = static_cast<char>(c - 'A' + 'a');
    for (char c : std::string_view("!#$%&'*+-.^_`|~")) lower[static_cast<unsigned char>(c)] = c;
    return lower;
}

// Lower-case form of each character allowed in a field name, 0 for all others.
constexpr std::array<char, 256> kLowerTokens = make_lower_tokens();

constexpr std::size_t kMaxNameLength = 64;

bool is_visible(std::string_view value) {
    for (unsigned char c : value)
        if (c < 0x20 ? c != '\t' : c >= 0x7f) return false;
    return true;
}

std::string_view trim(std::string_view value) {
    auto blank = [](char c) { return c == ' ' || c == '\t'; };
    while (!value.empty() && blank(value.front())) value.remove_prefix(1);
    while (!value.empty() && blank(value.back())) value.remove_suffix(1);
    return value;
}

// Fields that affect the framing of the request or the connection.
bool is_special(std::string_view name, std::string_view value) {
    if (name == "connection") return value != "keep-alive" && value != "Keep-Alive";
    return name == "transfer-encoding" || name == "upgrade" || name == "expect" ||
           name == "trailer" || name == "te" || name == "proxy-connection";
}

struct Line {
    std::string_view method, target;
};

bool parse_line(std::string_view line, Line& out) {
    constexpr std::string_view kVersion = " HTTP/1.1";
    if (!line.ends_with(kVersion)) return false;
    line.remove_suffix(kVersion.size());
    const auto space = line.find(' ');
    if (space == line.npos) return false;
    out.method = line.substr(0, space);
    out.target = line.substr(space + 1);
    if (out.method != "POST" && out.method != "GET") return false;
    if (out.target.empty() || out.target.front() != '/') return false;
    for (unsigned char c : out.target)
        if (c <= 0x20 || c >= 0x7f || c == '?' || c == '#') return false;
    return true;
}

bool parse_length(std::string_view value, std::size_t& length) {
    if (value.empty() || value.size() > 12 || value.front() < '0' || value.front() > '9') return false;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), length);
    return error == std::errc() && end == value.data() + value.size();
}

}  // namespace

PyObject* parse_plain_request(std::string_view data, std::size_t max_head, std::size_t max_body) {
    const auto head_end = data.substr(0, max_head).find("\r\n\r\n");
    if (head_end == data.npos) return nullptr;
    std::string_view head = data.substr(0, head_end + 2), body = data.substr(head_end + 4);
    auto end = head.find("\r\n");
    Line line;
    if (!parse_line(head.substr(0, end), line)) return nullptr;
    Reference headers(PyDict_New());
    if (!headers) return nullptr;
    bool has_host = false;
    std::size_t length = 0;
    for (std::size_t at = end + 2; at < head.size(); at = end + 2) {
        end = head.find("\r\n", at);
        const std::string_view field = head.substr(at, end - at);
        const auto colon = field.find(':');
        if (colon == field.npos || colon == 0 || colon > kMaxNameLength) return nullptr;
        char buffer[kMaxNameLength];
        for (std::size_t i = 0; i < colon; ++i)
            if ((buffer[i] = kLowerTokens[static_cast<unsigned char>(field[i])]) == 0) return nullptr;
        const std::string_view name(buffer, colon), value = trim(field.substr(colon + 1));
        if (is_special(name, value) || !is_visible(value)) return nullptr;
        has_host |= name == "host";
        if (name == "content-length" && !parse_length(value, length)) return nullptr;
        Reference key = bytes(name), content = bytes(value);
        if (!key || !content) return PyErr_Clear(), nullptr;
        // A repeated field would have to be joined to the first.
        if (PyDict_Contains(headers.get(), key.get()) != 0 ||
            PyDict_SetItem(headers.get(), key.get(), content.get()) != 0)
            return PyErr_Clear(), nullptr;
    }
    if (!has_host || length != body.size() || length > max_body) return nullptr;
    Reference method = text(line.method), target = bytes(line.target), content = bytes(body);
    if (!method || !target || !content) return PyErr_Clear(), nullptr;
    PyObject* result = PyTuple_Pack(4, method.get(), target.get(), headers.get(), content.get());
    if (result == nullptr) PyErr_Clear();
    return result;
}

}  // namespace neso::wire
