/* A mixture of experts: which of them a token is sent to, what each of them weighs, and the products of each token with
 * its own few of many packed weights.
 *
 * Rows are sorted by expert, so that an expert's weights are read once for all its tokens. A token's result does not
 * depend on the tokens beside it, to the last bit.
 */
#ifndef BOUGH_EXPERTS_H
#define BOUGH_EXPERTS_H

#include "linear.h"
#include "lora.h"
#include "ops.h"

enum { BOUGH_MAX_EXPERTS = 1024 };

/* As `MoEConfig` says it. */
typedef struct {
    const float *router;              /* [experts][size] */
    const float *bias, *correction;   /* [experts] or NULL: of the logits; of the scores, when choosing only */
    int64_t size;
    int experts, per_token;
    int scores; /* 0 softmax, 1 sigmoid, 2 SparseMixer */
    int groups, top_groups;
    bool best_two; /* a group counts as its best two experts together, not as its best */
    bool renormalise, simulate;
    float scale;
    float jitter; /* SparseMixer weighs an expert among those whose logits are not further below its own */
    const bough_lora *lora; /* that adapters add to the logits, or NULL */
    float *thin;            /* [rows][bough_lora_width] to work in */
} bough_routing;

/* Called by all threads of a pool; ends with a barrier. `scores` [rows][experts] is memory to work in; ids and weights
 * are [rows][per_token]. `slots` [rows] are those of adapters, or NULL: none. */
void bough_route(const bough_routing *routing, const float *x, int64_t rows, const int64_t *slots, float *scores,
                 int32_t *ids, float *weights, const bough_ops *ops, bough_thread *thread);

typedef struct {
    const bough_weight *weights;             /* [experts][3]: gate, up, down; all experts have the same shapes */
    const float *gate_up_bias, *down_bias;   /* [experts][outputs] or NULL */
    int experts, per_token;
    int activation;     /* 0 silu, 1 gelu with tanh, 2 clamped */
    float slope, limit; /* of a clamped gate */
    const bough_lora *lora; /* [2] that adapters add to gate and up, and to down; or NULL */
} bough_experts;

/* Bytes that a call needs, 64-byte aligned; shared by the threads. */
size_t bough_experts_scratch(const bough_experts *experts, int64_t rows, int threads);

/* Called by all threads of a pool; ends with a barrier. x and out are [rows][inputs of a gate]. */
void bough_run_experts(const bough_experts *experts, const float *x, int64_t rows, const int64_t *slots,
                       const int32_t *ids, const float *weights, float *out, void *scratch, const bough_ops *ops,
                       bough_thread *thread);

#endif
