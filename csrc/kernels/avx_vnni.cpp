#define NESO_ISA avx_vnni
#include "kernels/kernels.inc"
