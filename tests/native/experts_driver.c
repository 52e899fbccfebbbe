/* Compares the experts' products on several threads with those on one, over formats and numbers of tokens: the same to
 * the last bit. A program of its own, so that it can be compiled with sanitizers. Returns 0 if all agree.
 */
#include "experts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 7, PER_TOKEN = 2, HIDDEN = 64, INNER = 96, MAX_ROWS = 1100, SLOTS = 2, RANK_TILES = 2 };

static const int ROWS[] = {1, 3, 40, MAX_ROWS};
static const int FORMATS[] = {BOUGH_FORMAT_F32, BOUGH_FORMAT_Q8, BOUGH_FORMAT_Q4_MIN};

static float random_float(void) { return (float)rand() / (float)RAND_MAX * 2.0f - 1.0f; }

static bough_weight random_weight(int format, int n, int k) {
    static float rows[INNER * INNER];
    for (int i = 0; i < n * k; i++)
        rows[i] = random_float();
    uint8_t *blob = aligned_alloc(64, (bough_weight_bytes(format, n, k) + 63) / 64 * 64);
    bough_weight_pack(format, BOUGH_SOURCE_F32, n, k, rows, blob, 0, n);
    return (bough_weight){.format = format, .n = n, .k = k, .blob = blob};
}

typedef struct {
    bough_routing routing;
    bough_experts experts;
    const float *x;
    int64_t rows;
    const int64_t *slots;
    float *scores, *weights, *out;
    int32_t *ids;
    void *scratch;
} step;

/* Several layers behind each other, so that late threads meet the next one's work. */
static void run(bough_thread *thread, void *argument) {
    step *s = argument;
    for (int layer = 0; layer < 4; layer++) {
        bough_route(&s->routing, s->x, s->rows, s->slots, s->scores, s->ids, s->weights, bough_ops_here(), thread);
        bough_run_experts(&s->experts, s->x, s->rows, s->slots, s->ids, s->weights, s->out, s->scratch,
                          bough_ops_here(), thread);
    }
}

static void compute(step *s, int threads, float *out) {
    bough_thread_pool *pool = bough_thread_pool_create(threads, false);
    s->scratch = aligned_alloc(64, (bough_experts_scratch(&s->experts, s->rows, threads) + 63) / 64 * 64);
    s->out = out;
    bough_thread_pool_run(pool, run, s);
    bough_thread_pool_destroy(pool);
    free(s->scratch);
}

/* Adapters of all experts in two slots, or of what is no expert. `matrices` of them stand side by side. */
static bough_lora random_lora(bough_thin *thin, int experts, int matrices, int inputs, const int64_t *bands) {
    static float numbers[RANK_TILES * 16 * (2 * INNER + 16)]; /* all are the same */
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        numbers[i] = random_float();
    for (int i = 0; i < SLOTS * experts * matrices; i++)
        thin[i] = (bough_thin){numbers, numbers, i % 3 == 2 ? 0 : 3 + 7 * (i % 5)};
    return (bough_lora){thin, matrices, inputs, bands};
}

int main(void) {
    static bough_thin thin[3][SLOTS * EXPERTS * 2];
    static float rows_thin[MAX_ROWS * BOUGH_MAX_RANK];
    static const int64_t bands[3][3] = {{0, INNER, 2 * INNER}, {0, HIDDEN}, {0, EXPERTS}};
    static int64_t slots[MAX_ROWS];
    for (int i = 0; i < MAX_ROWS; i++)
        slots[i] = i / 5 % (SLOTS + 1);
    bough_lora lora[] = {random_lora(thin[0], EXPERTS, 2, HIDDEN, bands[0]),
                         random_lora(thin[1], EXPERTS, 1, INNER, bands[1]),
                         random_lora(thin[2], 1, 1, HIDDEN, bands[2])};
    static float x[MAX_ROWS * HIDDEN], router[EXPERTS * HIDDEN], correction[EXPERTS], gate_up_bias[EXPERTS * 2 * INNER];
    static float down_bias[EXPERTS * HIDDEN], scores[MAX_ROWS * EXPERTS], weights[MAX_ROWS * PER_TOKEN];
    static float alone[MAX_ROWS * HIDDEN], together[MAX_ROWS * HIDDEN];
    static int32_t ids[MAX_ROWS * PER_TOKEN];
    float *drawn[] = {x, router, correction, gate_up_bias, down_bias};
    int sizes[] = {MAX_ROWS * HIDDEN, EXPERTS * HIDDEN, EXPERTS, EXPERTS * 2 * INNER, EXPERTS * HIDDEN};
    for (int array = 0; array < 5; array++)
        for (int i = 0; i < sizes[array]; i++)
            drawn[array][i] = random_float();
    int failures = 0;
    for (int format = 0; format < 3; format++) {
        bough_weight parts[EXPERTS * 3];
        for (int i = 0; i < EXPERTS * 3; i++)
            parts[i] = random_weight(FORMATS[format], i % 3 == 2 ? HIDDEN : INNER, i % 3 == 2 ? INNER : HIDDEN);
        for (int turn = 0; turn < 4; turn++) {
            step s = {
                .slots = slots,
                .routing = {.router = router, .correction = correction, .size = HIDDEN, .experts = EXPERTS,
                            .per_token = PER_TOKEN, .scores = 1, .groups = 1, .top_groups = 1, .scale = 1.0f,
                            .lora = &lora[2], .thin = rows_thin},
                .experts = {.weights = parts, .gate_up_bias = gate_up_bias, .down_bias = down_bias, .experts = EXPERTS,
                            .per_token = PER_TOKEN, .activation = 2, .slope = 1.7f, .limit = 3.0f,
                            .lora = lora},
                .x = x, .rows = ROWS[turn], .scores = scores, .weights = weights, .ids = ids,
            };
            compute(&s, 1, alone);
            compute(&s, 3, together);
            if (memcmp(alone, together, (size_t)ROWS[turn] * HIDDEN * sizeof(float))) {
                printf("format %d, %d rows: three threads give something else\n", FORMATS[format], ROWS[turn]);
                failures++;
            }
        }
        for (int i = 0; i < EXPERTS * 3; i++)
            free((void *)parts[i].blob);
    }
    return failures != 0;
}
