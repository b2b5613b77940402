// Scratch memory that grows and is zeroed only on allocation.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace neso {

// Size of a cache line and of a row of a tile register, in bytes.
constexpr int64_t kAlignment = 64;

template <typename T>
class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(int64_t count) { reserve(count); }
    Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    // Ensure capacity for `count` values. Growing discards the content; new memory is zeroed.
    void reserve(int64_t count) {
        if (count <= count_) return;
        std::free(data_);
        const int64_t alignment = count * int64_t(sizeof(T)) >= kHugePage ? kHugePage : kAlignment;
        const int64_t bytes = (count * int64_t(sizeof(T)) + alignment - 1) / alignment * alignment;
        data_ = static_cast<T*>(std::aligned_alloc(alignment, bytes));
        if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
        // Weights and caches are streamed: with 4 KB pages, TLB misses cost more than a tenth of the bandwidth.
        if (alignment == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
        std::memset(static_cast<void*>(data_), 0, bytes);
        count_ = count;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    int64_t size() const { return count_; }

   private:
    static constexpr int64_t kHugePage = 2 << 20;

    T* data_ = nullptr;
    int64_t count_ = 0;
};

// Row stride of a table in bytes: an odd number of cache lines. With a power of two, all rows would map to the same
// few cache sets.
constexpr int64_t spread_stride(int64_t row_bytes) { return (row_bytes + 127) / 128 * 128 + 64; }

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace neso
