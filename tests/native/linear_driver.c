/* Compares the variant of the product that a CPU gets with the plain one, over formats, sizes and numbers of tokens.
 *
 * A program of its own, so that it can be compiled for another machine and run by an emulator. Prints the variants'
 * names and returns 0 if all results agree.
 */
#include "cpu.h"
#include "linear_tile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 53, K = 512, MAX_TOKENS = 41 };

static const int TOKENS[] = {1, 2, 3, 4, 8, 15, MAX_TOKENS};

static float random_float(void) { return (float)rand() / (float)RAND_MAX * 2.0f - 1.0f; }

/* Random codes, and scales and offsets of ordinary size. */
static bough_weight random_weight(int format) {
    size_t size = bough_weight_bytes(format, N, K), tile = (size_t)tile_bytes(format, K);
    size_t codes = takes_floats(format) ? 0 : (size_t)scales_start(format, K);
    uint8_t *blob = aligned_alloc(64, size);
    for (size_t i = 0; i < size; i++) {
        if (i % tile < codes)
            blob[i] = (uint8_t)(format == BOUGH_FORMAT_Q8_MIN ? rand() % 128 : rand());
        else
            blob[i] = (uint8_t)(32 + rand() % 16 + (rand() & 128));
    }
    return (bough_weight){.format = format, .n = N, .k = K, .blob = blob};
}

static void compute(bough_thread_pool *pool, int threads, const bough_weight *weight, const float *x, float *y,
                    const float *bias, int m, bool plain) {
    bough_cpu_allow(plain ? 0 : ~0u);
    size_t size = (bough_linear_scratch(weight, 1, m, threads) + 63) / 64 * 64;
    void *scratch = aligned_alloc(64, size);
    bough_linear_alone(pool, weight, 1, x, K, y, N, bias, m, m > 8, scratch);
    free(scratch);
}

/* The largest difference, in units of the largest result. */
static float compare(const float *found, const float *expected, int count) {
    float difference = 0.0f, largest = 0.0f;
    for (int i = 0; i < count; i++) {
        difference = fmaxf(difference, fabsf(found[i] - expected[i]));
        largest = fmaxf(largest, fabsf(expected[i]));
    }
    return largest > 0.0f ? difference / largest : INFINITY;
}

/* Whether some result of a token with NaN in it is a number. */
static bool hides_nan(bough_thread_pool *pool, int threads, const bough_weight *weight) {
    float x[K] = {0}, y[N];
    x[K / 2 + 5] = NAN;
    compute(pool, threads, weight, x, y, NULL, 1, false);
    for (int i = 0; i < N; i++)
        if (y[i] == y[i])
            return true;
    return false;
}

int main(void) {
    static float x[MAX_TOKENS * K], found[MAX_TOKENS * N], expected[MAX_TOKENS * N], bias[N];
    int failures = 0;
    for (int i = 0; i < MAX_TOKENS * K; i++)
        x[i] = random_float();
    for (int i = 0; i < N; i++)
        bias[i] = random_float();
    for (int threads = 1; threads <= 2; threads++) {
        bough_thread_pool *pool = bough_thread_pool_create(threads, false);
        for (int format = 0; format < BOUGH_FORMATS; format++) {
            bough_weight weight = random_weight(format);
            for (size_t t = 0; t < sizeof TOKENS / sizeof *TOKENS; t++) {
                int m = TOKENS[t];
                compute(pool, threads, &weight, x, expected, bias, m, true);
                compute(pool, threads, &weight, x, found, bias, m, false);
                const char *variant = bough_linear_variant(format, m > 8);
                float limit = strcmp(variant, "amx") ? 1e-5f : 1e-2f, difference = compare(found, expected, m * N);
                if (!(difference <= limit)) {
                    printf("format %d, %d tokens, %d threads: %s differs by %g\n", format, m, threads, variant,
                           difference);
                    failures++;
                }
            }
            if (hides_nan(pool, threads, &weight)) {
                printf("format %d, %d threads: NaN does not show\n", format, threads);
                failures++;
            }
            free((void *)weight.blob);
        }
        bough_thread_pool_destroy(pool);
    }
    printf("%s %s\n", bough_linear_variant(BOUGH_FORMAT_Q4, false), bough_linear_variant(BOUGH_FORMAT_Q4, true));
    return failures != 0;
}
