/* The arithmetic of `ops.h`, for the vectors of `vec.h`. Included by one file for each kind of CPU, which then has the
 * table OPS. */
#include "ops.h"
#include "vec.h"

#include <math.h>

static void rms_norm(const float *x, const float *residual, const float *weight, float eps, bool plus_one, int64_t size,
                     float *out, float *sum) {
    vec squares = {0};
    float rest = 0.0f;
    int64_t whole = size - size % LANES;
    if (residual != NULL) {
        for (int64_t i = 0; i < whole; i += LANES) {
            vec v = load(x + i) + load(residual + i);
            store(sum + i, v);
            squares += v * v;
        }
        for (int64_t i = whole; i < size; i++) {
            sum[i] = x[i] + residual[i];
            rest += sum[i] * sum[i];
        }
        x = sum;
    } else {
        for (int64_t i = 0; i < whole; i += LANES)
            squares += load(x + i) * load(x + i);
        for (int64_t i = whole; i < size; i++)
            rest += x[i] * x[i];
    }
    float inverse = 1.0f / sqrtf((sum_of(squares) + rest) / (float)size + eps);
    float one = plus_one ? 1.0f : 0.0f;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, load(x + i) * inverse * (load(weight + i) + one));
    for (int64_t i = whole; i < size; i++)
        out[i] = x[i] * inverse * (weight[i] + one);
}

static void layer_norm(const float *x, const float *weight, const float *bias, float eps, int64_t size, float *out) {
    int64_t whole = size - size % LANES;
    vec sums = {0}, squares = {0};
    float rest = 0.0f;
    for (int64_t i = 0; i < whole; i += LANES)
        sums += load(x + i);
    for (int64_t i = whole; i < size; i++)
        rest += x[i];
    float mean = (sum_of(sums) + rest) / (float)size;
    rest = 0.0f;
    for (int64_t i = 0; i < whole; i += LANES)
        squares += (load(x + i) - mean) * (load(x + i) - mean);
    for (int64_t i = whole; i < size; i++)
        rest += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.0f / sqrtf((sum_of(squares) + rest) / (float)size + eps);
    for (int64_t i = 0; i < size; i++)
        out[i] = (x[i] - mean) * inverse * (weight == NULL ? 1.0f : weight[i]) + (bias == NULL ? 0.0f : bias[i]);
}

static void rotate(float *head, const float *cos, const float *sin, int64_t half) {
    int64_t whole = half - half % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (int64_t i = whole; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exp_(-x)); }

INLINE vec gelu_tanh(vec x) {
    vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh_(inner));
}

/* x times the share of the normal distribution below it, by the tail above |x|: Abramowitz and Stegun 7.1.26. */
INLINE vec gelu(vec x) {
    vec size = larger(x, -x) * 0.70710678f;
    vec t = 1.0f / (1.0f + 0.3275911f * size);
    vec p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vec tail = 0.5f * x * (p * t * exp_(-size * size));
    return select_(x > 0.0f, x - tail, tail);
}

INLINE vec relu(vec x) { return select_(x < 0.0f, (vec){0}, x); } /* NaN stays */

INLINE vec square(vec x) { return x * x; }

INLINE void each(vec (*activation)(vec), const float *x, float *out, int64_t size) {
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, activation(load(x + i)));
    float part[LANES] = {0};
    memcpy(part, x + whole, (size_t)(size - whole) * sizeof(float));
    store(part, activation(load(part)));
    memcpy(out + whole, part, (size_t)(size - whole) * sizeof(float));
}

static void activate(const float *x, enum bough_activation activation, float *out, int64_t size) {
    switch (activation) {
    case BOUGH_SILU: each(silu, x, out, size); break;
    case BOUGH_GELU_TANH: each(gelu_tanh, x, out, size); break;
    case BOUGH_GELU: each(gelu, x, out, size); break;
    case BOUGH_RELU: each(relu, x, out, size); break;
    case BOUGH_SQUARE: each(square, x, out, size); break;
    }
}

INLINE void gated(vec (*activation)(vec), const float *gate, const float *up, float *out, int64_t size) {
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, activation(load(gate + i)) * load(up + i));
    if (whole < size) {
        float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
        size_t bytes = (size_t)(size - whole) * sizeof(float);
        memcpy(g, gate + whole, bytes);
        memcpy(u, up + whole, bytes);
        store(o, activation(load(g)) * load(u));
        memcpy(out + whole, o, bytes);
    }
}

static void silu_mul(const float *gate, const float *up, float *out, int64_t size) {
    gated(silu, gate, up, out, size);
}

static void gelu_tanh_mul(const float *gate, const float *up, float *out, int64_t size) {
    gated(gelu_tanh, gate, up, out, size);
}

static void clamped_mul(const float *gate, const float *up, float *out, int64_t size, float slope, float limit) {
    for (int64_t i = 0; i < size; i += LANES) {
        float g[LANES] = {0}, u[LANES] = {0};
        size_t bytes = (size_t)(size - i < LANES ? size - i : LANES) * sizeof(float);
        memcpy(g, gate + i, bytes);
        memcpy(u, up + i, bytes);
        vec held = smaller(splat(limit), load(g));
        vec other = smaller(splat(limit), larger(splat(-limit), load(u))); /* in this order, NaN stays */
        store(g, held / (1.0f + exp_(-slope * held)) * (other + 1.0f));
        memcpy(out + i, g, bytes);
    }
}

static float dot(const float *a, const float *b, int64_t size) {
    vec sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; part++)
            sums[part] += load(a + i + part * LANES) * load(b + i + part * LANES);
    float rest = 0.0f;
    for (; i < size; i++)
        rest += a[i] * b[i];
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

static void add_scaled(float *out, const float *x, float scale, int64_t size) {
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(out + i, load(out + i) + load(x + i) * scale);
    for (int64_t i = whole; i < size; i++)
        out[i] += x[i] * scale;
}

static void softcap(float *x, int64_t size, float cap) {
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(x + i, cap * tanh_(load(x + i) / cap));
    for (int64_t i = whole; i < size; i++)
        x[i] = cap * tanhf(x[i] / cap);
}

/* ---- attention: a block of keys after the other, with running maxima and sums of the scores' exponentials */

enum { KEYS = BOUGH_BLOCK_KEYS, MAX_DIM = BOUGH_MAX_LATENT_DIM };
#define LEAST (-1e30f) /* of a key that a query does not see; finite, so that differences are numbers */

typedef struct {
    const bough_attend *task;
    const int32_t *pages; /* of the queries in hand, as `position` */
    int64_t position;
    int vectors; /* their number times the group */
    int64_t dim; /* rounded up to whole vectors */
    const float *keys[KEYS], *values[KEYS]; /* of the block; behind the last key the last key again */
    _Alignas(64) float q[BOUGH_MAX_QUERIES * MAX_DIM];
    _Alignas(64) float out[BOUGH_MAX_QUERIES * MAX_DIM];
    _Alignas(64) float scores[BOUGH_MAX_QUERIES * KEYS];
    float peak[BOUGH_MAX_QUERIES], total[BOUGH_MAX_QUERIES]; /* of the run in hand, as `out` */
    _Alignas(64) float before[BOUGH_MAX_QUERIES * MAX_DIM];   /* the same of all runs before it */
    float peak_before[BOUGH_MAX_QUERIES], total_before[BOUGH_MAX_QUERIES];
    /* Of keys and values that are not whole vectors of float32; of latents, which are both, once. */
    _Alignas(64) float copies[KEYS * (MAX_DIM > 2 * BOUGH_MAX_HEAD_DIM ? MAX_DIM : 2 * BOUGH_MAX_HEAD_DIM)];
} attending;

static void widen(const void *from, int number, int dim, int64_t padded, float *to) {
    const uint16_t *bits = from;
    int whole = dim - dim % LANES;
    if (number == BOUGH_FLOAT32) {
        memcpy(to, from, (size_t)dim * sizeof(float));
    } else if (number == BOUGH_FLOAT16) {
        for (int i = 0; i < whole; i += LANES)
            store(to + i, load_half(bits + i));
        for (int i = whole; i < dim; i++)
            to[i] = half_to_float(bits[i]);
    } else {
        for (int i = 0; i < dim; i++) {
            uint32_t wide = (uint32_t)bits[i] << 16;
            memcpy(to + i, &wide, sizeof wide);
        }
    }
    for (int64_t i = dim; i < padded; i++)
        to[i] = 0.0f;
}

static void narrow(const float *x, int number, int64_t size, void *out) {
    uint16_t *to = out;
    int64_t whole = size - size % LANES;
    if (number == BOUGH_FLOAT32) {
        memcpy(out, x, (size_t)size * sizeof(float));
    } else if (number == BOUGH_FLOAT16) {
        for (int64_t i = 0; i < whole; i += LANES)
            store_half(to + i, load(x + i));
        for (int64_t i = whole; i < size; i++)
            to[i] = float_to_half(x[i]);
    } else {
        for (int64_t i = 0; i < size; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            to[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest, of two the even one */
        }
    }
}

static void find_block(attending *a, int64_t first, int count) {
    const bough_attend *t = a->task;
    bool direct = a->dim == t->dim && t->number == BOUGH_FLOAT32;
    size_t size = t->number == BOUGH_FLOAT32 ? 4 : 2, head_bytes = (size_t)t->dim * size;
    for (int j = 0; j < count; j++) {
        int64_t key = first + j;
        int64_t slot = t->page_size == 1 ? a->pages[key]
                                         : (int64_t)a->pages[key / t->page_size] * t->page_size + key % t->page_size;
        size_t offset = (size_t)(slot * t->slot_stride) * size;
        const char *k = (const char *)t->keys + offset, *v = (const char *)t->values + offset;
        for (size_t line = 0; line < head_bytes; line += 64) { /* the next head is likely the next to be asked for */
            __builtin_prefetch(k + head_bytes + line, 0, 2);
            __builtin_prefetch(v + head_bytes + line, 0, 2);
        }
        if (direct) {
            a->keys[j] = (const float *)k;
            a->values[j] = (const float *)v;
        } else {
            float *wide_k = a->copies + j * a->dim, *wide_v = k == v ? wide_k : a->copies + (KEYS + j) * a->dim;
            widen(k, t->number, t->dim, a->dim, wide_k);
            if (k != v)
                widen(v, t->number, t->dim, a->dim, wide_v);
            a->keys[j] = wide_k;
            a->values[j] = wide_v;
        }
    }
    for (int j = count; j % LANES; j++)
        a->keys[j] = a->keys[count - 1];
}

/* Scores of some queries for as many keys as a vector has lanes. */
INLINE void score(int queries, const float *q, int64_t dim, const float *const *keys, float scale, float *scores) {
    vec sums[4][LANES];
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            sums[i][j] = (vec){0};
    for (int64_t d = 0; d < dim; d += LANES) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            vec k = load(keys[j] + d);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++)
                sums[i][j] += load(q + i * dim + d) * k;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
        store(scores + i * KEYS, sum_each(sums[i]) * scale);
}

static void score_block(attending *a, int count) {
    const float scale = a->task->scale;
    int i = 0;
#if LANES == 4
    for (; i + 4 <= a->vectors; i += 4)
        for (int j = 0; j < count; j += LANES)
            score(4, a->q + i * a->dim, a->dim, a->keys + j, scale, a->scores + i * KEYS + j);
#endif
    for (; i < a->vectors; i++)
        for (int j = 0; j < count; j += LANES)
            score(1, a->q + i * a->dim, a->dim, a->keys + j, scale, a->scores + i * KEYS + j);
    if (a->task->softcap != 0.0f)
        for (i = 0; i < a->vectors; i++)
            softcap(a->scores + i * KEYS, (count + LANES - 1) / LANES * LANES, a->task->softcap);
}

/* Hides what lies behind a query, before its window, or behind the block's last key. */
static void hide(attending *a, int64_t first, int count) {
    const bough_attend *t = a->task;
    int rounded = (count + LANES - 1) / LANES * LANES;
    for (int i = 0; i < a->vectors; i++) {
        int64_t position = a->position + i / t->group;
        int64_t from = t->window == 0 ? 0 : position - t->window + 1 - first, to = position + 1 - first;
        float *scores = a->scores + i * KEYS;
        for (int64_t j = 0; j < from && j < rounded; j++)
            scores[j] = LEAST;
        for (int64_t j = to < count ? (to < 0 ? 0 : to) : count; j < rounded; j++)
            scores[j] = LEAST;
    }
}

/* Scores to weights; what was gathered under a lower maximum is brought to the new one. A hidden key weighs exactly 0,
 * not e to the lowest power: which hidden keys a query meets depends on the queries beside it in the tile, and the
 * least remainder of them decides how a sum is rounded that lies half-way between two numbers. */
static void weigh(attending *a, int count) {
    int rounded = (count + LANES - 1) / LANES * LANES;
    for (int i = 0; i < a->vectors; i++) {
        float *scores = a->scores + i * KEYS;
        vec most = load(scores);
        for (int j = LANES; j < rounded; j += LANES)
            most = larger(most, load(scores + j));
        float peak = largest_of(most);
        if (peak > a->peak[i]) {
            vec shrink = exp_(splat(a->peak[i] - peak));
            for (int64_t d = 0; d < a->dim; d += LANES)
                store(a->out + i * a->dim + d, load(a->out + i * a->dim + d) * shrink);
            a->total[i] *= shrink[0];
            a->peak[i] = peak;
        }
        vec sum = {0}, top = splat(a->peak[i]);
        for (int j = 0; j < rounded; j += LANES) {
            vec score = load(scores + j), weight = select_(score == LEAST, (vec){0}, exp_(score - top));
            store(scores + j, weight);
            sum += weight;
        }
        a->total[i] += sum_of(sum);
    }
}

#if LANES == 8
enum { WIDE = 2 };
#else
enum { WIDE = 4 };
#endif

INLINE void gather(int queries, int wide, float *out, int64_t dim, const float *weights, const float *const *values,
                   int64_t at, int count) {
    vec sums[4][WIDE];
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int d = 0; d < wide; d++)
            sums[i][d] = load(out + i * dim + d * LANES);
    for (int j = 0; j < count; j++) {
        vec v[WIDE];
#pragma GCC unroll 4
        for (int d = 0; d < wide; d++)
            v[d] = load(values[j] + at + d * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
            for (int d = 0; d < wide; d++)
                sums[i][d] += v[d] * weights[i * KEYS + j];
    }
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
        for (int d = 0; d < wide; d++)
            store(out + i * dim + d * LANES, sums[i][d]);
}

/* Adds the weighted values of the block. */
static void gather_block(attending *a, int count) {
    for (int i = 0; i < a->vectors; i += 4) {
        int queries = a->vectors - i < 4 ? a->vectors - i : 4;
        const float *weights = a->scores + i * KEYS;
        int64_t d = 0;
        for (; d + WIDE * LANES <= a->dim; d += WIDE * LANES) {
            float *out = a->out + i * a->dim + d;
            switch (queries) {
            case 4: gather(4, WIDE, out, a->dim, weights, a->values, d, count); break;
            case 3: gather(3, WIDE, out, a->dim, weights, a->values, d, count); break;
            case 2: gather(2, WIDE, out, a->dim, weights, a->values, d, count); break;
            default: gather(1, WIDE, out, a->dim, weights, a->values, d, count); break;
            }
        }
        for (; d < a->dim; d += LANES)
            for (int query = 0; query < queries; query++)
                gather(1, 1, a->out + (i + query) * a->dim + d, a->dim, weights + query * KEYS, a->values, d, count);
    }
}

/* Adds a run of keys to those before it. There is one copy of this code, so that it does not show who gathered the run. */
__attribute__((noinline)) static void fold(float *before, float *peak_before, float *total_before, const float *out,
                                           float peak, float total, int64_t dim) {
    float top = peak > *peak_before ? peak : *peak_before;
    vec old = exp_(splat(*peak_before - top)), fresh = exp_(splat(peak - top));
    for (int64_t d = 0; d < dim; d += LANES)
        store(before + d, load(before + d) * old + load(out + d) * fresh);
    *total_before = *total_before * old[0] + total * fresh[0];
    *peak_before = top;
}

static void gather_run(attending *a, int64_t first, int64_t end) {
    const bough_attend *task = a->task;
    int64_t seen_by_all = a->position + 1, last_query = a->position + a->vectors / task->group - 1;
    memset(a->out, 0, (size_t)(a->vectors * a->dim) * sizeof(float));
    for (int i = 0; i < a->vectors; i++) {
        a->peak[i] = LEAST;
        a->total[i] = 0.0f;
    }
    for (; first < end; first += KEYS) {
        int count = end - first < KEYS ? (int)(end - first) : KEYS;
        find_block(a, first, count);
        score_block(a, count);
        bool windowed = task->window != 0 && first < last_query - task->window + 1;
        if (first + count > seen_by_all || windowed || count % LANES)
            hide(a, first, count);
        weigh(a, count);
        gather_block(a, count);
    }
}

static void fold_runs(attending *a, int64_t first, int64_t last) {
    for (int64_t end; first < last; first = end) {
        end = (first / BOUGH_RUN_KEYS + 1) * BOUGH_RUN_KEYS;
        end = end < last ? end : last;
        gather_run(a, first, end);
        for (int i = 0; a->task->weight == NULL && i < a->vectors; i++)
            fold(a->before + i * a->dim, &a->peak_before[i], &a->total_before[i], a->out + i * a->dim, a->peak[i],
                 a->total[i], a->dim);
    }
}

static void hand_out(const attending *a, float *to) {
    const bough_attend *task = a->task;
    for (int i = 0; i < a->vectors; i++) {
        float *out = to + i / task->group * task->out_stride + i % task->group * task->dim;
        float factor = 1.0f / a->total_before[i];
        for (int d = 0; d < task->dim; d++)
            out[d] = a->before[i * a->dim + d] * factor;
    }
}

/* What a sequence has of its own, behind the keys that were gathered for all; its numbers are brought to the front. */
static void attend_own(attending *a, const bough_segment *own, int from, int64_t first_key, int64_t last_key) {
    a->pages = own->pages;
    a->position = own->position;
    a->vectors = own->queries * a->task->group;
    size_t bytes = (size_t)(a->vectors * a->dim) * sizeof(float);
    if (from > 0) { /* queries may be more than those before them: the parts may overlap */
        memmove(a->q, a->q + from * a->dim, bytes);
        memmove(a->before, a->before + from * a->dim, bytes);
        memmove(a->peak_before, a->peak_before + from, (size_t)a->vectors * sizeof(float));
        memmove(a->total_before, a->total_before + from, (size_t)a->vectors * sizeof(float));
    }
    fold_runs(a, first_key, last_key);
    if (a->task->weight == NULL)
        hand_out(a, own->out);
}

static void attend(const bough_attend *task) {
    attending a;
    a.task = task;
    a.dim = (task->dim + LANES - 1) / LANES * LANES;
    a.vectors = 0;
    for (const bough_segment *own = task->segments; own < task->segments + task->count; own++)
        for (int i = 0; i < own->queries * task->group; i++, a.vectors++) {
            const float *q = own->q + i / task->group * task->q_stride + i % task->group * task->dim;
            widen(q, BOUGH_FLOAT32, task->dim, a.dim, a.q + a.vectors * a.dim);
            a.peak_before[a.vectors] = task->sinks == NULL ? LEAST : task->sinks[i % task->group];
            a.total_before[a.vectors] = task->sinks == NULL ? 0.0f : 1.0f;
        }
    memset(a.before, 0, (size_t)(a.vectors * a.dim) * sizeof(float));
    if (task->count == 1) {
        attend_own(&a, task->segments, 0, task->first_key, task->last_key);
    } else {
        a.pages = task->segments[0].pages;
        a.position = task->shared - 1; /* which all of them see */
        fold_runs(&a, 0, task->shared);
        for (int i = 0, from = 0; i < task->count; from += task->segments[i++].queries * task->group) {
            const bough_segment *own = &task->segments[i];
            attend_own(&a, own, from, task->shared, own->position + own->queries);
        }
    }
    for (int i = 0; task->weight != NULL && i < a.vectors; i++) {
        task->weight[i] = a.peak[i];
        task->weight[a.vectors + i] = a.total[i];
        memcpy(task->segments[0].out + i * bough_run_dim(task->dim), a.out + i * a.dim, (size_t)a.dim * sizeof(float));
    }
}

static void join(const bough_attend *task, int64_t runs, const float *results, int64_t floats) {
    int64_t dim = (task->dim + LANES - 1) / LANES * LANES, apart = bough_run_dim(task->dim);
    for (int head = 0; head < task->group; head++) {
        _Alignas(64) float all[MAX_DIM] = {0};
        float peak = task->sinks == NULL ? LEAST : task->sinks[head], total = task->sinks == NULL ? 0.0f : 1.0f;
        for (int64_t run = 0; run < runs; run++) {
            const float *result = results + run * floats, *weight = result + task->group * apart;
            fold(all, &peak, &total, result + head * apart, weight[head], weight[task->group + head], dim);
        }
        float factor = 1.0f / total;
        for (int d = 0; d < task->dim; d++)
            task->segments[0].out[head * task->dim + d] = all[d] * factor;
    }
}

/* ---- sampling */

static void forbid(float *x, int64_t size, const uint32_t *allowed) {
    int64_t whole = size - size % 32;
    for (int64_t first = 0; first < whole; first += 32) {
        uint32_t word = allowed[first / 32];
        if (word == UINT32_MAX)
            continue;
        for (int i = 0; i < 32; i++)
            x[first + i] += word >> i & 1 ? 0.0f : -INFINITY;
    }
    for (int64_t i = whole; i < size; i++)
        x[i] += allowed[i / 32] >> i % 32 & 1 ? 0.0f : -INFINITY;
}

enum { AT_ONCE = 4 * LANES };

/* The largest of AT_ONCE numbers. */
INLINE float largest_in(const float *x) {
    return largest_of(larger(larger(load(x), load(x + LANES)), larger(load(x + 2 * LANES), load(x + 3 * LANES))));
}

static int64_t best(const float *x, int64_t size, float *peak) {
    vec most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    ivec strange[4] = {0};
    int64_t whole = size - size % AT_ONCE;
    for (int64_t i = 0; i < whole; i += AT_ONCE)
        for (int part = 0; part < 4; part++) {
            vec v = load(x + i + part * LANES);
            strange[part] |= v != v;
            most[part] = larger(v, most[part]);
        }
    float top = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    ivec any_strange = strange[0] | strange[1] | strange[2] | strange[3];
    bool has_nan = false;
    for (int i = 0; i < LANES; i++)
        has_nan |= any_strange[i] != 0;
    for (int64_t i = whole; i < size; i++) {
        has_nan |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    if (has_nan) {
        *peak = NAN;
        return 0;
    }
    *peak = top;
    int64_t place = 0;
    while (place < whole && largest_in(x + place) < top)
        place += AT_ONCE;
    while (place < size - 1 && x[place] != top)
        place++;
    return place;
}

static int64_t find_above(const float *x, int64_t size, float bar, int32_t *places) {
    int64_t count = 0, whole = size - size % AT_ONCE;
    for (int64_t i = 0; i < whole; i += AT_ONCE) {
        if (largest_in(x + i) < bar)
            continue;
        for (int64_t at = i; at < i + AT_ONCE; at++) { /* without a branch, which nobody could foresee */
            places[count] = (int32_t)at;
            count += x[at] >= bar;
        }
    }
    for (int64_t at = whole; at < size; at++)
        if (x[at] >= bar)
            places[count++] = (int32_t)at;
    return count;
}

static void weigh_all(float *x, int64_t size, float peak, float temperature) {
    vec top = splat(peak), divisor = splat(temperature);
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        store(x + i, exp_((load(x + i) - top) / divisor));
    for (int64_t i = whole; i < size; i++)
        x[i] = expf((x[i] - peak) / temperature);
}

static float sum_weights(const float *x, int64_t size, float peak, float temperature) {
    vec sum = {0}, top = splat(peak), divisor = splat(temperature);
    int64_t whole = size - size % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        sum += exp_((load(x + i) - top) / divisor);
    float rest = 0.0f;
    for (int64_t i = whole; i < size; i++)
        rest += expf((x[i] - peak) / temperature);
    return sum_of(sum) + rest;
}

static int64_t find_weight(const float *x, int64_t size, float peak, float temperature, double target) {
    double passed = 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < size; i++) {
        float weight = expf((x[i] - peak) / temperature);
        passed += weight;
        if (weight > 0.0f)
            last = i;
        if (passed > target)
            break;
    }
    return last;
}

static const bough_ops OPS = {rms_norm, layer_norm, rotate, activate, silu_mul, gelu_tanh_mul, clamped_mul,
                              dot, add_scaled, softcap, attend, join, narrow, forbid, best,
                              find_above, weigh_all, sum_weights, find_weight};
