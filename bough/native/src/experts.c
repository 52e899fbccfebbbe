#include "experts.h"

#include "linear_runs.h"

#include <math.h>

/* ---- which experts a token is sent to */

enum { AT_ONCE = 16 /* experts whose logits of one token a thread computes */ };

static void compute_logits(const bough_routing *r, const float *x, int64_t rows, float *logits, const bough_ops *ops,
                           bough_thread *thread) {
    int64_t pieces = ceil_div(r->experts, AT_ONCE), tiles = rows * pieces;
    for (int64_t tile; (tile = bough_tile(thread, tiles)) < tiles;) {
        int64_t row = tile / pieces, first = tile % pieces * AT_ONCE, end = at_most(first + AT_ONCE, r->experts);
        for (int64_t expert = first; expert < end; expert++)
            logits[row * r->experts + expert] = ops->dot(x + row * r->size, r->router + expert * r->size, r->size) +
                                                (r->bias ? r->bias[expert] : 0.0f);
    }
    bough_barrier(thread);
}

static void score(const bough_routing *r, float *logits, const bough_ops *ops) {
    if (r->scores == 1) {
        for (int i = 0; i < r->experts; i++)
            logits[i] = 1.0f / (1.0f + expf(-logits[i]));
        return;
    }
    float peak, sum = 0.0f;
    ops->best(logits, r->experts, &peak);
    ops->weigh(logits, r->experts, peak, 1.0f);
    for (int i = 0; i < r->experts; i++)
        sum += logits[i];
    for (int i = 0; i < r->experts; i++)
        logits[i] /= sum;
}

/* The first place of the largest number, which is not found again. */
static int take_best(float *x, int size) {
    int best = 0;
    for (int i = 1; i < size; i++)
        if (x[i] > x[best])
            best = i;
    x[best] = -INFINITY;
    return best;
}

static void leave_out_groups(const bough_routing *r, float *choice) {
    float groups[BOUGH_MAX_EXPERTS];
    bool kept[BOUGH_MAX_EXPERTS] = {false};
    int size = r->experts / r->groups;
    for (int group = 0; group < r->groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (const float *at = choice + group * size; at < choice + (group + 1) * size; at++) {
            second = *at > first ? first : *at > second ? *at : second;
            first = *at > first ? *at : first;
        }
        groups[group] = first + (r->best_two ? second : 0.0f);
    }
    for (int i = 0; i < r->top_groups; i++)
        kept[take_best(groups, r->groups)] = true;
    for (int i = 0; i < r->experts; i++)
        if (!kept[i / size])
            choice[i] = -INFINITY;
}

static void choose(const bough_routing *r, const float *scores, int32_t *ids, float *weights) {
    float choice[BOUGH_MAX_EXPERTS], sum = 0.0f;
    for (int i = 0; i < r->experts; i++)
        choice[i] = scores[i] + (r->correction ? r->correction[i] : 0.0f);
    if (r->groups > 1)
        leave_out_groups(r, choice);
    for (int i = 0; i < r->per_token; i++) {
        ids[i] = take_best(choice, r->experts);
        weights[i] = scores[ids[i]];
        sum += weights[i];
    }
    for (int i = 0; i < r->per_token; i++)
        weights[i] = (r->renormalise ? weights[i] / sum : weights[i]) * r->scale;
}

/* Experts one after the other, each weighed among those near it that are left. */
static void mix_sparsely(const bough_routing *r, const float *logits, int32_t *ids, float *weights) {
    float left[BOUGH_MAX_EXPERTS];
    memcpy(left, logits, (size_t)r->experts * sizeof(float));
    for (int i = 0; i < r->per_token; i++) {
        ids[i] = take_best(left, r->experts);
        float best = logits[ids[i]], sum = 1.0f;
        for (int j = 0; j < r->experts; j++)
            if (!((best - logits[j]) / fmaxf(fabsf(logits[j]), best) > 2.0f * r->jitter))
                sum += expf(left[j] - best); /* of those that are taken, nothing */
        weights[i] = r->scale / sum;
    }
}

/* Experts drawn evenly, by a hash of the token's place in the step. */
static void draw_evenly(const bough_routing *r, int64_t row, int32_t *ids, float *weights) {
    uint32_t mixed = (uint32_t)(row + 1) * 0x9E3779B1u;
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6Bu;
    mixed ^= mixed >> 13;
    uint32_t stride = 1 + (mixed >> 16) % (uint32_t)(r->experts / r->per_token);
    for (int i = 0; i < r->per_token; i++) {
        ids[i] = (int32_t)(((mixed & 0xFFFF) % (uint32_t)r->experts + (uint32_t)i * stride) % (uint32_t)r->experts);
        weights[i] = r->scale / (float)r->per_token;
    }
}

void bough_route(const bough_routing *r, const float *x, int64_t rows, const int64_t *slots, float *scores,
                 int32_t *ids, float *weights, const bough_ops *ops, bough_thread *thread) {
    compute_logits(r, x, rows, scores, ops, thread);
    if (r->lora != NULL && slots != NULL) {
        bough_lora_rows own = {slots, x, r->size, .y = scores, .y_stride = r->experts, .rows = rows};
        bough_add_lora(r->lora, &own, r->thin, thread);
    }
    for (int64_t row; (row = bough_tile(thread, rows)) < rows;) {
        float *own = scores + row * r->experts;
        int64_t at = row * r->per_token;
        if (r->simulate) {
            draw_evenly(r, row, ids + at, weights + at);
            continue;
        }
        if (r->scores == 2) {
            mix_sparsely(r, own, ids + at, weights + at);
            continue;
        }
        score(r, own, ops);
        choose(r, own, ids + at, weights + at);
    }
    bough_barrier(thread);
}

/* ---- their products */

enum {
    PARTS = 3,
    ROWS_AT_ONCE = 512, /* tokens that are sorted together; bounds the scratch memory */
};

/* The products of some tokens. A pair is a token with one of its experts; pairs are sorted by expert. */
typedef struct {
    const bough_experts *experts;
    int64_t hidden, inner, rows, pairs;
    int32_t *places;  /* [pairs] where a token's pairs stand, in the order of tokens */
    int32_t *tokens;  /* [pairs] whose pair stands there */
    int32_t *firsts;  /* [experts + 1] where an expert's pairs begin */
    int32_t *active;  /* [experts + 1] which experts have any; the last is their number */
    const int64_t *slots; /* [rows] of adapters; NULL: none */
    int64_t *keys;        /* [pairs] of a slot and an expert, in the order of experts; 0: no adapter */
    float *thin;          /* [pairs][bough_lora_width] */
    float *states;    /* [pairs][hidden] what experts are given; later, what they give */
    float *gate_up;   /* [pairs][2 * inner] */
    uint8_t *reduced; /* [pairs] inputs of the product in hand, quantised */
    void *scratch;
} sorted;

static int64_t take(int64_t *at, int64_t bytes) {
    int64_t begin = *at;
    *at += align(bytes);
    return begin;
}

/* Where everything lies in the scratch; how many bytes it takes. */
static int64_t lay_out(sorted *s, int threads) {
    const bough_experts *e = s->experts;
    s->hidden = e->weights[0].k;
    s->inner = e->weights[0].n;
    s->pairs = s->rows * e->per_token;
    uint8_t *base = s->scratch;
    int64_t at = 0;
    for (const bough_weight *weight = e->weights; weight < e->weights + e->experts * PARTS; weight++)
        at = at_least(at, linear_shared_start(weight, 1, threads));
    s->places = (int32_t *)(base + take(&at, s->pairs * 4));
    s->tokens = (int32_t *)(base + take(&at, s->pairs * 4));
    s->firsts = (int32_t *)(base + take(&at, (e->experts + 1) * 4));
    s->active = (int32_t *)(base + take(&at, (e->experts + 1) * 4));
    s->states = (float *)(base + take(&at, s->pairs * s->hidden * 4));
    s->gate_up = (float *)(base + take(&at, s->pairs * s->inner * 8));
    s->reduced = base + take(&at, s->pairs * token_bytes(at_least(s->hidden, s->inner)));
    if (e->lora != NULL) {
        s->keys = (int64_t *)(base + take(&at, s->pairs * 8));
        s->thin = (float *)(base + take(&at, s->pairs * bough_lora_width(e->lora) * 4));
    }
    return at;
}

size_t bough_experts_scratch(const bough_experts *experts, int64_t rows, int threads) {
    sorted s = {.experts = experts, .rows = at_most(rows, ROWS_AT_ONCE)};
    return (size_t)lay_out(&s, threads);
}

static void sort(const sorted *s, const int32_t *ids, bough_thread *thread) {
    int experts = s->experts->experts;
    for (int64_t tile; (tile = bough_tile(thread, 1)) < 1;) {
        memset(s->firsts, 0, (size_t)(experts + 1) * sizeof(int32_t));
        for (int64_t pair = 0; pair < s->pairs; pair++)
            s->firsts[ids[pair]]++;
        int32_t end = 0, active = 0;
        for (int expert = 0; expert < experts; expert++) {
            if (s->firsts[expert] > 0)
                s->active[active++] = expert;
            end += s->firsts[expert];
            s->firsts[expert] = end;
        }
        s->firsts[experts] = end;
        s->active[experts] = active;
        for (int64_t pair = s->pairs - 1; pair >= 0; pair--) { /* from behind: each expert's end becomes its beginning */
            int32_t place = --s->firsts[ids[pair]];
            s->places[pair] = place;
            s->tokens[place] = (int32_t)(pair / s->experts->per_token);
            int64_t slot = s->slots == NULL ? 0 : s->slots[s->tokens[place]];
            if (s->slots != NULL)
                s->keys[place] = slot > 0 ? (slot - 1) * experts + ids[pair] + 1 : 0;
        }
    }
    bough_barrier(thread);
}

/* Whether some experts take floats for these parts, and whether some take quantised inputs. */
static void forms_of(const bough_experts *e, int first, int count, bool *floats, bool *quantised) {
    *floats = *quantised = false;
    for (int expert = 0; expert < e->experts; expert++)
        for (int part = first; part < first + count; part++)
            *(takes_floats((int)e->weights[expert * PARTS + part].format) ? floats : quantised) = true;
}

static void gather(const sorted *s, const float *x, const linear_kernels *kernels, bough_thread *thread) {
    bool floats, quantised;
    forms_of(s->experts, 0, 2, &floats, &quantised);
    floats |= s->slots != NULL; /* which adapters multiply */
    for (int64_t pair; (pair = bough_tile(thread, s->pairs)) < s->pairs;) {
        const float *from = x + s->tokens[pair] * s->hidden;
        if (floats)
            memcpy(s->states + pair * s->hidden, from, (size_t)s->hidden * sizeof(float));
        if (quantised)
            kernels->quantize(from, s->hidden, (token_group *)(s->reduced + pair * token_bytes(s->hidden)));
    }
    bough_barrier(thread);
}

/* The first half of gate_up becomes what the second product takes. */
static void activate(const sorted *s, const linear_kernels *kernels, const bough_ops *ops, bough_thread *thread) {
    const bough_experts *e = s->experts;
    bool floats, quantised;
    forms_of(e, 2, 1, &floats, &quantised);
    for (int64_t pair; (pair = bough_tile(thread, s->pairs)) < s->pairs;) {
        float *gate = s->gate_up + pair * 2 * s->inner, *up = gate + s->inner;
        if (e->activation == 2)
            ops->clamped_mul(gate, up, gate, s->inner, e->slope, e->limit);
        else
            (e->activation == 0 ? ops->silu_mul : ops->gelu_tanh_mul)(gate, up, gate, s->inner);
        if (quantised)
            kernels->quantize(gate, s->inner, (token_group *)(s->reduced + pair * token_bytes(s->inner)));
    }
    bough_barrier(thread);
}

/* Of a product with some parts of all experts that have tokens, one piece. */
typedef struct {
    linear_call call;
    tile_run run;
    int64_t first; /* pair */
} piece;

static piece find_piece(const sorted *s, int part, const linear_call *like, int64_t size, int64_t runs, int64_t item) {
    int32_t expert = s->active[item / runs], first = s->firsts[expert];
    piece found = {.call = *like, .first = first};
    found.call.parts += expert * PARTS + part;
    found.call.x += first * like->x_stride;
    found.call.y += first * like->y_stride;
    found.call.bias = like->bias == NULL ? NULL : like->bias + expert * like->y_stride;
    found.call.m = s->firsts[expert + 1] - first;
    found.run = linear_find_run(found.call.parts, size, item % runs);
    return found;
}

/* `like` has the weights, inputs and outputs of all experts. */
static void multiply(const sorted *s, int part, const linear_call *like, const linear_kernels *kernels,
                     bough_thread *thread) {
    const bough_weight *parts = like->parts + part;
    int experts = s->experts->experts;
    /* As many experts as may have tokens: how many have some can be looked at with a tile in hand only. */
    int64_t most = at_most(s->pairs, experts);
    int64_t size = linear_run_size(parts, like->count, s->pairs / most, most, thread->threads);
    int64_t runs = linear_count_runs(parts, like->count, size), items = runs * most;
    for (int64_t item = bough_shared_out_tile(thread, items), following; item < items; item = following) {
        following = bough_shared_out_tile(thread, items);
        int64_t there_are = runs * s->active[experts];
        if (item >= there_are)
            continue;
        piece own = find_piece(s, part, like, size, runs, item);
        const uint8_t *next = NULL;
        if (following < there_are)
            next = linear_run_start(find_piece(s, part, like, size, runs, following).run);
        linear_multiply_run(&own.call, kernels, &own.run, next, s->reduced + own.first * token_bytes(parts->k), 0,
                            own.call.m, thread);
    }
    bough_barrier(thread);
}

/* Experts are added in the order of their weights, whatever else is in the step. */
static void add_up(const sorted *s, const float *weights, float *out, bough_thread *thread) {
    int per_token = s->experts->per_token;
    for (int64_t row; (row = bough_tile(thread, s->rows)) < s->rows;) {
        float *sum = out + row * s->hidden;
        memset(sum, 0, (size_t)s->hidden * sizeof(float));
        for (int64_t pair = row * per_token; pair < (row + 1) * per_token; pair++) {
            const float *given = s->states + s->places[pair] * s->hidden;
            for (int64_t i = 0; i < s->hidden; i++)
                sum[i] += weights[pair] * given[i];
        }
    }
    bough_barrier(thread);
}

/* What adapters add to a product of all pairs, like that product. */
static void add_lora(const sorted *s, int which, const linear_call *like, bough_thread *thread) {
    if (s->slots == NULL)
        return;
    bough_lora_rows own = {s->keys, like->x, like->x_stride, .y = like->y, .y_stride = like->y_stride, .rows = s->pairs};
    bough_add_lora(s->experts->lora + which, &own, s->thin, thread);
}

void bough_run_experts(const bough_experts *e, const float *x, int64_t rows, const int64_t *slots, const int32_t *ids,
                       const float *weights, float *out, void *scratch, const bough_ops *ops, bough_thread *thread) {
    const linear_kernels *kernels = linear_narrow();
    for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
        sorted s = {.experts = e, .rows = at_most(rows - first, ROWS_AT_ONCE), .scratch = scratch};
        if (e->lora != NULL && slots != NULL)
            s.slots = slots + first;
        lay_out(&s, thread->threads);
        int64_t pair = first * e->per_token, width = 2 * s.inner;
        sort(&s, ids + pair, thread);
        gather(&s, x + first * s.hidden, kernels, thread);
        linear_call gate_up = {e->weights, 2, s.states, s.hidden, s.gate_up, width, e->gate_up_bias, 0, scratch};
        multiply(&s, 0, &gate_up, kernels, thread);
        add_lora(&s, 0, &gate_up, thread);
        activate(&s, kernels, ops, thread);
        linear_call down = {e->weights, 1, s.gate_up, width, s.states, s.hidden, e->down_bias, 0, scratch};
        multiply(&s, 2, &down, kernels, thread);
        add_lora(&s, 1, &down, thread);
        add_up(&s, weights + pair, out + first * s.hidden, thread);
    }
}
