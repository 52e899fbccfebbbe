/* The product with AVX2 and the dot products of bytes that newer CPUs have without AVX-512. */
#include "linear_tile.h"

#if defined(__AVXVNNI__)
#include "linear_ymm.h"

DEFINE_KERNELS(avxvnni)
#else
const linear_kernels *linear_avxvnni(void) { return NULL; }
#endif
