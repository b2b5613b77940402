#include "model/pack.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <thread>
#include <vector>

namespace neso {
namespace {

// For fewer panels, starting a thread takes longer than packing them.
constexpr int kPanelsPerThread = 4;

// Call work(first, last) for ranges of rows that end at panel boundaries, so that threads do not share panels.
template <typename Work>
void for_panel_ranges(int first_output, int rows, int threads, const Work& work) {
    const int first_panel = first_output / kPanel;
    const int panels = (first_output + rows - 1) / kPanel + 1 - first_panel;
    threads = std::clamp(panels / kPanelsPerThread, 1, threads);
    std::vector<std::thread> helpers;
    for (int t = 0; t < threads; ++t) {
        const int from = (first_panel + int64_t(panels) * t / threads) * kPanel - first_output;
        const int to = (first_panel + int64_t(panels) * (t + 1) / threads) * kPanel - first_output;
        const int begin = std::max(0, from), end = std::min(rows, to);
        if (begin >= end) continue;
        if (t + 1 == threads) {
            work(begin, end);
        } else {
            helpers.emplace_back([&work, begin, end] { work(begin, end); });
        }
    }
    for (auto& helper : helpers) helper.join();
}

template <typename T>
T load_unaligned(const void* from, int64_t index) {
    T value;
    std::memcpy(&value, static_cast<const char*>(from) + index * int64_t(sizeof(T)), sizeof(T));
    return value;
}

// Values of the same 16-bit type are copied without conversion.
inline bf16 convert(bf16 value, bf16) { return value; }
inline f16 convert(f16 value, f16) { return value; }
template <typename S>
float convert(S value, float) {
    return to_float(value);
}
template <typename S>
bf16 convert(S value, bf16) {
    return to_bf16(to_float(value));
}

// Inputs are processed in blocks, so that the 16 rows of a panel are read and written by cache lines.
constexpr int kBlock = 64;

template <typename S, typename D>
void pack_rows(const void* source, int begin, int end, int inputs, int depth, int first_output, D* to) {
    constexpr int kInterleave = sizeof(D) == 2 && !std::is_same_v<D, f16> ? 2 : 1;
    for (int row = begin; row < end;) {
        const int output = first_output + row, lane = output % kPanel;
        const int lanes = std::min(kPanel - lane, end - row);
        D* panel = to + int64_t(output / kPanel) * depth * kPanel;
        for (int block = 0; block < inputs; block += kBlock) {
            const int stop = std::min(block + kBlock, inputs);
            for (int i = 0; i < lanes; ++i) {
                const int64_t from = int64_t(row + i) * inputs;
                D* column = panel + (lane + i) * kInterleave;
                for (int k = block; k < stop; ++k) {
                    column[k / kInterleave * (kPanel * kInterleave) + k % kInterleave] =
                        convert(load_unaligned<S>(source, from + k), D{});
                }
            }
        }
        row += lanes;
    }
}

template <typename S>
void pack_from(const void* source, int begin, int end, int inputs, WeightKind kind, int depth, int first_output,
               void* to) {
    if (kind == WeightKind::f32) {
        pack_rows<S, float>(source, begin, end, inputs, depth, first_output, static_cast<float*>(to));
    } else if (kind == WeightKind::bf16) {
        pack_rows<S, bf16>(source, begin, end, inputs, depth, first_output, static_cast<bf16*>(to));
    } else if constexpr (std::is_same_v<S, f16>) {
        pack_rows<f16, f16>(source, begin, end, inputs, depth, first_output, static_cast<f16*>(to));
    }
}

}  // namespace

void pack_dense(WeightKind source_kind, const void* source, int rows, int inputs, WeightKind kind, int depth,
                int first_output, void* to, int threads) {
    if (kind == WeightKind::f16 && source_kind != WeightKind::f16) {
        throw std::invalid_argument("only float16 weights are packed as float16");
    }
    for_panel_ranges(first_output, rows, threads, [&](int begin, int end) {
        switch (source_kind) {
            case WeightKind::f32: pack_from<float>(source, begin, end, inputs, kind, depth, first_output, to); break;
            case WeightKind::f16: pack_from<f16>(source, begin, end, inputs, kind, depth, first_output, to); break;
            default: pack_from<bf16>(source, begin, end, inputs, kind, depth, first_output, to);
        }
    });
}

void pack_codes(const uint8_t* codes, int rows, int inputs, WeightKind kind, int depth, int first_output, void* to,
                int threads) {
    const bool int4 = kind == WeightKind::int4;
    for_panel_ranges(first_output, rows, threads, [&](int begin, int end) {
        for (int row = begin; row < end; ++row) {
            const int output = first_output + row, lane = output % kPanel;
            auto* panel = static_cast<uint8_t*>(to) + int64_t(output / kPanel) * depth * kPanel / (int4 ? 2 : 1);
            const uint8_t* from = codes + int64_t(row) * inputs;
            for (int k = 0; k < inputs; ++k) {
                if (int4) {
                    panel[(k / 8 * kPanel + lane) * 4 + k % 4] |= uint8_t((from[k] & 15) << (k % 8 / 4 * 4));
                } else {
                    panel[(k / 4 * kPanel + lane) * 4 + k % 4] = from[k];
                }
            }
        }
    });
}

}  // namespace neso
