/* A tape: the operations of a forward pass, recorded once, run for any number of tokens.
 *
 * The caller owns the array of operations (`bough/native/tape.py` writes it) and everything their addresses point at.
 * Operands are buffers of [tokens][features] with room for the largest step. What changes from step to step (ids,
 * positions, pages, counts) is in the `bough_step`.
 */
#ifndef BOUGH_TAPE_H
#define BOUGH_TAPE_H

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "step.h"
#include "thread_pool.h"

/* Every kind of operation, in the order of their numbers (`KINDS` of tape.py): X(name in the union below). */
#define BOUGH_KINDS(X)                                                                                                 \
    X(embedding) X(rms_norm) X(linear) X(norm_rope_store) X(attention) X(activate) X(take_rows) X(softcap) X(route)    \
    X(experts) X(add_gated) X(layer_norm) X(scale_shift) X(grow_queries) X(latent_store) X(by_head) X(lora)

#define BOUGH_KIND(name) bough_kind_##name,
enum bough_kind { BOUGH_KINDS(BOUGH_KIND) };

typedef struct {
    int kind;       /* enum bough_kind */
    bool on_logits; /* the rows of the operands are not the step's tokens but those whose logits are asked for */
    union {
        struct {
            const bough_weight *table;
            float scale, *out;
        } embedding;
        struct {
            const float *x, *residual, *weight; /* residual and sum may both be NULL */
            float eps;
            bool plus_one;
            int64_t size, x_stride;
            float *out, *sum;
        } rms_norm;
        struct {
            const bough_weight *parts;
            int count;
            const float *x;
            int64_t x_stride;
            const float *bias; /* or NULL */
            float *y;
            int64_t y_stride;
        } linear;
        struct {
            float *qkv;
            int heads, kv_heads, dim;
            const float *q_norm, *k_norm; /* or NULL */
            float eps;
            bool plus_one, whole, last; /* norms of all heads at once; norms that follow the rotation */
            int half;                   /* of a head's coordinates that rotate, which come first */
            const float *cos, *sin;
            void *keys, *values;
            int number; /* enum bough_number: the type of the caches */
            int group;  /* the KV group, whose slots it writes to */
        } norm_rope_store;
        struct {
            bough_attention_spec spec;
            const float *q;
            int64_t q_stride;
            int group; /* the KV group, whose page table it reads */
            float *out;
        } attention;
        struct {
            const float *x; /* if it is gated, gate | up */
            int activation; /* enum bough_activation, of which the first two may be gated */
            bool gated;
            int64_t size;
            float *out;
        } activate;
        struct {
            const float *x;
            int64_t x_stride, size;
            bool by_position; /* the rows at the tokens' positions, not those whose logits are asked for */
            float *out;
        } take_rows;
        struct {
            float *x;
            int64_t size;
            float cap;
        } softcap;
        struct {
            bough_routing routing;
            const float *x;
            float *scores;
            int32_t *ids;
            float *weights;
        } route;
        struct {
            bough_experts experts;
            const float *x;
            const int32_t *ids;
            const float *weights;
            float *out;
        } experts;
        struct {
            const float *a, *b, *logits; /* a + b * sigmoid(the row's logit); or a + b where logits is NULL */
            int64_t size;
            float *out;
        } add_gated;
        struct {
            const float *x, *weight, *bias; /* weight and bias may be NULL */
            float eps;
            int64_t size;
            float *out;
        } layer_norm;
        struct {
            const float *x;
            float scale;
            const float *shift; /* [size] or NULL */
            int64_t size;
            float *out;
        } scale_shift;
        struct {
            float *qkv;
            int64_t stride, size; /* from token to token; of the queries */
            float rate;
            int64_t span, offset; /* a query is multiplied with 1 + rate * ln(1 + (position + offset) / span) */
        } grow_queries;
        struct {
            float *q;
            int64_t q_stride;
            int heads, dim; /* of q, whose heads end in what rotates */
            float *latents; /* what is normalised, then what rotates */
            int64_t latent_stride;
            int rank, rope_dim;
            const float *norm;
            float eps;
            const float *cos, *sin;
            void *cache;
            int number; /* enum bough_number */
            int group;
        } latent_store;
        struct { /* y = x · w of each head, and behind it the `extra` numbers that follow in x */
            const float *x;
            int64_t x_stride, x_dim; /* from token to token, from head to head */
            const float *weight;
            int64_t weight_stride; /* from head to head */
            int heads, inputs, outputs, extra;
            bool by_inputs; /* w is [inputs][outputs], or else [outputs][inputs] */
            float *y;
            int64_t y_stride, y_dim;
        } by_head;
        struct {
            const bough_lora *adapters;
            const float *x; /* NULL: the vectors of the token ids, times `scale` */
            int64_t x_stride;
            float scale, *y;
            int64_t y_stride;
            float *thin; /* to work in */
        } lora;
    };
} bough_operation;

/* Runs all operations; `scratch` has the bytes that bough_tape_scratch says, 64-byte aligned. */
BOUGH_EXPORT size_t bough_tape_scratch(const bough_operation *operations, int64_t count, int64_t tokens, int threads);
BOUGH_EXPORT void bough_tape_run(const bough_operation *operations, int64_t count, const bough_step *step, void *scratch,
                                 bough_thread_pool *pool);

#endif
