/* The next token of rows that need no more than the best logit, or a temperature and a random number. */
#ifndef BOUGH_SAMPLING_H
#define BOUGH_SAMPLING_H

#include "team.h"

#include <stdbool.h>

enum { BOUGH_MAX_VOCABULARY = 1 << 19 };

typedef struct {
    int64_t count, vocabulary; /* at most BOUGH_MAX_VOCABULARY */
    const float *logits;       /* [count][vocabulary] */
    const float *temperatures; /* [count] 0: the best token */
    const double *numbers;     /* [count] random ones, from 0 to below 1 */
    int64_t *tokens;           /* [count] written; 0 where bad */
    bool *bad;                 /* [count] written: NaN or infinity, or no token is possible */
} bough_sampling;

BOUGH_EXPORT void bough_sample(const bough_sampling *rows, bough_crew *crew);

#endif
