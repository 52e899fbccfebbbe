/* What is computed with one row or one tile, without a thought for threads: a table for each kind of CPU.
 *
 * `ops_template.h` has the arithmetic; `ops_plain.c`, `ops_avx2.c` and `ops_avx512.c` compile it with their flags.
 * All numbers are float32 unless said otherwise.
 */
#ifndef BOUGH_OPS_H
#define BOUGH_OPS_H

#include <stdbool.h>
#include <stdint.h>

enum { BOUGH_MAX_HEAD_DIM = 256, BOUGH_MAX_LATENT_DIM = 576, BOUGH_MAX_QUERIES = 32 };
/* Keys are scored in blocks and gathered in runs that begin at multiples of these, whoever asks and whatever else is
 * in the step: so a token's result is the same to the last bit, alone or among others, decoded or prefilled. */
enum { BOUGH_BLOCK_KEYS = 64, BOUGH_RUN_KEYS = 128 };
enum bough_activation { BOUGH_SILU, BOUGH_GELU_TANH, BOUGH_GELU, BOUGH_RELU, BOUGH_SQUARE };
enum bough_number { BOUGH_FLOAT32 = 0, BOUGH_BFLOAT16 = 1, BOUGH_FLOAT16 = 2 };

/* Neighbouring queries of one sequence. */
typedef struct {
    const float *q; /* the first query's first head */
    float *out;     /* likewise: [queries][group][dim] */
    int queries;
    const int32_t *pages; /* of the sequence */
    int64_t position;     /* of the first query, whose last key that is; the next one sees one more */
} bough_segment;

/* Attention of some queries of one sequence, with the heads that share a key head, to its keys or one run of them; or of
 * several sequences with a common beginning. */
typedef struct {
    bough_segment segments[BOUGH_MAX_QUERIES];
    int count;                   /* of them */
    int64_t shared;              /* of several: their first keys, whole runs, that lie on the same pages */
    int64_t q_stride, out_stride; /* from query to query */
    int group, dim; /* all queries * group are at most BOUGH_MAX_QUERIES, dim at most BOUGH_MAX_HEAD_DIM; of latents,
                     * whose keys are their values, BOUGH_MAX_LATENT_DIM */
    const void *keys, *values;   /* of the head, in slot 0 */
    int number;                  /* enum bough_number: their type */
    int64_t slot_stride;         /* numbers from slot to slot */
    int page_size;
    int64_t first_key, last_key; /* of one sequence; the first is a multiple of BOUGH_BLOCK_KEYS */
    int64_t window;              /* keys that a query sees; 0: all */
    float scale, softcap;        /* softcap 0: none */
    const float *sinks;          /* [group] logits that join the softmax, or NULL */
    /* NULL, or for one run and one query [2 * group]: the scores' maxima and sums; `out` is then undivided, and one head
     * lies bough_run_dim() behind the other. */
    float *weight;
} bough_attend;

static inline int64_t bough_run_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

typedef struct bough_ops {
    /* out = norm(x + residual) * weight, sum = x + residual; residual and sum may both be NULL; a head norm in place. */
    void (*rms_norm)(const float *x, const float *residual, const float *weight, float eps, bool plus_one, int64_t size,
                     float *out, float *sum);
    /* The same centred, and without a residual; weight and bias may be NULL. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, int64_t size, float *out);
    /* Rotates the pairs (i, i + half) of a head. */
    void (*rotate)(float *head, const float *cos, const float *sin, int64_t half);
    void (*activate)(const float *x, enum bough_activation activation, float *out, int64_t size);
    void (*silu_mul)(const float *gate, const float *up, float *out, int64_t size);
    void (*gelu_tanh_mul)(const float *gate, const float *up, float *out, int64_t size);
    /* gate * sigmoid(slope * gate) * (up + 1), both kept within the limit. Of all three, out may be gate. */
    void (*clamped_mul)(const float *gate, const float *up, float *out, int64_t size, float slope, float limit);
    float (*dot)(const float *a, const float *b, int64_t size);
    void (*add_scaled)(float *out, const float *x, float scale, int64_t size);
    void (*softcap)(float *x, int64_t size, float cap);
    void (*attend)(const bough_attend *task);
    /* Puts the runs of one task together that lie `floats` apart: outputs, then maxima and sums. */
    void (*join)(const bough_attend *task, int64_t runs, const float *results, int64_t floats);
    /* Rounds to the type of a cache. */
    void (*narrow)(const float *x, int number, int64_t size, void *out);
    /* Adds minus infinity where bit i % 32 of word i / 32 is not set. */
    void (*forbid)(float *x, int64_t size, const uint32_t *allowed);
    /* The first place of the largest number, and that number; NaN counts as largest. */
    int64_t (*best)(const float *x, int64_t size, float *peak);
    /* The places of the numbers that are not below `bar`, in order; how many. */
    int64_t (*find_above)(const float *x, int64_t size, float bar, int32_t *places);
    /* x = exp((x - peak) / temperature). */
    void (*weigh)(float *x, int64_t size, float peak, float temperature);
    /* The sum of exp((x - peak) / temperature). */
    float (*sum_weights)(const float *x, int64_t size, float peak, float temperature);
    /* The first place at which the sum of the weights passes `target`; the last one with a weight if none does. */
    int64_t (*find_weight)(const float *x, int64_t size, float peak, float temperature, double target);
} bough_ops;

const bough_ops *bough_ops_plain(void);
const bough_ops *bough_ops_avx2(void);   /* NULL where it was not compiled */
const bough_ops *bough_ops_avx512(void);

/* The best table that this CPU can use. */
const bough_ops *bough_ops_here(void);

#endif
