/* Makes the sets of a step and deals them out. Every thread makes them all, in the same order, which is cheap: a set is
 * a list of the sequences in it. Where there are few, as with one sequence that decodes, each run of keys is dealt out
 * alone; their results are then joined.
 */
#include "attention_sets.h"

#include "cpu.h"
#include "numbers.h"

enum {
    FEW = 4,       /* sets for each thread, below which keys are cut into runs */
    DEALS = 2,     /* how often each thread takes a set, at least */
    MAX_RUNS = 64, /* of one set that is cut; with more keys than that a set has work enough */
};

const bough_set_kernels *bough_set_kernels_for(const bough_attention_spec *spec) {
    const bough_set_kernels *found = bough_cpu_features() & BOUGH_AMX ? bough_attention_amx() : NULL;
    bool usual = spec->sinks == NULL && !spec->both_ways && spec->dim <= BOUGH_MAX_HEAD_DIM;
    return found != NULL && found->reads(spec->number) && usual ? found : NULL;
}

/* How sets are made, and how far a thread has come. */
typedef struct {
    const bough_attention_spec *spec;
    const bough_step *step;
    int heads;           /* of a key head, in one set */
    int head_parts;      /* sets that share the heads of a key head */
    int kv_heads;        /* in one set */
    int64_t max_columns; /* of a set; a token more than none may be in it all the same */
    bool cut;
    int64_t set_row;    /* with which the set in hand begins */
    int64_t row, query; /* the next one */
} maker;

static int64_t queries_of(const maker *m, int64_t row) {
    return m->spec->ends_only ? 1 : m->step->query_starts[row + 1] - m->step->query_starts[row];
}

/* Whether a sequence has the beginning of the one before it. */
static bool any_shared(const bough_step *step) {
    for (int64_t row = 1; row < step->batch; row++) {
        const int32_t *pages = step->page_table + step->rows[row] * step->page_table_width;
        const int32_t *before = step->page_table + step->rows[row - 1] * step->page_table_width;
        if (pages[0] == before[0] && pages[0] != 0 && step->context_lens[row] >= BOUGH_RUN_KEYS)
            return true;
    }
    return false;
}

static maker start(const bough_attention_spec *spec, const bough_step *step, int threads) {
    int group = spec->heads / spec->kv_heads;
    maker m = {.spec = spec, .step = step, .heads = (int)at_most(group, BOUGH_TILE_COLUMNS)};
    m.head_parts = (int)ceil_div(group, m.heads);
    m.cut = threads > 1 && step->batch * spec->kv_heads * m.head_parts < (int64_t)FEW * threads;
    int64_t queries = 0;
    for (int64_t row = 0; row < step->batch; row++)
        queries += queries_of(&m, row);
    /* The keys of a slot's heads are neighbours in memory: better read together where no others read them too. */
    bool together = queries == step->batch && step->batch >= (int64_t)DEALS * threads && !m.cut && m.head_parts == 1;
    m.kv_heads = together && spec->kv_heads <= BOUGH_SET_TILES && !any_shared(step) ? spec->kv_heads : 1;
    m.max_columns = BOUGH_SET_TILES / m.kv_heads * BOUGH_TILE_COLUMNS;
    if (threads > 1)
        m.max_columns = at_most(m.max_columns, ceil_div(queries * spec->heads, (int64_t)DEALS * threads * m.kv_heads));
    if (m.max_columns > 2 * BOUGH_TILE_COLUMNS) /* products are of two tiles at a time */
        m.max_columns -= m.max_columns % (2 * BOUGH_TILE_COLUMNS);
    return m;
}

static int64_t first_seen(const bough_attention_spec *spec, int64_t position) {
    return spec->window == 0 ? 0 : at_least(position + 1 - spec->window, 0);
}

/* As many tokens of the next sequence as there is room for; false if there is none. */
static bool add_piece(maker *m, bough_set *set, int64_t *columns) {
    int64_t left = queries_of(m, m->row) - m->query;
    int64_t first = *columns, rest = BOUGH_TILE_COLUMNS - first % BOUGH_TILE_COLUMNS;
    if (at_most(left * m->heads, BOUGH_TILE_COLUMNS) > rest) /* few columns are better in one tile than in two */
        first += rest;
    int64_t taken = at_most(left, (m->max_columns - first) / m->heads);
    if (set->count == 0)
        taken = at_least(taken, 1);
    if (taken <= 0 || set->count == BOUGH_SET_PIECES)
        return false;
    int64_t end = m->step->query_starts[m->row + 1];
    int64_t after = end - m->step->query_starts[m->row] + m->step->context_lens[m->row];
    bough_piece piece = {.pages = m->step->page_table + m->step->rows[m->row] * m->step->page_table_width,
                         .token = end - left,
                         .position = after - left,
                         .tokens = (int)taken,
                         .first_column = (int)first};
    set->pieces[set->count++] = piece;
    *columns = first + taken * m->heads;
    int64_t last = piece.position + taken - 1;
    set->first_run = at_most(set->first_run, first_seen(m->spec, piece.position) / BOUGH_RUN_KEYS);
    set->end_run = at_least(set->end_run, last / BOUGH_RUN_KEYS + 1);
    m->query += taken;
    return true;
}

/* The next set, but for its heads; false if there is none. */
static bool next_set(maker *m, bough_set *set) {
    set->count = 0;
    set->first_run = INT64_MAX;
    set->end_run = 0;
    m->set_row = m->row;
    int64_t columns = 0;
    while (m->row < m->step->batch && add_piece(m, set, &columns)) {
        if (m->query < queries_of(m, m->row))
            break;
        m->row++;
        m->query = 0;
        if (m->cut)
            break;
    }
    set->tiles = (int)ceil_div(columns, BOUGH_TILE_COLUMNS);
    return set->count > 0;
}

/* Into how many parts the keys of a set are cut. */
static int64_t cuts_of(const maker *m, const bough_set *set) {
    int64_t runs = set->end_run - set->first_run;
    return m->cut && queries_of(m, m->set_row) == 1 && runs <= MAX_RUNS ? runs : 1;
}

static int64_t pieces_of_heads(const maker *m) { return (int64_t)m->spec->kv_heads / m->kv_heads * m->head_parts; }

static void choose_heads(const maker *m, int64_t index, bough_set *set) {
    int group = m->spec->heads / m->spec->kv_heads, part = (int)(index % m->head_parts);
    set->kv_head = (int)(index / m->head_parts) * m->kv_heads;
    set->kv_heads = m->kv_heads;
    set->first_head = set->kv_head * group + part * m->heads;
    set->heads = (int)at_most(m->heads, group - part * m->heads);
}

static int64_t results_bytes(const bough_attention_spec *spec, int threads) {
    return align((int64_t)FEW * threads * MAX_RUNS * bough_result_floats(spec->dim) * (int64_t)sizeof(float));
}

size_t bough_sets_scratch(const bough_set_kernels *kernels, const bough_attention_spec *spec, int threads) {
    return (size_t)(results_bytes(spec, threads) + threads * align((int64_t)kernels->scratch(spec->dim)));
}

/* Where the runs of a set that is cut leave their results. */
static float *results_of(const maker *m, int64_t heads_index, void *scratch) {
    int64_t number = m->set_row * pieces_of_heads(m) + heads_index;
    return (float *)scratch + number * MAX_RUNS * bough_result_floats(m->spec->dim);
}

/* What is dealt out: sets with their heads, or the runs of these. */
static void attend_all(const bough_set_kernels *kernels, maker m, bough_set *set, void *results, void *own,
                       bough_thread *thread) {
    bool more = next_set(&m, set);
    int64_t before = 0, heads = pieces_of_heads(&m);
    for (int64_t tile; (tile = bough_tile(thread, BOUGH_NO_TILE)) < BOUGH_NO_TILE && more;) {
        int64_t cuts;
        while (more && tile - before >= heads * (cuts = cuts_of(&m, set))) {
            before += heads * cuts;
            more = next_set(&m, set);
        }
        if (!more)
            break;
        int64_t index = tile - before;
        choose_heads(&m, index / cuts, set);
        if (cuts == 1) {
            kernels->attend(set, own);
            continue;
        }
        int64_t first = set->first_run, end = set->end_run, run = index % cuts;
        set->first_run = first + run;
        set->end_run = first + run + 1;
        float *result = results_of(&m, index / cuts, results) + run * bough_result_floats(m.spec->dim);
        kernels->attend_run(set, result, own);
        set->first_run = first;
        set->end_run = end;
    }
    bough_barrier(thread);
}

static void join_all(const bough_set_kernels *kernels, maker m, bough_set *set, void *results, void *own,
                     bough_thread *thread) {
    bool more = next_set(&m, set);
    int64_t before = 0, heads = pieces_of_heads(&m);
    for (int64_t tile; (tile = bough_tile(thread, BOUGH_NO_TILE)) < BOUGH_NO_TILE && more;) {
        for (; more && tile - before >= heads; more = next_set(&m, set))
            before += heads;
        if (!more)
            break;
        choose_heads(&m, tile - before, set);
        if (cuts_of(&m, set) > 1)
            kernels->join_runs(set, results_of(&m, tile - before, results), own);
    }
    bough_barrier(thread);
}

void bough_attend_sets(const bough_set_kernels *kernels, const bough_attention_spec *spec, const bough_step *step,
                       const float *q, int64_t q_stride, float *out, int64_t out_stride, void *scratch,
                       bough_thread *thread) {
    maker m = start(spec, step, thread->threads);
    bough_set set = {.spec = spec, .page_size = (int)step->page_size, .q = q, .q_stride = q_stride, .out = out,
                     .out_stride = out_stride};
    char *own = (char *)scratch + results_bytes(spec, thread->threads);
    own += thread->index * align((int64_t)kernels->scratch(spec->dim));
    attend_all(kernels, m, &set, scratch, own, thread);
    if (m.cut)
        join_all(kernels, m, &set, scratch, own, thread);
}
