// Instruction sets that kernels can use on this machine.
#pragma once

#include <string>
#include <vector>

namespace neso {

// Levels that kernels are compiled for. Those of x86-64, and those of aarch64, each include the previous one.
enum class Isa { generic, avx2, avx512, avx512_bf16, amx, neon_dot, neon_bf16 };

const char* isa_name(Isa isa);

// Throws std::invalid_argument for an unknown level, or a level that this CPU does not support.
Isa isa_from_name(const std::string& name);

// Levels that this CPU and operating system support, best first; never empty.
std::vector<Isa> supported_isas();

// The level named by the environment variable NESO_ISA, by default the best level.
Isa default_isa();

}  // namespace neso
