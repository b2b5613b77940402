#include "wire/protobuf_scan.h"

namespace neso::wire {
namespace {

// Wire types.
enum : unsigned { kVarint = 0, kFixed64 = 1, kLength = 2, kGroupStart = 3, kGroupEnd = 4, kFixed32 = 5 };

// What the bytes of a length-delimited field are.
enum class Content : std::uint8_t { kOpaque, kVarints, kFixed32s, kFixed64s, kMessage };

struct Schema;

struct Field {
    unsigned number;
    Content content;
    const Schema* message = nullptr;  // of kMessage
};

// Fields with content other than kOpaque; all others are skipped.
struct Schema {
    Field fields[8];
};

constexpr Schema kParameter{};  // InferParameter, ModelRepositoryParameter
constexpr Schema kParameterEntry{{{2, Content::kMessage, &kParameter}}};
constexpr Schema kContents{{{1, Content::kVarints},
                            {2, Content::kVarints},
                            {3, Content::kVarints},
                            {4, Content::kVarints},
                            {5, Content::kVarints},
                            {6, Content::kFixed32s},
                            {7, Content::kFixed64s}}};
constexpr Schema kInput{{{3, Content::kVarints},
                         {4, Content::kMessage, &kParameterEntry},
                         {5, Content::kMessage, &kContents}}};
constexpr Schema kOutput{{{2, Content::kMessage, &kParameterEntry}}};
constexpr Schema kInferRequest{{{4, Content::kMessage, &kParameterEntry},
                                {5, Content::kMessage, &kInput},
                                {6, Content::kMessage, &kOutput}}};
constexpr Schema kLoadRequest{{{3, Content::kMessage, &kParameterEntry}}};
constexpr unsigned kRawInputContents = 7;

constexpr int kMaxDepth = 100;  // of groups and messages, as in protobuf
constexpr const char* kMalformed = "malformed field";
constexpr const char* kTruncated = "the last field is cut off";

class Scanner {
  public:
    Scanner(const ScanLimits& limits, Scan& scan) : limits_(limits), scan_(scan) {}

    // Scans the fields of one message. Returns false after an error.
    bool message(std::string_view data, const Schema& schema, bool split) {
        const char* pos = data.data();
        const char* const end = pos + data.size();
        while (pos < end) {
            const char* const start = pos;
            std::uint64_t tag;
            if (!read_tag(pos, end, tag) || !count(1)) return false;
            const unsigned type = tag & 7;
            if (type != kLength) {
                if (!skip(pos, end, tag, 0)) return false;
            } else {
                std::string_view content;
                if (!read_content(pos, end, content)) return false;
                const unsigned number = static_cast<unsigned>(tag >> 3);
                if (split && number == kRawInputContents) {
                    scan_.raw.push_back(content);
                    continue;
                }
                if (!descend(content, schema, number)) return false;
            }
            if (split) add_rest(start, pos);
        }
        return true;
    }

  private:
    bool fail(const char* error) {
        scan_.error = error;
        return false;
    }

    bool count(std::uint64_t values) {
        scan_.values += values;
        if (scan_.values <= limits_.max_values) return true;
        scan_.exceeds_limits = true;
        return fail("too many fields and elements");
    }

    bool read_varint(const char*& pos, const char* end, std::uint64_t& value, int max_bytes) {
        value = 0;
        for (int i = 0; i < max_bytes; ++i) {
            if (pos == end) return fail(kTruncated);
            const auto byte = static_cast<unsigned char>(*pos++);
            value |= static_cast<std::uint64_t>(byte & 0x7f) << (7 * i);
            if (byte < 0x80) return true;
        }
        return fail("a varint is too long");
    }

    bool read_tag(const char*& pos, const char* end, std::uint64_t& tag) {
        if (!read_varint(pos, end, tag, 5)) return false;
        if (tag > UINT32_MAX || (tag >> 3) == 0) return fail(kMalformed);
        return true;
    }

    bool read_content(const char*& pos, const char* end, std::string_view& content) {
        std::uint64_t size;
        if (!read_varint(pos, end, size, 10)) return false;
        if (size > static_cast<std::uint64_t>(end - pos)) return fail(kTruncated);
        content = {pos, static_cast<std::size_t>(size)};
        pos += size;
        return true;
    }

    // Skips the value of a field whose tag was read.
    bool skip(const char*& pos, const char* end, std::uint64_t tag, int depth) {
        std::uint64_t value;
        std::string_view content;
        switch (tag & 7) {
            case kVarint: return read_varint(pos, end, value, 10);
            case kFixed64: return advance(pos, end, 8);
            case kFixed32: return advance(pos, end, 4);
            case kLength: return read_content(pos, end, content);
            case kGroupStart: return skip_group(pos, end, tag >> 3, depth + 1);
            default: return fail(kMalformed);
        }
    }

    bool skip_group(const char*& pos, const char* end, std::uint64_t number, int depth) {
        if (depth > kMaxDepth) return fail("groups are nested too deep");
        while (true) {
            std::uint64_t tag;
            if (!read_tag(pos, end, tag) || !count(1)) return false;
            if ((tag & 7) == kGroupEnd) return (tag >> 3) == number || fail(kMalformed);
            if (!skip(pos, end, tag, depth)) return false;
        }
    }

    bool advance(const char*& pos, const char* end, int size) {
        if (end - pos < size) return fail(kTruncated);
        pos += size;
        return true;
    }

    // Counts the parts of a length-delimited field.
    bool descend(std::string_view content, const Schema& schema, unsigned number) {
        for (const Field& field : schema.fields) {
            if (field.number != number) continue;
            switch (field.content) {
                case Content::kVarints: {
                    std::uint64_t varints = 0;
                    for (const char byte : content) varints += static_cast<unsigned char>(byte) < 0x80;
                    return count(varints);
                }
                case Content::kFixed32s: return count(content.size() / 4);
                case Content::kFixed64s: return count(content.size() / 8);
                case Content::kMessage:
                    if (++messages_ > limits_.max_messages) {
                        scan_.exceeds_limits = true;
                        return fail("too many tensors and parameters");
                    }
                    return message(content, *field.message, false);
                case Content::kOpaque: break;
            }
        }
        return true;
    }

    void add_rest(const char* start, const char* end) {
        auto& rest = scan_.rest;
        if (!rest.empty() && rest.back().data() + rest.back().size() == start)
            rest.back() = {rest.back().data(), static_cast<std::size_t>(end - rest.back().data())};
        else
            rest.emplace_back(start, static_cast<std::size_t>(end - start));
    }

    const ScanLimits& limits_;
    Scan& scan_;
    std::uint64_t messages_ = 0;
};

}  // namespace

Scan scan_infer_request(std::string_view data, const ScanLimits& limits, bool split) {
    Scan scan;
    Scanner(limits, scan).message(data, kInferRequest, split);
    return scan;
}

Scan scan_load_request(std::string_view data, const ScanLimits& limits) {
    Scan scan;
    Scanner(limits, scan).message(data, kLoadRequest, false);
    return scan;
}

}  // namespace neso::wire
