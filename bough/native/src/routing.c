#include "routing.h"

#include "numbers.h"

#include <math.h>
#include <string.h>

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

void bough_route(const bough_routing *r, const float *x, int64_t rows, float *scores, int32_t *ids, float *weights,
                 const bough_ops *ops, bough_thread *thread) {
    compute_logits(r, x, rows, scores, ops, thread);
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
