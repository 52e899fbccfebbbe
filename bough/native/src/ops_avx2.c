#if defined(__AVX2__) && defined(__FMA__)
#include "ops_template.h"

const bough_ops *bough_ops_avx2(void) { return &OPS; }
#else
#include "ops.h"

#include <stddef.h>

const bough_ops *bough_ops_avx2(void) { return NULL; }
#endif
