#define NESO_ISA neon_dot
#include "kernels/kernels.inc"
