#define NESO_ISA avx512
#include "kernels/kernels.inc"
