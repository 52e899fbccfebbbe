/* Compares the operations of `ops.h` that a CPU gets with plain arithmetic in double precision.
 *
 * A program of its own, so that it can be compiled for another machine and run by an emulator. Prints what differs and
 * returns 0 if nothing does.
 */
#include "ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 83, SLOTS = 150, KV_HEADS = 2, GROUP = 3, QUERIES = 4, DIM = 24 };

static int failures = 0;

static float random_float(void) { return (float)rand() / (float)RAND_MAX * 4.0f - 2.0f; }

static void fill(float *x, int count) {
    for (int i = 0; i < count; i++)
        x[i] = random_float();
}

static void check(const char *what, double found, double expected, double tolerance) {
    if (fabs(found - expected) <= tolerance * (1.0 + fabs(expected)))
        return;
    printf("%s: %.9g, not %.9g\n", what, found, expected);
    failures++;
}

static void check_rows(const bough_ops *ops) {
    float x[SIZE], residual[SIZE], weight[SIZE], out[SIZE], sum[SIZE];
    fill(x, SIZE), fill(residual, SIZE), fill(weight, SIZE);
    ops->rms_norm(x, residual, weight, 1e-5f, true, SIZE, out, sum);
    double squares = 0.0;
    for (int i = 0; i < SIZE; i++)
        squares += ((double)x[i] + residual[i]) * ((double)x[i] + residual[i]);
    for (int i = 0; i < SIZE; i++) {
        check("sum", sum[i], (double)x[i] + residual[i], 1e-6);
        check("rms_norm", out[i], ((double)x[i] + residual[i]) / sqrt(squares / SIZE + 1e-5) * (weight[i] + 1.0), 1e-5);
    }
    for (int with = 0; with < 2; with++) {
        double mean = 0.0, variance = 0.0;
        ops->layer_norm(x, with ? weight : NULL, with ? residual : NULL, 1e-5f, SIZE, out);
        for (int i = 0; i < SIZE; i++)
            mean += x[i] / (double)SIZE;
        for (int i = 0; i < SIZE; i++)
            variance += (x[i] - mean) * (x[i] - mean) / SIZE;
        for (int i = 0; i < SIZE; i++) {
            double normed = (x[i] - mean) / sqrt(variance + 1e-5);
            check("layer_norm", out[i], with ? normed * weight[i] + residual[i] : normed, 1e-5);
        }
    }
    for (int kind = BOUGH_SILU; kind <= BOUGH_SQUARE; kind++) {
        ops->activate(x, kind, out, SIZE);
        for (int i = 0; i < SIZE; i++) {
            double a = x[i], inner = 0.7978845608 * (a + 0.044715 * a * a * a);
            double expected[] = {a / (1.0 + exp(-a)), 0.5 * a * (1.0 + tanh(inner)), 0.5 * a * (1.0 + erf(a / sqrt(2.0))),
                                 fmax(a, 0.0), a * a};
            check("activate", out[i], expected[kind], 1e-5);
        }
    }
    float head[2 * SIZE], before[2 * SIZE], cosine[SIZE], sine[SIZE];
    fill(head, 2 * SIZE), fill(cosine, SIZE), fill(sine, SIZE);
    memcpy(before, head, sizeof head);
    ops->rotate(head, cosine, sine, SIZE);
    for (int i = 0; i < SIZE; i++) {
        check("rotate", head[i], (double)before[i] * cosine[i] - (double)before[SIZE + i] * sine[i], 1e-5);
        check("rotate", head[SIZE + i], (double)before[SIZE + i] * cosine[i] + (double)before[i] * sine[i], 1e-5);
    }
    ops->silu_mul(x, weight, out, SIZE);
    for (int i = 0; i < SIZE; i++)
        check("silu", out[i], x[i] / (1.0 + exp(-(double)x[i])) * weight[i], 1e-5);
    ops->gelu_tanh_mul(x, weight, out, SIZE);
    for (int i = 0; i < SIZE; i++)
        check("gelu", out[i], 0.5 * x[i] * (1.0 + tanh(0.7978845608 * (x[i] + 0.044715 * pow(x[i], 3)))) * weight[i], 1e-5);
    ops->clamped_mul(x, weight, out, SIZE, 1.702f, 1.1f);
    for (int i = 0; i < SIZE; i++) {
        double gate = fmin(x[i], 1.1f), up = fmax(fmin(weight[i], 1.1f), -1.1f);
        check("clamped", out[i], gate / (1.0 + exp(-1.702 * gate)) * (up + 1.0), 1e-5);
    }
    double product = 0.0;
    for (int i = 0; i < SIZE; i++)
        product += (double)x[i] * weight[i];
    check("dot", ops->dot(x, weight, SIZE), product, 1e-5);
    memcpy(out, x, sizeof out);
    ops->add_scaled(out, weight, 0.3f, SIZE);
    for (int i = 0; i < SIZE; i++)
        check("add_scaled", out[i], x[i] + 0.3 * weight[i], 1e-5);
    memcpy(out, x, sizeof out);
    ops->softcap(out, SIZE, 0.7f);
    for (int i = 0; i < SIZE; i++)
        check("softcap", out[i], 0.7 * tanh(x[i] / 0.7), 1e-5);
}

static void check_sampling(const bough_ops *ops) {
    float x[SIZE], peak;
    int32_t places[SIZE];
    fill(x, SIZE);
    x[SIZE - 1] = 3.0f;
    check("best", (double)ops->best(x, SIZE, &peak), SIZE - 1, 0.0);
    check("peak", peak, 3.0, 0.0);
    double sum = 0.0;
    int above = 0;
    for (int i = 0; i < SIZE; i++)
        sum += exp((x[i] - 3.0) / 0.6);
    check("sum_weights", ops->sum_weights(x, SIZE, peak, 0.6f), sum, 1e-5);
    int64_t count = ops->find_above(x, SIZE, 0.5f, places);
    for (int i = 0; i < SIZE; i++)
        if (x[i] >= 0.5f)
            check("find_above", places[above++], i, 0.0);
    check("above", (double)count, above, 0.0);
    double passed = 0.0;
    int drawn = 0;
    while ((passed += exp((x[drawn] - 3.0) / 0.6)) <= 0.5 * sum)
        drawn++;
    check("find_weight", (double)ops->find_weight(x, SIZE, peak, 0.6f, 0.5 * sum), drawn, 0.0);
}

/* One query's head against all keys that it sees; keys and values as they were before they were rounded. */
static void expect_attention(const float *q, const float *keys, const float *values, const int32_t *pages, int64_t first,
                             int64_t last, const float *found, double tolerance) {
    double total = 0.0, out[DIM] = {0};
    for (int64_t key = first; key <= last; key++) {
        const float *k = keys + pages[key] * KV_HEADS * DIM, *v = values + pages[key] * KV_HEADS * DIM;
        double score = 0.0;
        for (int d = 0; d < DIM; d++)
            score += (double)q[d] * k[d];
        double weight = exp(0.2 * score);
        total += weight;
        for (int d = 0; d < DIM; d++)
            out[d] += weight * v[d];
    }
    for (int d = 0; d < DIM; d++)
        check("attend", found[d], out[d] / total, tolerance);
}

static void check_attention(const bough_ops *ops, int number, int64_t window, double tolerance) {
    static float keys[SLOTS * KV_HEADS * DIM], values[SLOTS * KV_HEADS * DIM];
    static _Alignas(64) char kept_keys[sizeof keys], kept_values[sizeof values];
    float q[QUERIES * GROUP * DIM], out[QUERIES * GROUP * DIM];
    int32_t pages[SLOTS];
    fill(keys, SLOTS * KV_HEADS * DIM), fill(values, SLOTS * KV_HEADS * DIM), fill(q, QUERIES * GROUP * DIM);
    ops->narrow(keys, number, SLOTS * KV_HEADS * DIM, kept_keys);
    ops->narrow(values, number, SLOTS * KV_HEADS * DIM, kept_values);
    for (int i = 0; i < SLOTS; i++)
        pages[i] = (i * 7) % SLOTS;
    size_t head = (size_t)DIM * (number == BOUGH_FLOAT32 ? 4 : 2); /* the second of the two */
    int64_t position = 120, first = window == 0 ? 0 : position - window + 1;
    bough_segment own = {.q = q, .out = out, .queries = QUERIES, .pages = pages, .position = position};
    bough_attend task = {.segments = {own},
                         .count = 1,
                         .q_stride = GROUP * DIM,
                         .group = GROUP,
                         .dim = DIM,
                         .keys = kept_keys + head,
                         .values = kept_values + head,
                         .number = number,
                         .slot_stride = KV_HEADS * DIM,
                         .page_size = 1,
                         .first_key = first,
                         .last_key = position + QUERIES,
                         .window = window,
                         .scale = 0.2f,
                         .out_stride = GROUP * DIM};
    ops->attend(&task);
    for (int query = 0; query < QUERIES; query++)
        for (int i = 0; i < GROUP; i++) {
            int at = (query * GROUP + i) * DIM;
            expect_attention(q + at, keys + DIM, values + DIM, pages, window == 0 ? 0 : first + query, position + query,
                             out + at, tolerance);
        }
}

/* A query's result has the same bits alone as in a tile whose other queries see keys before its window. */
static void check_company(const bough_ops *ops) {
    enum { TILE = 20, WINDOW = BOUGH_BLOCK_KEYS, POSITION = 120 };
    static float keys[SLOTS * DIM], values[SLOTS * DIM], q[TILE * DIM], tile[TILE * DIM], alone[TILE * DIM];
    static _Alignas(64) char kept_keys[sizeof keys], kept_values[sizeof values];
    int32_t pages[SLOTS];
    fill(keys, SLOTS * DIM), fill(values, SLOTS * DIM), fill(q, TILE * DIM);
    ops->narrow(keys, BOUGH_FLOAT16, SLOTS * DIM, kept_keys);
    ops->narrow(values, BOUGH_FLOAT16, SLOTS * DIM, kept_values);
    for (int i = 0; i < SLOTS; i++)
        pages[i] = i;
    for (int query = -1; query < TILE; query++) { /* first the tile, then each query */
        int64_t position = POSITION + (query < 0 ? 0 : query), first = position - WINDOW + 1;
        bough_segment own = {.q = q + (query < 0 ? 0 : query) * DIM,
                             .out = query < 0 ? tile : alone + query * DIM,
                             .queries = query < 0 ? TILE : 1,
                             .pages = pages,
                             .position = position};
        bough_attend task = {.segments = {own},
                             .count = 1,
                             .q_stride = DIM,
                             .group = 1,
                             .dim = DIM,
                             .keys = kept_keys,
                             .values = kept_values,
                             .number = BOUGH_FLOAT16,
                             .slot_stride = DIM,
                             .page_size = 1,
                             .first_key = first - first % BOUGH_BLOCK_KEYS,
                             .last_key = query < 0 ? position + TILE : position + 1,
                             .window = WINDOW,
                             .scale = 0.2f,
                             .out_stride = DIM};
        ops->attend(&task);
    }
    for (int i = 0; i < TILE * DIM; i++)
        check("alone and in a tile", alone[i], tile[i], 0.0);
}

int main(void) {
    const bough_ops *ops = bough_ops_here();
    check_rows(ops);
    check_sampling(ops);
    for (int64_t window = 0; window <= 50; window += 50) {
        check_attention(ops, BOUGH_FLOAT32, window, 1e-5);
        check_attention(ops, BOUGH_FLOAT16, window, 4e-3);
        check_attention(ops, BOUGH_BFLOAT16, window, 4e-2);
    }
    for (int round = 0; round < 100; round++) /* enough for sums half-way between two numbers, which show a remainder */
        check_company(ops);
    return failures != 0;
}
