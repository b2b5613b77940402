// Which instruction sets the kernels may use on this machine.
#pragma once

#include <string>
#include <vector>

namespace neso {

// Levels that the kernels are compiled for, best last. Each contains the one before it, on x86-64.
enum class Isa { generic, avx2, avx512, avx512_bf16, amx };

const char* isa_name(Isa isa);

// Throws std::invalid_argument that lists the levels when there is none of that name, or not on this CPU.
Isa isa_from_name(const std::string& name);

// The levels that this CPU (and the operating system) can run, best first; never empty.
std::vector<Isa> supported_isas();

// The level that the environment variable NESO_ISA names, else the best.
Isa default_isa();

}  // namespace neso
