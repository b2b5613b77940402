#define NESO_ISA neon_bf16
#include "kernels/kernels.inc"
