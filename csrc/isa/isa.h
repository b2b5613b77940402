// Instruction sets that kernels can use on this machine.
#pragma once

#include <string>
#include <vector>

namespace neso {

// Levels that kernels are compiled for. Each includes the previous one, except that avx512 does not include avx_vnni,
// and that aarch64 has its own levels.
enum class Isa { generic, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx, neon_dot, neon_bf16 };

const char* isa_name(Isa isa);

// Throws std::invalid_argument for an unknown level, or a level that this CPU does not support.
Isa isa_from_name(const std::string& name);

// Levels that this CPU and operating system support, best first; never empty.
std::vector<Isa> supported_isas();

// The level named by the environment variable NESO_ISA, by default the best level.
Isa default_isa();

}  // namespace neso
