#if defined(__AVX512F__)
#include "ops_template.h"

const bough_ops *bough_ops_avx512(void) { return &OPS; }
#else
#include "ops.h"

#include <stddef.h>

const bough_ops *bough_ops_avx512(void) { return NULL; }
#endif
