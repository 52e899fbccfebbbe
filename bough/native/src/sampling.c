/* Without filters, a draw is two passes over the logits. With filters, only tokens that could be kept are looked at: all
 * whose weight is above a bar that is low enough not to matter. Which of them are kept is then a question of where in
 * their ranking to cut, which is found without sorting them.
 */
#include "sampling.h"

#include "ops.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 128 };

typedef struct {
    const bough_sampling *rows;
    const bough_ops *ops;
} sampling_job;

/* What a row asks for. */
typedef struct {
    const float *logits;
    int64_t size;
    float peak, temperature, min_p;
    int64_t top_k;
    double top_p, number; /* the random number */
} drawing;

/* A token that may be kept. `rank` is unique, and lower for what ranks higher. */
typedef struct {
    uint64_t rank;
    int32_t token;
    float weight;
} candidate;

/* ---- random numbers: the same as those of core/seeds.py and kernels/sampling/uniform.py, to the last bit */

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    value = (value ^ value >> 27) * UINT64_C(0x94D049BB133111EB);
    return value ^ value >> 31;
}

static double uniform(int64_t seed, int64_t position) {
    uint64_t bits = mix(mix((uint64_t)seed) + (uint64_t)(position + 1) * UINT64_C(0x9E3779B97F4A7C15));
    return (double)(bits >> 12) * 0x1p-52;
}

/* ---- all tokens */

/* The token on which a random number falls: the block first, then the place in it. */
static int64_t draw(const drawing *d, const bough_ops *ops) {
    double sums[BOUGH_MAX_VOCABULARY / BLOCK], total = 0.0, passed = 0.0;
    int64_t blocks = (d->size + BLOCK - 1) / BLOCK, block = 0;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t count = d->size - i * BLOCK < BLOCK ? d->size - i * BLOCK : BLOCK;
        sums[i] = ops->sum_weights(d->logits + i * BLOCK, count, d->peak, d->temperature);
        total += sums[i];
    }
    double target = d->number * total;
    while (block < blocks - 1 && passed + sums[block] <= target)
        passed += sums[block++];
    int64_t first = block * BLOCK, count = d->size - first < BLOCK ? d->size - first : BLOCK;
    return first + ops->find_weight(d->logits + first, count, d->peak, d->temperature, target - passed);
}

/* ---- tokens that filters leave */

/* A number that is lower for larger logits, and of equal ones for the lower token. */
static uint64_t rank_of(float logit, int32_t token) {
    uint32_t bits;
    logit += 0.0f; /* of the two zeros the positive one */
    memcpy(&bits, &logit, sizeof bits);
    uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)~ascending << 32 | (uint32_t)token;
}

/* All tokens with at least the weight `least`, in order. How many. */
static int64_t find_candidates(const drawing *d, const bough_ops *ops, double least, int32_t *ids, candidate *found) {
    float bar = least > 0.0 ? d->peak + d->temperature * (float)log(least) : -INFINITY;
    int64_t count = ops->find_above(d->logits, d->size, bar, ids);
    for (int64_t i = 0; i < count; i++) {
        float logit = d->logits[ids[i]];
        found[i] = (candidate){rank_of(logit, ids[i]), ids[i], expf((logit - d->peak) / d->temperature)};
    }
    return count;
}

static void swap(candidate *a, candidate *b) {
    candidate held = *a;
    *a = *b;
    *b = held;
}

static uint64_t middle_rank(const candidate *all, int64_t count) {
    uint64_t a = all[0].rank, b = all[count / 2].rank, c = all[count - 1].rank;
    uint64_t low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
}

/* The rank of the last candidate that is kept, counted from the highest rank: the one with which `places` are kept or,
 * if that is sooner, with which the weights reach `mass`. The order of the candidates changes. */
static uint64_t find_cut(candidate *all, int64_t count, int64_t places, double mass) {
    while (count > 1) {
        uint64_t pivot = middle_rank(all, count);
        int64_t below = 0; /* behind these stand those above the pivot; the pivot itself is one of the first */
        double weight = 0.0;
        for (int64_t i = 0; i < count; i++)
            if (all[i].rank <= pivot) {
                weight += all[i].weight;
                swap(&all[below++], &all[i]);
            }
        if (below == count) { /* the pivot is the last: set it aside */
            int64_t last = 0;
            while (all[last].rank != pivot)
                last++;
            swap(&all[last], &all[--below]);
            weight -= all[below].weight;
        }
        if (below >= places || weight >= mass) {
            count = below;
        } else {
            all += below, count -= below, places -= below;
            mass -= weight;
        }
    }
    return all[0].rank;
}

static double mass_up_to(const candidate *all, int64_t count, uint64_t cut) {
    double mass = 0.0;
    for (int64_t i = 0; i < count; i++)
        mass += all[i].rank <= cut ? all[i].weight : 0.0;
    return mass;
}

/* The candidates among which the cut surely lies, and the mass at which top-p would cut. With top-p alone, tokens that
 * weigh less than their share of what it drops do not matter, all of them together. */
static int64_t gather(const drawing *d, const bough_ops *ops, int32_t *ids, candidate *found, candidate *copies,
                      double *mass) {
    bool has_k = d->top_k < d->size, has_p = d->top_p < 1.0;
    int64_t count;
    *mass = INFINITY;
    if (!has_k) {
        double total = 0.0;
        for (int64_t first = 0; has_p && first < d->size; first += BLOCK) /* a float is good for a block's sum */
            total += ops->sum_weights(d->logits + first, d->size - first < BLOCK ? d->size - first : BLOCK, d->peak,
                                      d->temperature);
        double least = has_p ? 0.5 * (1.0 - d->top_p) * total / (double)d->size : 0.99 * d->min_p;
        if (has_p)
            *mass = d->top_p * total;
        return find_candidates(d, ops, least, ids, found);
    }
    double least = 0x1p-10;
    while ((count = find_candidates(d, ops, least, ids, found)) < d->top_k && least > 0.0)
        least = least > 0x1p-30 ? least * 0x1p-10 : 0.0;
    if (has_p) {
        memcpy(copies, found, (size_t)count * sizeof *found);
        *mass = d->top_p * mass_up_to(found, count, find_cut(copies, count, d->top_k, INFINITY));
    }
    return count;
}

static int64_t draw_filtered(const drawing *d, const bough_ops *ops, candidate *found) {
    candidate *copies = found + d->size;
    int32_t *ids = (int32_t *)(copies + d->size);
    double mass, total = 0.0, passed = 0.0;
    int64_t count = gather(d, ops, ids, found, copies, &mass), token = 0;
    memcpy(copies, found, (size_t)count * sizeof *found);
    uint64_t cut = isinf(mass) && d->top_k >= count ? UINT64_MAX : find_cut(copies, count, d->top_k, mass);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        if (found[i].rank <= cut && found[i].weight >= d->min_p) {
            found[kept] = found[i];
            total += found[kept++].weight;
        }
    for (int64_t i = 0; i < kept && passed <= d->number * total; i++) {
        passed += found[i].weight;
        token = found[i].weight > 0.0f ? found[i].token : token;
    }
    return token;
}

/* ---- rows */

static int64_t slice_bytes(int64_t vocabulary) {
    return (vocabulary * (int64_t)(2 * sizeof(candidate) + sizeof(int32_t)) + 63) / 64 * 64;
}

size_t bough_sampling_scratch(int64_t vocabulary, int threads) { return (size_t)(slice_bytes(vocabulary) * threads); }

/* Each row belongs to whoever has its tile. */
static void sample_row(const bough_sampling *rows, const bough_ops *ops, int64_t place, void *scratch) {
    int32_t row = rows->rows[place];
    drawing d = {.logits = rows->logits + place * rows->vocabulary,
                 .size = rows->vocabulary,
                 .temperature = rows->temperature[row],
                 .min_p = rows->min_p[row],
                 .top_k = rows->top_k[row],
                 .top_p = rows->top_p[row],
                 .number = uniform(rows->seed[row], rows->generated[row])};
    int64_t token = ops->best(d.logits, d.size, &d.peak);
    bool bad = !isfinite(d.peak), filtered = d.top_k < d.size || d.top_p < 1.0 || d.min_p > 0.0f;
    if (!bad && rows->random[row])
        token = filtered ? draw_filtered(&d, ops, scratch) : draw(&d, ops);
    rows->tokens[place] = bad ? 0 : token;
    rows->bad[place] = bad;
    rows->generated[row]++;
}

static void sample_all(bough_team *team, void *argument) {
    const sampling_job *job = argument;
    char *slice = (char *)job->rows->scratch + team->thread * slice_bytes(job->rows->vocabulary);
    for (int64_t place; (place = bough_tile(team)) < job->rows->count;)
        sample_row(job->rows, job->ops, place, slice);
    bough_barrier(team);
}

void bough_sample(const bough_sampling *rows, bough_crew *crew) {
    sampling_job job = {rows, bough_ops_here()};
    bough_crew_run(crew, sample_all, &job);
}
