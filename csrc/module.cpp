// The extension module neso._native: the kernels of the native runner, and the runner's inner loop.
#include "bindings/bindings.h"

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of the native runner.";
    // A server ends by exit, with its model and its threads alive.
    nanobind::set_leak_warnings(false);
    neso::bind_adapter(m);
    neso::bind_isa(m);
    neso::bind_matrix(m);
    neso::bind_memory(m);
    neso::bind_kernels(m);
    neso::bind_decoder(m);
    neso::bind_encoder(m);
    neso::bind_threads(m);
}
