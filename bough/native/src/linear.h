/* Products with weights that stay quantised: y = x · wᵀ + bias, for one token or many.
 *
 * A weight is packed once, into one blob that holds no pointers, so that it can lie in a file and be mapped. A blob is
 * the same for every CPU: tiles of 16 rows, in which four neighbouring inputs of a row lie side by side
 * (`linear_tile.h`). Scales and offsets of groups are kept as 16-bit floats, which is exact for all types of GGUF but
 * the K-quants, whose products of two scales are rounded (by 2^-12 at most).
 *
 * Activations are quantised on the way in: 8 bits, one scale for 32 inputs. A CPU with matrix tiles multiplies the
 * tokens of prompts as bfloat16 instead. Weights kept as floats are multiplied in float32. A token's result does not
 * depend on the tokens beside it, to the last bit: which way it goes is a matter of what it is, not of how many there
 * are.
 */
#ifndef BOUGH_LINEAR_H
#define BOUGH_LINEAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "step.h"
#include "thread_pool.h"

/* How a packed weight is kept. The numbers are stored in files. */
enum bough_format {
    BOUGH_FORMAT_F32 = 0,
    BOUGH_FORMAT_Q4 = 1,      /* scale * (code - 8), groups of 32 */
    BOUGH_FORMAT_Q4_MIN = 2,  /* scale * code + offset, groups of 32 */
    BOUGH_FORMAT_Q8 = 3,      /* scale * signed code, groups of 32 */
    BOUGH_FORMAT_Q8_MIN = 4,  /* scale * code + offset, groups of 32; codes below 128 */
    BOUGH_FORMAT_Q8_HALF = 5, /* scale * signed code, groups of 16 */
    BOUGH_FORMAT_BF16 = 6,    /* groups of 32, without scales */
    BOUGH_FORMAT_F16 = 7,     /* likewise */
    BOUGH_FORMATS = 8,
};

/* What rows can be packed from: GGUF's own numbers of its types. */
enum bough_source {
    BOUGH_SOURCE_F32 = 0,
    BOUGH_SOURCE_F16 = 1,
    BOUGH_SOURCE_Q4_0 = 2,
    BOUGH_SOURCE_Q4_1 = 3,
    BOUGH_SOURCE_Q5_0 = 6,
    BOUGH_SOURCE_Q5_1 = 7,
    BOUGH_SOURCE_Q8_0 = 8,
    BOUGH_SOURCE_Q4_K = 12,
    BOUGH_SOURCE_Q5_K = 13,
    BOUGH_SOURCE_Q6_K = 14,
    BOUGH_SOURCE_BF16 = 30,
};

typedef struct bough_weight {
    int64_t format;
    int64_t n, k;        /* outputs, inputs */
    const uint8_t *blob; /* 64-byte aligned */
} bough_weight;

/* The format that keeps a source as it is; -1 for a source that cannot be packed. */
BOUGH_EXPORT int bough_weight_format(int source);

/* Bytes of the packed blob; 0 where k does not fit the format (groups of 32 inputs). */
BOUGH_EXPORT size_t bough_weight_bytes(int format, int64_t n, int64_t k);

/* Packs `rows` rows of an n × k weight, beginning with `first_row`, a multiple of 16. Different threads may pack
 * different rows. Floats go into F32, Q8 and Q4_MIN; every type into its own format, and into F32. 0, or -1 where that
 * is not so. */
BOUGH_EXPORT int bough_weight_pack(int format, int source, int64_t n, int64_t k, const void *data, void *blob,
                                   int64_t first_row, int64_t rows);

/* One row as floats; for embeddings that share the weight of the logits. */
BOUGH_EXPORT void bough_weight_row(const bough_weight *weight, int64_t row, float *out);

/* Bytes that a call of bough_linear needs besides, 64-byte aligned; shared by the threads. Grows with m. */
BOUGH_EXPORT size_t bough_linear_scratch(const bough_weight *parts, int count, int64_t m, int threads);

/* Called by all threads of a pool; ends with a barrier. The parts have the same k; their outputs stand side by side in
 * y. `bias` (or NULL) has one number for each of them. Strides count floats. `prompts` marks the tokens of prompts. */
void bough_linear(const bough_weight *parts, int count, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                  const float *bias, int64_t m, bough_spans prompts, void *scratch, bough_thread *thread);

/* The same on a whole pool, for tests and for callers outside a step; all tokens are of a prompt, or none. */
BOUGH_EXPORT void bough_linear_alone(bough_thread_pool *pool, const bough_weight *parts, int count, const float *x,
                                     int64_t x_stride, float *y, int64_t y_stride, const float *bias, int64_t m,
                                     bool prompt, void *scratch);

/* The variant that this CPU gets for tokens, of a prompt or not: "plain", "avx2", "avxvnni", "avx512", "amx", "neon". */
BOUGH_EXPORT const char *bough_linear_variant(int format, bool prompt);

#endif
