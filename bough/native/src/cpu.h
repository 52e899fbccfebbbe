/* Which instructions this CPU has, as tiers for which there are variants of the kernels.
 *
 * A variant is a source file named after its tier (`ops_avx2.c`), compiled with that tier's flags. Each such file must
 * compile everywhere: it exports one function that returns its table of functions, or NULL where the compiler was not
 * given (or does not know) the flags.
 */
#ifndef BOUGH_CPU_H
#define BOUGH_CPU_H

#include "thread_pool.h"

enum bough_feature {
    BOUGH_AVX2 = 1 << 0,     /* and FMA, F16C */
    BOUGH_AVX512 = 1 << 1,   /* F, BW, VL, DQ and VNNI */
    BOUGH_NEON = 1 << 2,     /* and dot products of bytes, and arithmetic with 16-bit floats (ARMv8.2) */
    BOUGH_AVXVNNI = 1 << 3,  /* dot products of bytes in AVX2's registers */
    BOUGH_AMX = 1 << 4,      /* tiles of bytes and bfloat16; the system must grant their use too */
};

/* What may be used: what the CPU has, less what `bough_cpu_allow` left out. */
BOUGH_EXPORT unsigned bough_cpu_features(void);

/* Leaves out all features that are not in `mask`; for tests of the other variants. */
BOUGH_EXPORT void bough_cpu_allow(unsigned mask);

#endif
