#include "isa/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace neso {
namespace {

// Best first.
constexpr Isa kLevels[] = {Isa::amx,  Isa::avx512_bf16, Isa::avx512_vnni, Isa::avx512, Isa::avx_vnni,
                           Isa::avx2, Isa::neon_bf16,   Isa::neon_dot,    Isa::generic};

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

// What the CPU has and the operating system saves at a context switch. Read by cpuid, because GCC 12's
// __builtin_cpu_supports does not know AMX, and with zig it knows nothing at all.
struct Cpu {
    bool avx2 = false, avx_vnni = false, avx512 = false, avx512_vnni = false, avx512_bf16 = false, amx = false;

    Cpu() {
        unsigned a, b, c, d;
        constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kF16c = 1u << 29;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, kFma | kOsXsave | kF16c)) return;
        unsigned saved, high;
        __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        unsigned max, ignored;
        if (!__get_cpuid_count(7, 0, &max, &b, &c, &d)) return;
        constexpr unsigned kAvx2 = 1u << 5, kAvxState = 0x6;
        avx2 = has(b, kAvx2) && has(saved, kAvxState);
        constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kAvx512State = 0xe6;
        avx512 = avx2 && has(b, kF | kDq | kBw | kVl) && has(saved, kAvx512State);
        constexpr unsigned kVnni = 1u << 11, kBf16 = 1u << 5, kAvxVnni = 1u << 4;
        avx512_vnni = avx512 && has(c, kVnni);
        if (max < 1 || !__get_cpuid_count(7, 1, &a, &ignored, &ignored, &ignored)) return;
        avx_vnni = avx2 && has(a, kAvxVnni);
        avx512_bf16 = avx512_vnni && has(a, kBf16);
        constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kTileState = 0x60000;
        amx = avx512_bf16 && has(d, kAmxBf16 | kAmxTile | kAmxInt8) && has(saved, kTileState) &&
              request_tile_registers();
    }

    static bool has(unsigned value, unsigned bits) { return (value & bits) == bits; }
};

bool supports(Isa isa) {
    static const Cpu cpu;
    switch (isa) {
        case Isa::generic: return true;
        case Isa::avx2: return cpu.avx2;
        case Isa::avx_vnni: return cpu.avx_vnni;
        case Isa::avx512: return cpu.avx512;
        case Isa::avx512_vnni: return cpu.avx512_vnni;
        case Isa::avx512_bf16: return cpu.avx512_bf16;
        case Isa::amx: return cpu.amx;
        default: return false;
    }
}

#elif defined(__aarch64__)

// Dot products of 8-bit integers and of bfloat16 numbers. NEON itself is part of every aarch64 CPU.
struct Cpu {
    bool dot = false, bf16 = false;

    Cpu() {
#if defined(__linux__)
        constexpr unsigned long kDot = 1ul << 20, kBf16 = 1ul << 14;  // HWCAP_ASIMDDP, HWCAP2_BF16
        dot = (getauxval(AT_HWCAP) & kDot) != 0;
        bf16 = dot && (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
        dot = has("hw.optional.arm.FEAT_DotProd");
        bf16 = dot && has("hw.optional.arm.FEAT_BF16");
#endif
    }

#if defined(__APPLE__)
    static bool has(const char* name) {
        int value = 0;
        size_t size = sizeof(value);
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    }
#endif
};

bool supports(Isa isa) {
    static const Cpu cpu;
    switch (isa) {
        case Isa::generic: return true;
        case Isa::neon_dot: return cpu.dot;
        case Isa::neon_bf16: return cpu.bf16;
        default: return false;
    }
}

#else

bool supports(Isa isa) { return isa == Isa::generic; }

#endif

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::generic: return "generic";
        case Isa::avx2: return "avx2";
        case Isa::avx_vnni: return "avx_vnni";
        case Isa::avx512: return "avx512";
        case Isa::avx512_vnni: return "avx512_vnni";
        case Isa::avx512_bf16: return "avx512_bf16";
        case Isa::amx: return "amx";
        case Isa::neon_dot: return "neon_dot";
        case Isa::neon_bf16: return "neon_bf16";
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
