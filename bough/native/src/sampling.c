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

/* What one thread works in, with room for all tokens. */
typedef struct {
    candidate *found, *spare;
    int32_t *ids;
    float *weights;
} room;

/* ---- random numbers: the same as those of core/seeds.py and kernels/sampling/rows.py, to the last bit */

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

/* The sum of all weights; where asked, also that of each block. */
static double sum_all(const drawing *d, const bough_ops *ops, double *sums) {
    double total = 0.0;
    for (int64_t first = 0; first < d->size; first += BLOCK) {
        int64_t count = d->size - first < BLOCK ? d->size - first : BLOCK;
        double sum = ops->sum_weights(d->logits + first, count, d->peak, d->temperature);
        total += sum;
        if (sums != NULL)
            sums[first / BLOCK] = sum;
    }
    return total;
}

/* The token on which a random number falls: the block first, then the place in it. */
static int64_t draw(const drawing *d, const bough_ops *ops) {
    double sums[BOUGH_MAX_VOCABULARY / BLOCK], target = d->number * sum_all(d, ops, sums), passed = 0.0;
    int64_t blocks = (d->size + BLOCK - 1) / BLOCK, block = 0;
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
static int64_t find_candidates(const drawing *d, const bough_ops *ops, double least, const room *room) {
    float bar = least > 0.0 ? d->peak + d->temperature * (float)log(least) : -INFINITY;
    int64_t count = ops->find_above(d->logits, d->size, bar, room->ids);
    for (int64_t i = 0; i < count; i++)
        room->weights[i] = d->logits[room->ids[i]];
    ops->weigh(room->weights, count, d->peak, d->temperature);
    for (int64_t i = 0; i < count; i++) {
        float logit = d->logits[room->ids[i]], weight = logit == -INFINITY ? 0.0f : room->weights[i];
        room->found[i] = (candidate){rank_of(logit, room->ids[i]), room->ids[i], weight};
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
 * if that is sooner, with which the weights reach `mass`. A copy of the candidates is worked in: their order stays. */
static uint64_t find_cut(const candidate *given, int64_t count, int64_t places, double mass, candidate *all) {
    memcpy(all, given, (size_t)count * sizeof *all);
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

/* Candidates among which the cut surely lies: as many as top-k keeps, or as heavy as what top-p keeps of all tokens.
 * `mass` becomes the mass at which top-p cuts. */
static int64_t gather(const drawing *d, const bough_ops *ops, const room *room, double *mass) {
    bool has_k = d->top_k < d->size, has_p = d->top_p < 1.0;
    *mass = has_p && !has_k ? d->top_p * sum_all(d, ops, NULL) : INFINITY;
    if (!has_k && !has_p)
        return find_candidates(d, ops, 0.99 * d->min_p, room);
    int64_t count;
    for (double bar = 0x1p-5;; bar = bar > 0x1p-40 ? bar * 0x1p-5 : 0.0) {
        count = find_candidates(d, ops, bar, room);
        bool enough = has_k ? count >= d->top_k
                            : mass_up_to(room->found, count, UINT64_MAX) >= *mass * 1.0001; /* rounding must not decide */
        if (enough || bar == 0.0)
            break;
    }
    if (has_k && has_p)
        *mass = d->top_p * mass_up_to(room->found, count, find_cut(room->found, count, d->top_k, INFINITY, room->spare));
    return count;
}

static int64_t draw_filtered(const drawing *d, const bough_ops *ops, const room *room) {
    candidate *found = room->found;
    double mass, total = 0.0, passed = 0.0;
    int64_t count = gather(d, ops, room, &mass), kept = 0, token = 0;
    uint64_t cut = UINT64_MAX;
    if (!isinf(mass) || d->top_k < count)
        cut = find_cut(found, count, d->top_k, mass, room->spare);
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
    int64_t each = 2 * sizeof(candidate) + sizeof(int32_t) + sizeof(float);
    return (vocabulary * each + 63) / 64 * 64;
}

static room room_in(void *slice, int64_t vocabulary) {
    candidate *found = slice, *spare = found + vocabulary;
    int32_t *ids = (int32_t *)(spare + vocabulary);
    return (room){found, spare, ids, (float *)(ids + vocabulary)};
}

size_t bough_sampling_scratch(int64_t vocabulary, int threads) { return (size_t)(slice_bytes(vocabulary) * threads); }

/* Each row belongs to whoever has its tile. */
static void sample_row(const bough_sampling *rows, const bough_ops *ops, int64_t place, const room *room) {
    int32_t row = rows->rows[place];
    float *logits = rows->logits + place * rows->vocabulary;
    if (rows->masks != NULL && rows->mask_lines[place] >= 0)
        ops->forbid(logits, rows->vocabulary,
                    rows->masks + rows->mask_lines[place] * ((rows->vocabulary + 31) / 32));
    drawing d = {.logits = logits,
                 .size = rows->vocabulary,
                 .temperature = rows->temperature[row],
                 .min_p = rows->min_p[row],
                 .top_k = rows->top_k[row],
                 .top_p = rows->top_p[row],
                 .number = uniform(rows->seed[row], rows->generated[row])};
    int64_t token = ops->best(d.logits, d.size, &d.peak);
    bool bad = !isfinite(d.peak), filtered = d.top_k < d.size || d.top_p < 1.0 || d.min_p > 0.0f;
    if (!bad && rows->random[row])
        token = filtered ? draw_filtered(&d, ops, room) : draw(&d, ops);
    rows->tokens[place] = bad ? 0 : token;
    rows->bad[place] = bad;
    rows->generated[row]++;
}

static void sample_all(bough_thread *thread, void *argument) {
    const sampling_job *job = argument;
    int64_t vocabulary = job->rows->vocabulary;
    room own = room_in((char *)job->rows->scratch + thread->index * slice_bytes(vocabulary), vocabulary);
    for (int64_t place; (place = bough_tile(thread, job->rows->count)) < job->rows->count;)
        sample_row(job->rows, job->ops, place, &own);
    bough_barrier(thread);
}

void bough_sample(const bough_sampling *rows, bough_thread_pool *pool) {
    sampling_job job = {rows, bough_ops_here()};
    if (rows->count == 1) { /* nothing to share: the others need not be woken */
        room own = room_in(rows->scratch, rows->vocabulary);
        sample_row(rows, job.ops, 0, &own);
        return;
    }
    bough_thread_pool_run(pool, sample_all, &job);
}
