// Appends JSON to a reusable buffer.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace neso::wire {

class JsonWriter {
  public:
    explicit JsonWriter(std::string& out) : out_(out) { out_.clear(); }

    void raw(std::string_view text) { out_.append(text); }

    // False if the text must be escaped.
    bool string(std::string_view text) {
        for (unsigned char c : text)
            if (c < 0x20 || c == '"' || c == '\\') return false;
        out_.push_back('"');
        out_.append(text);
        out_.push_back('"');
        return true;
    }

    bool number(std::integral auto value) {
        char buffer[24];
        const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
        out_.append(buffer, static_cast<std::size_t>(end - buffer));
        return true;
    }

    bool number(bool value) {
        raw(value ? "true" : "false");
        return true;
    }

    // Shortest digits that round-trip, formatted like orjson. False if the number is not finite.
    bool number(double value) {
        if (!std::isfinite(value)) return false;
        char buffer[32];
        // Fast path for small integers, which are common.
        if (std::fabs(value) < 1e15 && value == std::trunc(value) && (value != 0 || !std::signbit(value))) {
            number(static_cast<std::int64_t>(value));
            raw(".0");
            return true;
        }
        const char* end =
            std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
        std::string_view text(buffer, static_cast<std::size_t>(end - buffer));
        if (text.front() == '-') {
            out_.push_back('-');
            text.remove_prefix(1);
        }
        layout(text);
        return true;
    }

    bool number(float value) { return number(static_cast<double>(value)); }

  private:
    // `text`: d[.ddd]e±xx
    void layout(std::string_view text) {
        const auto e = text.find('e');
        int exponent = 0;
        std::from_chars(text.data() + e + (text[e + 1] == '+' ? 2 : 1), text.data() + text.size(), exponent);
        char digits[24];
        digits[0] = text.front();
        std::size_t count = 1;
        if (e > 2) {
            std::memcpy(digits + 1, text.data() + 2, e - 2);
            count = e - 1;
        }
        if (count == 1 && digits[0] == '0') return raw("0.0");
        const std::string_view all(digits, count);
        const int point = exponent + 1;  // number of digits before the decimal point
        if (point > 16 || point <= -5) {
            out_.push_back(digits[0]);
            if (count > 1) {
                out_.push_back('.');
                out_.append(all.substr(1));
            }
            raw(exponent < 0 ? "e" : "e+");
            number(exponent);
        } else if (point <= 0) {
            raw("0.");
            out_.append(static_cast<std::size_t>(-point), '0');
            out_.append(all);
        } else if (static_cast<std::size_t>(point) >= count) {
            out_.append(all);
            out_.append(static_cast<std::size_t>(point) - count, '0');
            raw(".0");
        } else {
            out_.append(all.substr(0, static_cast<std::size_t>(point)));
            out_.push_back('.');
            out_.append(all.substr(static_cast<std::size_t>(point)));
        }
    }

    std::string& out_;
};

}  // namespace neso::wire
