/* Attention of a whole step over the paged keys and values, by all threads of a pool. */
#ifndef BOUGH_ATTENTION_H
#define BOUGH_ATTENTION_H

#include "ops.h"
#include "step.h"
#include "thread_pool.h"

#include <stddef.h>

/* What is constant about one layer's attention. */
typedef struct {
    int heads, kv_heads, dim;
    const void *keys, *values; /* the layer's: [slots][kv_heads][dim] */
    int number;                /* enum bough_number */
    int64_t window;            /* 0: none */
    float scale, softcap;      /* softcap 0: none */
    const float *sinks;        /* [heads] logits that join each head's softmax, or NULL */
    bool ends_only;            /* only each sequence's last token is looked at; the others' results may be anything */
    bool both_ways;            /* queries see the keys behind them too; there is no window then */
} bough_attention_spec;

size_t bough_attention_scratch(const bough_attention_spec *spec, int threads);

/* q [tokens][…heads * dim] with q_stride from token to token; the same for out. Ends with a barrier. */
void bough_attention(const bough_attention_spec *spec, const bough_step *step, const float *q, int64_t q_stride,
                     float *out, int64_t out_stride, void *scratch, const bough_ops *ops, bough_thread *thread);

#endif
