#include "tape.h"

#include "numbers.h"
#include "ops.h"

#include <math.h>
#include <string.h>

/* What all threads know while they run a tape. */
typedef struct {
    const bough_operation *operations;
    int64_t count;
    const bough_step *step;
    void *attention_scratch, *linear_scratch; /* apart, because a thread may be an operation behind the others */
    const bough_ops *ops;
} running;

/* The head of the function that runs one kind of operation: `o` are its arguments. It ends when all threads have done
 * their part, which those with ENDS_ALONE see to themselves. */
#define RUN(name) RUN_UNTIL(name, bough_barrier(thread))
#define ENDS_ALONE(name) RUN_UNTIL(name, (void)0)
#define RUN_UNTIL(name, end)                                                                                           \
    static void run_##name(const bough_operation *op, const __typeof__(op->name) *o, int64_t rows, const running *r,   \
                           bough_thread *thread);                                                                      \
    static void start_##name(const bough_operation *op, int64_t rows, const running *r, bough_thread *thread) {        \
        run_##name(op, &op->name, rows, r, thread);                                                                    \
        end;                                                                                                           \
    }                                                                                                                  \
    static void run_##name(const bough_operation *op, const __typeof__(op->name) *o, int64_t rows, const running *r,   \
                           bough_thread *thread)

/* The slots of the operation's rows; NULL: no row has an adapter. */
static const int64_t *slots_of(const bough_operation *op, const running *r) {
    return op->on_logits ? r->step->logits_adapters : r->step->adapters;
}

RUN(embedding) {
    int64_t size = o->table->k;
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        float *out = o->out + row * size;
        bough_weight_row(o->table, r->step->token_ids[row], out);
        for (int64_t i = 0; o->scale != 1.0f && i < size; i++)
            out[i] *= o->scale;
        if (r->step->media != NULL && r->step->is_media[row])
            memcpy(out, r->step->media + row * size, (size_t)size * sizeof(float));
    }
}

RUN(rms_norm) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        int64_t at = row * o->size;
        r->ops->rms_norm(o->x + row * o->x_stride, o->residual == NULL ? NULL : o->residual + at, o->weight, o->eps, o->plus_one,
                         o->size, o->out + at, o->sum == NULL ? NULL : o->sum + at);
    }
}

ENDS_ALONE(linear) {
    bough_linear(o->parts, o->count, o->x, o->x_stride, o->y, o->y_stride, o->bias, rows,
                 op->on_logits ? r->step->logits_prompts : r->step->prompts, r->linear_scratch, thread);
}

RUN(layer_norm) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;)
        r->ops->layer_norm(o->x + row * o->size, o->weight, o->bias, o->eps, o->size, o->out + row * o->size);
}

static void norm_heads(const __typeof__(((bough_operation *)0)->norm_rope_store) *o, float *token, const bough_ops *ops) {
    const float *norms[] = {o->q_norm, o->k_norm};
    int64_t sizes[] = {(int64_t)o->heads * o->dim, (int64_t)o->kv_heads * o->dim};
    for (int part = 0; part < 2; token += sizes[part++]) {
        int64_t size = o->whole ? sizes[part] : o->dim;
        for (float *at = token; norms[part] != NULL && at < token + sizes[part]; at += size)
            ops->rms_norm(at, NULL, norms[part], o->eps, o->plus_one, size, at, NULL);
    }
}

RUN(norm_rope_store) {
    int64_t half = o->half, stored = (int64_t)o->kv_heads * o->dim;
    const int64_t *slots = r->step->slots + o->group * r->step->slots_stride;
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        float *token = o->qkv + row * (o->heads + 2 * o->kv_heads) * o->dim;
        int64_t position = r->step->positions[row], slot = slots[row];
        if (!o->last)
            norm_heads(o, token, r->ops);
        for (int head = 0; head < o->heads + o->kv_heads; head++)
            r->ops->rotate(token + (int64_t)head * o->dim, o->cos + position * half, o->sin + position * half, half);
        if (o->last)
            norm_heads(o, token, r->ops);
        const float *keys = token + (int64_t)o->heads * o->dim;
        int64_t at = slot * stored * (o->number == BOUGH_FLOAT32 ? 4 : 2);
        r->ops->narrow(keys, o->number, stored, (char *)o->keys + at);
        r->ops->narrow(keys + stored, o->number, stored, (char *)o->values + at);
    }
}

ENDS_ALONE(attention) {
    bough_step step = *r->step;
    step.page_table += o->group * step.page_table_stride;
    if (o->group > 0)
        step.common = NULL; /* which speaks of the first group's pages */
    bough_attention(&o->spec, &step, o->q, o->q_stride, o->out, (int64_t)o->spec.heads * o->spec.dim,
                    r->attention_scratch, r->ops, thread);
}

RUN(activate) {
    enum { PIECE = 1024 };
    int64_t pieces = (o->size + PIECE - 1) / PIECE;
    for (int64_t tile; (tile = bough_tile(thread, rows * pieces)) < rows * pieces;) {
        int64_t row = tile / pieces, at = tile % pieces * PIECE;
        int64_t size = o->size - at < PIECE ? o->size - at : PIECE;
        const float *x = o->x + row * (o->gated ? 2 : 1) * o->size + at;
        float *out = o->out + row * o->size + at;
        if (!o->gated)
            r->ops->activate(x, o->activation, out, size);
        else
            (o->activation == BOUGH_SILU ? r->ops->silu_mul : r->ops->gelu_tanh_mul)(x, x + o->size, out, size);
    }
}

RUN(take_rows) {
    const int64_t *places = o->by_position ? r->step->positions : r->step->logits_indices;
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;)
        memcpy(o->out + row * o->size, o->x + places[row] * o->x_stride, (size_t)o->size * sizeof(float));
}

RUN(softcap) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;)
        r->ops->softcap(o->x + row * o->size, o->size, o->cap);
}

ENDS_ALONE(route) {
    bough_route(&o->routing, o->x, rows, slots_of(op, r), o->scores, o->ids, o->weights, r->ops, thread);
}

ENDS_ALONE(experts) {
    bough_run_experts(&o->experts, o->x, rows, slots_of(op, r), o->ids, o->weights, o->out, r->linear_scratch, r->ops,
                      thread);
}

RUN(add_gated) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        int64_t at = row * o->size;
        float scale = o->logits == NULL ? 1.0f : 1.0f / (1.0f + expf(-o->logits[row]));
        for (int64_t i = at; i < at + o->size; i++)
            o->out[i] = o->a[i] + scale * o->b[i];
    }
}

RUN(scale_shift) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;)
        for (int64_t i = 0, at = row * o->size; i < o->size; i++)
            o->out[at + i] = o->x[at + i] * o->scale + (o->shift == NULL ? 0.0f : o->shift[i]);
}

RUN(grow_queries) {
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        float factor = 1.0f + o->rate * log1pf((float)((r->step->positions[row] + o->offset) / o->span));
        for (int64_t i = row * o->stride; i < row * o->stride + o->size; i++)
            o->qkv[i] *= factor;
    }
}

RUN(latent_store) {
    int64_t half = o->rope_dim / 2, width = o->rank + o->rope_dim;
    const int64_t *slots = r->step->slots + o->group * r->step->slots_stride;
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        const float *cos = o->cos + r->step->positions[row] * half, *sin = o->sin + r->step->positions[row] * half;
        float *latent = o->latents + row * o->latent_stride;
        r->ops->rms_norm(latent, NULL, o->norm, o->eps, false, o->rank, latent, NULL);
        r->ops->rotate(latent + o->rank, cos, sin, half);
        for (int head = 0; head < o->heads; head++)
            r->ops->rotate(o->q + row * o->q_stride + (head + 1) * (int64_t)o->dim - o->rope_dim, cos, sin, half);
        int64_t at = slots[row] * width * (o->number == BOUGH_FLOAT32 ? 4 : 2);
        r->ops->narrow(latent, o->number, width, (char *)o->cache + at);
    }
}

/* Some tokens of one head, and some of its outputs: weights are read once for them. Each output is summed in the same
 * order whatever else is computed. */
RUN(by_head) {
    enum { TOKENS = 16, OUTPUTS = 64 };
    int64_t blocks = ceil_div(rows, TOKENS), pieces = ceil_div(o->outputs, OUTPUTS), tiles = o->heads * pieces * blocks;
    for (int64_t tile; (tile = bough_tile(thread, tiles)) < tiles;) {
        int64_t first = tile % blocks * TOKENS, end = first + TOKENS < rows ? first + TOKENS : rows;
        int64_t at = tile / blocks % pieces * OUTPUTS, head = tile / blocks / pieces;
        int64_t size = o->outputs - at < OUTPUTS ? o->outputs - at : OUTPUTS;
        const float *x = o->x + head * o->x_dim, *weight = o->weight + head * o->weight_stride;
        float *y = o->y + head * o->y_dim;
        for (int64_t row = first; row < end; row++) {
            memset(y + row * o->y_stride + at, 0, (size_t)size * sizeof(float));
            if (at == 0)
                memcpy(y + row * o->y_stride + o->outputs, x + row * o->x_stride + o->inputs,
                       (size_t)o->extra * sizeof(float));
        }
        for (int64_t i = 0; o->by_inputs && i < o->inputs; i++)
            for (int64_t row = first; row < end; row++)
                r->ops->add_scaled(y + row * o->y_stride + at, weight + i * o->outputs + at, x[row * o->x_stride + i],
                                   size);
        for (int64_t i = at; !o->by_inputs && i < at + size; i++)
            for (int64_t row = first; row < end; row++)
                y[row * o->y_stride + i] = r->ops->dot(x + row * o->x_stride, weight + i * o->inputs, o->inputs);
    }
}

ENDS_ALONE(lora) {
    bough_lora_rows own = {slots_of(op, r), o->x, o->x_stride, r->step, o->scale, o->y, o->y_stride, rows};
    if (own.slots != NULL)
        bough_add_lora(o->adapters, &own, o->thin, thread);
}

#define RUNNER(name) [bough_kind_##name] = start_##name,
static void (*const RUNNERS[])(const bough_operation *op, int64_t rows, const running *r, bough_thread *thread) = {
    BOUGH_KINDS(RUNNER)};

static void run_all(bough_thread *thread, void *argument) {
    const running *r = argument;
    for (const bough_operation *op = r->operations; op < r->operations + r->count; op++) {
        int64_t rows = op->on_logits ? r->step->logits_count : r->step->tokens;
        if (rows > 0)
            RUNNERS[op->kind](op, rows, r, thread);
    }
}

static size_t attention_scratch(const bough_operation *operations, int64_t count, int threads) {
    int64_t most = 0;
    for (const bough_operation *op = operations; op < operations + count; op++)
        if (op->kind == bough_kind_attention)
            most = at_least(most, (int64_t)bough_attention_scratch(&op->attention.spec, threads));
    return (size_t)align(most);
}

size_t bough_tape_scratch(const bough_operation *operations, int64_t count, int64_t tokens, int threads) {
    int64_t most = 0;
    for (const bough_operation *op = operations; op < operations + count; op++) {
        if (op->kind == bough_kind_linear)
            most = at_least(most, (int64_t)bough_linear_scratch(op->linear.parts, op->linear.count, tokens, threads));
        if (op->kind == bough_kind_experts)
            most = at_least(most, (int64_t)bough_experts_scratch(&op->experts.experts, tokens, threads));
    }
    return (size_t)most + attention_scratch(operations, count, threads);
}

void bough_tape_run(const bough_operation *operations, int64_t count, const bough_step *step, void *scratch,
                    bough_thread_pool *pool) {
    size_t attention = attention_scratch(operations, count, bough_thread_pool_threads(pool));
    running r = {operations, count, step, scratch, (char *)scratch + attention, bough_ops_here()};
    bough_thread_pool_run(pool, run_all, &r);
}
