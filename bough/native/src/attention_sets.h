/* Attention where a CPU has matrix tiles: queries of several sequences in one set, so that keys which they share are
 * made ready once.
 *
 * A set has some neighbouring tokens of a step with the query heads of a key head, or of all key heads one after the
 * other. Each head of a token is a column of the products; 16 columns fill a tile register. A set goes through its keys
 * run by run. In a run in which neighbouring pieces see the same slots, as sequences with a common beginning do, one
 * product has the columns of all of them.
 *
 * No column's result depends on the columns beside it, so neither does it on how the sets are made.
 */
#ifndef BOUGH_ATTENTION_SETS_H
#define BOUGH_ATTENTION_SETS_H

#include "attention.h"

enum { BOUGH_TILE_COLUMNS = 16, BOUGH_SET_TILES = 48, BOUGH_SET_PIECES = 128 };

/* Neighbouring tokens of one sequence. */
typedef struct {
    const int32_t *pages;
    int64_t token, position; /* of the first */
    int tokens;
    int first_column; /* its columns: the heads of the first token, those of the second, … */
} bough_piece;

typedef struct {
    const bough_attention_spec *spec;
    int page_size;
    int kv_head, kv_heads;          /* the first key head in hand, and how many */
    int first_head, heads;          /* of each, the query heads in hand, at most BOUGH_TILE_COLUMNS */
    const float *q;                 /* token 0's; head after head */
    int64_t q_stride;
    float *out; /* likewise */
    int64_t out_stride;
    int tiles; /* of each key head; BOUGH_SET_TILES in all, at most */
    int count;
    bough_piece pieces[BOUGH_SET_PIECES];
    int64_t first_run, end_run;
} bough_set;

/* What a CPU's matrix tiles compute. */
typedef struct {
    bool (*reads)(int number); /* whether caches of this type */
    size_t (*scratch)(int dim);
    void (*attend)(const bough_set *set, void *scratch);
    /* Of a set of one token, one run's result: `bough_result_floats` numbers. */
    void (*attend_run)(const bough_set *set, float *result, void *scratch);
    void (*join_runs)(const bough_set *set, const float *results, void *scratch);
} bough_set_kernels;

/* A column's outputs lie 16 apart, then the maxima and the sums of the 16 columns. */
static inline int64_t bough_padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }
static inline int64_t bough_result_floats(int64_t dim) { return (bough_padded_dim(dim) + 2) * BOUGH_TILE_COLUMNS; }

const bough_set_kernels *bough_attention_amx(void); /* NULL: not compiled */

/* NULL if this CPU has none that can read the layer's caches. */
const bough_set_kernels *bough_set_kernels_for(const bough_attention_spec *spec);

size_t bough_sets_scratch(const bough_set_kernels *kernels, const bough_attention_spec *spec, int threads);

void bough_attend_sets(const bough_set_kernels *kernels, const bough_attention_spec *spec, const bough_step *step,
                       const float *q, int64_t q_stride, float *out, int64_t out_stride, void *scratch,
                       bough_thread *thread);

#endif
