/* Draws the next token of rows that are greedy or have a temperature and nothing else. */
#include "sampling.h"

#include "ops.h"

#include <math.h>

enum { BLOCK = 128 };

typedef struct {
    const bough_sampling *rows;
    const bough_ops *ops;
} sampling_job;

/* The token on which a random number falls: the block first, then the place in it. */
static int64_t draw(const bough_ops *ops, const float *logits, int64_t size, float peak, float temperature,
                    double number) {
    double sums[BOUGH_MAX_VOCABULARY / BLOCK], total = 0.0, passed = 0.0;
    int64_t blocks = (size + BLOCK - 1) / BLOCK, block = 0;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t count = size - i * BLOCK < BLOCK ? size - i * BLOCK : BLOCK;
        sums[i] = ops->sum_weights(logits + i * BLOCK, count, peak, temperature);
        total += sums[i];
    }
    double target = number * total;
    while (block < blocks - 1 && passed + sums[block] <= target)
        passed += sums[block++];
    int64_t first = block * BLOCK, count = size - first < BLOCK ? size - first : BLOCK;
    return first + ops->find_weight(logits + first, count, peak, temperature, target - passed);
}

static void sample_all(bough_team *team, void *argument) {
    const sampling_job *job = argument;
    const bough_sampling *rows = job->rows;
    for (int64_t row; (row = bough_tile(team)) < rows->count;) {
        const float *logits = rows->logits + row * rows->vocabulary;
        float peak, temperature = rows->temperatures[row];
        int64_t token = job->ops->best(logits, rows->vocabulary, &peak);
        bool bad = !isfinite(peak);
        if (!bad && temperature > 0.0f)
            token = draw(job->ops, logits, rows->vocabulary, peak, temperature, rows->numbers[row]);
        rows->tokens[row] = bad ? 0 : token;
        rows->bad[row] = bad;
    }
    bough_barrier(team);
}

void bough_sample(const bough_sampling *rows, bough_crew *crew) {
    sampling_job job = {rows, bough_ops_here()};
    bough_crew_run(crew, sample_all, &job);
}
