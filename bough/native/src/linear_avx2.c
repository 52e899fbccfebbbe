/* The product with AVX2 alone. */
#include "linear_tile.h"

#if defined(__AVX2__)
#include "linear_ymm.h"

DEFINE_KERNELS(avx2)
#else
const linear_kernels *linear_avx2(void) { return NULL; }
#endif
