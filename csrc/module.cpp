// The extension module neso._native. The kernels of the native runner are registered here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

namespace nb = nanobind;

namespace {

// Instruction sets that kernels may be dispatched on, best first; found by cpuid at run time, so that one
// wheel serves every x86-64 machine. Empty where the compiler or the machine has no such query.
std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bf16")) found.emplace_back("avx512bf16");
    if (__builtin_cpu_supports("avx512vnni")) found.emplace_back("avx512vnni");
    if (__builtin_cpu_supports("avx512f")) found.emplace_back("avx512f");
    if (__builtin_cpu_supports("avx2")) found.emplace_back("avx2");
    if (__builtin_cpu_supports("fma")) found.emplace_back("fma");
#elif defined(__aarch64__)
    found.emplace_back("neon");
#endif
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of the native runner.";
    m.def("cpu_features", &cpu_features, "Instruction sets of this CPU that kernels may use, best first.");
}
