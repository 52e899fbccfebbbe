/* How products are cut into runs of neighbouring tiles, for all that deal these out to threads. */
#ifndef BOUGH_LINEAR_RUNS_H
#define BOUGH_LINEAR_RUNS_H

#include "linear_tile.h"

/* Some neighbouring tiles of one part. */
typedef struct {
    const bough_weight *weight;
    int64_t first_tile, tiles;
    int64_t first_output; /* where the part's outputs begin */
} tile_run;

/* The arguments of `bough_linear`. */
typedef struct {
    const bough_weight *parts;
    int count;
    const float *x;
    int64_t x_stride;
    float *y;
    int64_t y_stride;
    const float *bias;
    int64_t m;
    void *scratch;
} linear_call;

/* The variant that this CPU gets for few tokens. */
const linear_kernels *linear_narrow(void);

/* How many bytes at the beginning of the scratch are the threads' own, at the same place in all calls: a thread that
 * comes late may still write there while the others are further. */
int64_t linear_shared_start(const bough_weight *parts, int count, int threads);

/* How many tiles a thread takes at a time, of a product with so many tokens that is done `times`: few enough that all
 * threads end together, RUN_TILES at most. */
int64_t linear_run_size(const bough_weight *parts, int count, int64_t tokens, int64_t times, int threads);

int64_t linear_count_runs(const bough_weight *parts, int count, int64_t size);

tile_run linear_find_run(const bough_weight *parts, int64_t size, int64_t index);

const uint8_t *linear_run_start(tile_run run);

/* Multiplies `count` tokens with a run. `tokens` are all tokens of the call, quantised. `next` is the first tile of what
 * this thread does after, or NULL. */
void linear_multiply_run(const linear_call *call, const linear_kernels *kernels, const tile_run *run,
                         const uint8_t *next, const uint8_t *tokens, int64_t first_token, int64_t count,
                         bough_thread *thread);

#endif
