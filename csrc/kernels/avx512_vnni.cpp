#define NESO_ISA avx512_vnni
#include "kernels/kernels.inc"
