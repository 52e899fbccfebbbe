/* Which experts of a mixture a token is sent to, and what each of them weighs. */
#ifndef BOUGH_ROUTING_H
#define BOUGH_ROUTING_H

#include "ops.h"
#include "thread_pool.h"

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
} bough_routing;

/* Called by all threads of a pool; ends with a barrier. `scores` [rows][experts] is memory to work in; ids and weights
 * are [rows][per_token]. */
void bough_route(const bough_routing *routing, const float *x, int64_t rows, float *scores, int32_t *ids, float *weights,
                 const bough_ops *ops, bough_thread *thread);

#endif
