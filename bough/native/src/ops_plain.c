/* For every CPU: what the compiler makes of vectors of four with the instructions that all of its kind have. */
#include "cpu.h"
#include "ops_template.h"

const bough_ops *bough_ops_plain(void) { return &OPS; }

const bough_ops *bough_ops_here(void) {
    unsigned features = bough_cpu_features();
    const bough_ops *found = features & BOUGH_AVX512 ? bough_ops_avx512() : NULL;
    if (found == NULL && features & BOUGH_AVX2)
        found = bough_ops_avx2();
    return found != NULL ? found : bough_ops_plain();
}
