#include "isa/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace neso {
namespace {

constexpr Isa kLevels[] = {Isa::amx, Isa::avx512_bf16, Isa::avx512, Isa::avx2, Isa::generic};

#if defined(__x86_64__)

// Linux requires a process to request permission for the 8 KB of tile registers; it applies to all threads.
bool request_tile_registers() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILE_DATA
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

// GCC 12's __builtin_cpu_supports does not know AMX, so cpuid leaf 7 is read.
bool has_amx() {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
    constexpr unsigned kAll = kAmxBf16 | kAmxTile | kAmxInt8;
    return (d & kAll) == kAll && request_tile_registers();
}

bool supports(Isa isa) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case Isa::generic: return true;
        case Isa::avx2: return avx2;
        case Isa::avx512: return avx512;
        case Isa::avx512_bf16: return bf16;
        case Isa::amx: return bf16 && has_amx();
    }
    return false;
}

#else

bool supports(Isa isa) { return isa == Isa::generic; }

#endif

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::generic: return "generic";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
        case Isa::avx512_bf16: return "avx512_bf16";
        case Isa::amx: return "amx";
    }
    return "unknown";
}

Isa isa_from_name(const std::string& name) {
    std::string known;
    for (Isa isa : kLevels) {
        if (name == isa_name(isa)) {
            if (!supports(isa)) throw std::invalid_argument("this CPU has no " + name);
            return isa;
        }
        known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
    }
    throw std::invalid_argument("unknown instruction set '" + name + "', known are " + known);
}

std::vector<Isa> supported_isas() {
    std::vector<Isa> found;
    for (Isa isa : kLevels) {
        if (supports(isa)) found.push_back(isa);
    }
    return found;
}

Isa default_isa() {
    const char* forced = std::getenv("NESO_ISA");
    return forced && *forced ? isa_from_name(forced) : supported_isas().front();
}

}  // namespace neso
