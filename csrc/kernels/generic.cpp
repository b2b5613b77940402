#define NESO_ISA generic
#include "kernels/kernels.inc"
