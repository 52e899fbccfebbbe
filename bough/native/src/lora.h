/* What LoRA adapters add to the products of their rows: y += B · (A · x), in float32, also beside quantised weights.
 *
 * Adapters stay where the caller has them, as tiles of float32 (`linear_tile.h`). A row's result does not depend on the
 * rows beside it, to the last bit; rows without an adapter are not touched.
 */
#ifndef BOUGH_LORA_H
#define BOUGH_LORA_H

#include "step.h"
#include "thread_pool.h"

enum { BOUGH_MAX_RANK = 256 };

typedef struct {
    const float *down, *up; /* A [rank][inputs], and B [outputs][rank], which is scaled */
    int64_t rank;           /* 0: nothing is added */
} bough_thin;

/* The adapters of a product whose outputs are those of one matrix or of several. */
typedef struct {
    const bough_thin *thin; /* [slots][matrices]; of experts [slots][experts][matrices] */
    int64_t matrices, inputs;
    const int64_t *bands; /* [matrices + 1] where the outputs of each begin */
    int64_t step, gap;    /* from the inputs of one to those of the next, 0: all have the same; between their outputs */
} bough_lora;

/* Rows and where their results go. */
typedef struct {
    const int64_t *slots; /* [rows], or those of pairs of a slot and an expert; 0: no adapter */
    const float *x;
    int64_t x_stride;
    const bough_step *step; /* where x is NULL: each row is `scale` in the column that is its token id, and else 0 */
    float scale;
    float *y;
    int64_t y_stride;
    int64_t rows;
} bough_lora_rows;

/* Floats that a row needs besides. */
static inline int64_t bough_lora_width(const bough_lora *lora) { return lora->matrices * BOUGH_MAX_RANK; }

/* Called by all threads of a pool; ends with a barrier. `thin` is [rows][bough_lora_width]. */
void bough_add_lora(const bough_lora *lora, const bough_lora_rows *rows, float *thin, bough_thread *thread);

#endif
