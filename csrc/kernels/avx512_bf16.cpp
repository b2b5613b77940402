#define NESO_ISA avx512_bf16
#include "kernels/kernels.inc"
