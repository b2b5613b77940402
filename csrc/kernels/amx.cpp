#define NESO_ISA amx
#include "kernels/kernels.inc"
