/* A step as a tape: the operations of a forward pass, recorded once, run for any number of tokens.
 *
 * Every operation has its operands' addresses in it: buffers of [tokens][features] with room for the largest step. What
 * changes from step to step (ids, positions, pages, counts) is in the `bough_step`. Functions that add an operation
 * return 0, or -1 where there is no memory for it. `on_wanted` says that the rows of the operands are not the step's
 * tokens but the wanted ones. Of weights, the descriptions are copied, not the blobs.
 */
#ifndef BOUGH_TAPE_H
#define BOUGH_TAPE_H

#include "linear.h"
#include "step.h"
#include "team.h"

typedef struct bough_tape bough_tape;

BOUGH_EXPORT bough_tape *bough_tape_create(void);
BOUGH_EXPORT void bough_tape_destroy(bough_tape *tape);

/* Runs all operations; `scratch` has the bytes that bough_tape_scratch says, 64-byte aligned. */
BOUGH_EXPORT size_t bough_tape_scratch(const bough_tape *tape, int64_t tokens, int threads);
BOUGH_EXPORT void bough_tape_run(const bough_tape *tape, const bough_step *step, void *scratch, bough_crew *crew);

/* Seconds that the first thread has computed so far in operation `index`, if `BOUGH_NATIVE_PROFILE` is set. */
BOUGH_EXPORT double bough_tape_seconds(const bough_tape *tape, int64_t index);

BOUGH_EXPORT int bough_tape_embedding(bough_tape *tape, const bough_weight *table, float scale, float *out);
/* residual and sum may both be NULL. */
BOUGH_EXPORT int bough_tape_rms_norm(bough_tape *tape, bool on_wanted, const float *x, const float *residual,
                                     const float *weight, float eps, bool plus_one, int64_t size, float *out,
                                     float *sum);
/* bias may be NULL. */
BOUGH_EXPORT int bough_tape_linear(bough_tape *tape, bool on_wanted, const bough_weight *parts, int count,
                                   const float *x, int64_t x_stride, const float *bias, float *y, int64_t y_stride);
/* Norms may be NULL. number: enum bough_number, the type of the caches. group: whose slots and page table they have. */
BOUGH_EXPORT int bough_tape_norm_rope_store(bough_tape *tape, float *qkv, int heads, int kv_heads, int dim,
                                            const float *q_norm, const float *k_norm, float eps, bool plus_one,
                                            const float *cos, const float *sin, void *keys, void *values, int number,
                                            int group);
BOUGH_EXPORT int bough_tape_attention(bough_tape *tape, const float *q, int64_t q_stride, int heads, int kv_heads,
                                      int dim, const void *keys, const void *values, int number, int64_t window,
                                      float scale, float softcap, bool ends_only, int group, float *out);
/* activation: 0 silu, 1 gelu with tanh. x = gate | up */
BOUGH_EXPORT int bough_tape_gate(bough_tape *tape, bool on_wanted, const float *x, int activation, int64_t size,
                                 float *out);
/* The wanted ones of x's rows. */
BOUGH_EXPORT int bough_tape_take_wanted(bough_tape *tape, const float *x, int64_t x_stride, int64_t size, float *out);
BOUGH_EXPORT int bough_tape_softcap(bough_tape *tape, bool on_wanted, float *x, int64_t size, float cap);

#endif
