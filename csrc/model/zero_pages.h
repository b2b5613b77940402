// Zeroed memory that is allocated by the system only when written.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace neso {

class ZeroPages {
   public:
    explicit ZeroPages(int64_t bytes) : bytes_(bytes) {
#if defined(__linux__)
        void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        madvise(found, bytes, MADV_HUGEPAGE);
        data_ = static_cast<char*>(found);
#else
        data_ = static_cast<char*>(std::calloc(1, bytes));
        if (data_ == nullptr) throw std::bad_alloc();
#endif
    }
    ~ZeroPages() {
#if defined(__linux__)
        munmap(data_, bytes_);
#else
        std::free(data_);
#endif
    }
    ZeroPages(const ZeroPages&) = delete;
    ZeroPages& operator=(const ZeroPages&) = delete;

    char* data() { return data_; }

   private:
    const int64_t bytes_;
    char* data_;
};

}  // namespace neso
