// The extension module neso._native: kernels and forward pass of the native runner.
#include "bindings/bindings.h"

NB_MODULE(_native, m) {
    m.doc() = "C++ kernels of the native runner.";
    // Servers exit while models and threads are alive, so leaks at exit are expected.
    nanobind::set_leak_warnings(false);
    neso::bind_adapter(m);
    neso::bind_isa(m);
    neso::bind_matrix(m);
    neso::bind_memory(m);
    neso::bind_kernels(m);
    neso::bind_parallel(m);
    neso::bind_decoder(m);
    neso::bind_encoder(m);
    neso::bind_threads(m);
}
