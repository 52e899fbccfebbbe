/* The next token of rows whose logits are the model's own, less what masks forbid: the best one, or one that is drawn by temperature from what
 * top-k, top-p and min-p leave, in that order. Equal logits rank by token id.
 *
 * What a row asks for is looked up in columns that have one entry for each of the engine's rows. Random numbers are a
 * function of a row's seed and of how many tokens it has generated, which is counted on.
 */
#ifndef BOUGH_SAMPLING_H
#define BOUGH_SAMPLING_H

#include "thread_pool.h"

#include <stdbool.h>
#include <stddef.h>

enum { BOUGH_MAX_VOCABULARY = 1 << 19 };

typedef struct {
    int64_t count, vocabulary; /* at most BOUGH_MAX_VOCABULARY */
    float *logits;             /* [count][vocabulary]; those of masked rows are changed */
    const int32_t *rows;       /* [count] places in the columns */
    const bool *random;        /* false: the best token */
    const float *temperature;
    const int64_t *top_k; /* the vocabulary's size, or more: off */
    const double *top_p;  /* 1: off */
    const float *min_p;   /* 0: off */
    const int64_t *seed;
    int64_t *generated; /* grows by one */
    int64_t *tokens;    /* [count] written; 0 where bad */
    bool *bad;          /* [count] written: NaN or infinity, or no token is possible */
    void *scratch;      /* bough_sampling_scratch bytes, 64-byte aligned */
    /* NULL, or what masked rows may sample: bit t % 32 of word t / 32 of their line allows token t. */
    const uint32_t *masks;     /* [lines][vocabulary / 32, rounded up] */
    const int32_t *mask_lines; /* [count] -1: any token */
} bough_sampling;

BOUGH_EXPORT size_t bough_sampling_scratch(int64_t vocabulary, int threads);

BOUGH_EXPORT void bough_sample(const bough_sampling *rows, bough_thread_pool *pool);

#endif
