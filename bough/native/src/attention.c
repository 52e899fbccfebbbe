/* Work is dealt out in tiles: some queries of one sequence with the heads that share one key head. Where there are few
 * tiles, as with one sequence that decodes, the keys of a tile are cut into runs too; their results are then joined.
 * Neighbouring sequences that decode behind a common beginning are one tile, which reads that once.
 */
#include "attention.h"

#include "attention_sets.h"
#include "numbers.h"

enum {
    FEW = 4,       /* tiles for each thread, below which keys are cut */
    MAX_RUNS = 64, /* of one tile that is cut; with more keys than that a tile has work enough */
};

/* How the tiles of a step are laid out. */
typedef struct {
    int group;            /* query heads that share a key head */
    int heads_at_once;    /* of those, in one tile */
    int head_parts;       /* tiles that share a group's heads among them */
    int queries_at_once;  /* in one tile */
    int rows_at_once;     /* sequences with a common beginning in one tile, at most */
    bool cut;             /* keys are cut into runs */
    int kv_heads_at_once; /* in one tile: all where there are many rows, because their keys are neighbours in memory */
} tiling;

static int64_t queries_of(const bough_attention_spec *spec, const bough_step *step, int64_t row) {
    return spec->ends_only ? 1 : step->query_starts[row + 1] - step->query_starts[row];
}

static int64_t blocks_of(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row) {
    return ceil_div(queries_of(spec, step, row), how->queries_at_once);
}

static int64_t length_of(const bough_step *step, int64_t row) {
    return step->context_lens[row] + step->query_starts[row + 1] - step->query_starts[row];
}

static int64_t seen_by(const bough_attention_spec *spec, int64_t length) {
    return spec->window != 0 && spec->window < length ? spec->window : length;
}

static int64_t runs_of(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row) {
    if (!how->cut || queries_of(spec, step, row) > 1)
        return 1;
    int64_t length = length_of(step, row), first_key = length - seen_by(spec, length);
    int64_t runs = (length - 1) / BOUGH_RUN_KEYS - first_key / BOUGH_RUN_KEYS + 1;
    return runs > MAX_RUNS ? 1 : runs;
}

static int64_t tiles_of(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row) {
    int64_t heads = spec->kv_heads / how->kv_heads_at_once * how->head_parts;
    return heads * blocks_of(spec, step, how, row) * runs_of(spec, step, how, row);
}

static tiling lay_out(const bough_attention_spec *spec, const bough_step *step, int threads) {
    tiling how = {.group = spec->heads / spec->kv_heads};
    how.heads_at_once = how.group < BOUGH_MAX_QUERIES ? how.group : BOUGH_MAX_QUERIES;
    how.head_parts = (int)ceil_div(how.group, how.heads_at_once);
    how.queries_at_once = BOUGH_MAX_QUERIES / how.heads_at_once;
    how.cut = threads > 1 && step->batch * spec->kv_heads * how.head_parts < (int64_t)FEW * threads;
    int64_t sharing = 0;
    for (int64_t row = 0; step->common != NULL && spec->window == 0 && !how.cut && row < step->batch; row++)
        sharing += step->common[row] >= BOUGH_RUN_KEYS;
    bool shares = 2 * sharing >= step->batch && sharing > 0;
    how.kv_heads_at_once = !shares && step->batch >= (int64_t)FEW * threads ? spec->kv_heads : 1;
    int64_t tiles = step->batch * spec->kv_heads * how.head_parts; /* of which each thread should still get several */
    how.rows_at_once = shares ? (int)at_least(at_most(how.queries_at_once, tiles / ((int64_t)FEW * threads)), 1) : 1;
    return how;
}

/* How many rows from this one on are one tile, and the keys that they share. */
static int64_t rows_of(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row,
                       int64_t *shared) {
    int64_t rows = 1;
    *shared = 0;
    for (; rows < how->rows_at_once && row + rows < step->batch; rows++) {
        int64_t common = step->common[row + rows] / BOUGH_RUN_KEYS * BOUGH_RUN_KEYS;
        if (common == 0 || queries_of(spec, step, row) > 1 || queries_of(spec, step, row + rows) > 1)
            break;
        if (rows > 1 && common < *shared / 2) /* less for all would cost more than this one saves */
            break;
        *shared = rows == 1 ? common : at_most(*shared, common);
    }
    return rows;
}

/* Numbers that one run of a cut tile leaves behind: its outputs, then maxima and sums. */
static int64_t run_floats(const bough_attention_spec *spec, const tiling *how) {
    return how->heads_at_once * (bough_run_dim(spec->dim) + 2);
}

size_t bough_attention_scratch(const bough_attention_spec *spec, int threads) {
    const bough_set_kernels *kernels = bough_set_kernels_for(spec);
    if (kernels != NULL)
        return bough_sets_scratch(kernels, spec, threads);
    tiling how = lay_out(spec, &(bough_step){.batch = 0}, threads);
    return (size_t)((int64_t)FEW * threads * MAX_RUNS * run_floats(spec, &how)) * sizeof(float);
}

/* The tile `index` of a row. */
static bough_attend describe(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row,
                             int64_t index, const float *q, int64_t q_stride, float *out, int64_t out_stride) {
    int64_t runs = runs_of(spec, step, how, row), blocks = blocks_of(spec, step, how, row);
    int64_t run = index % runs, block = index / runs % blocks;
    int64_t part = index / runs / blocks % how->head_parts, kv_head = index / runs / blocks / how->head_parts;
    int64_t head = kv_head * how->group + part * how->heads_at_once;
    int64_t left = how->group - part * how->heads_at_once;
    int64_t end = step->query_starts[row + 1], length = length_of(step, row);
    int64_t queries = queries_of(spec, step, row), first = block * how->queries_at_once;
    int64_t taken = queries - first < how->queries_at_once ? queries - first : how->queries_at_once;
    int64_t token = end - queries + first, position = length - queries + first;
    int64_t last_key = spec->both_ways ? length : position + taken;
    int64_t first_key = position + 1 - seen_by(spec, position + 1);
    first_key -= first_key % BOUGH_BLOCK_KEYS;
    if (runs > 1) {
        int64_t start = (first_key / BOUGH_RUN_KEYS + run) * BOUGH_RUN_KEYS, after = start + BOUGH_RUN_KEYS;
        first_key = first_key > start ? first_key : start;
        last_key = last_key < after ? last_key : after;
    }
    size_t size = spec->number == BOUGH_FLOAT32 ? 4 : 2;
    return (bough_attend){
        .q = q == NULL ? NULL : q + token * q_stride + head * spec->dim,
        .q_stride = q_stride,
        .queries = (int)taken,
        .group = (int)(left < how->heads_at_once ? left : how->heads_at_once),
        .dim = spec->dim,
        .keys = (const char *)spec->keys + (size_t)(kv_head * spec->dim) * size,
        .values = (const char *)spec->values + (size_t)(kv_head * spec->dim) * size,
        .number = spec->number,
        .slot_stride = (int64_t)spec->kv_heads * spec->dim,
        .pages = step->page_table + step->rows[row] * step->page_table_width,
        .page_size = (int)step->page_size,
        .first_key = first_key,
        .last_key = last_key,
        .position = spec->both_ways ? length : position,
        .window = spec->window,
        .scale = spec->scale,
        .softcap = spec->softcap,
        .sinks = spec->sinks == NULL ? NULL : spec->sinks + head,
        .out = out + token * out_stride + head * spec->dim,
        .out_stride = out_stride,
    };
}

/* Where the runs of a tile leave their results; `piece` counts the key heads, and the parts of their groups. */
static float *results_of(void *scratch, int64_t row, int64_t pieces, int64_t piece, int64_t floats) {
    return (float *)scratch + (row * pieces + piece) * MAX_RUNS * floats;
}

static void join_runs(const bough_attention_spec *spec, const bough_step *step, const tiling *how, float *out,
                      int64_t out_stride, void *scratch, const bough_ops *ops, bough_thread *thread) {
    int64_t pieces = (int64_t)spec->kv_heads * how->head_parts, floats = run_floats(spec, how);
    for (int64_t tile; (tile = bough_tile(thread, step->batch * pieces)) < step->batch * pieces;) {
        int64_t row = tile / pieces, piece = tile % pieces, runs = runs_of(spec, step, how, row);
        if (runs == 1)
            continue;
        bough_attend task = describe(spec, step, how, row, piece * runs, NULL, 0, out, out_stride);
        ops->join(&task, runs, results_of(scratch, row, pieces, piece, floats), floats);
    }
    bough_barrier(thread);
}

void bough_attention(const bough_attention_spec *spec, const bough_step *step, const float *q, int64_t q_stride,
                     float *out, int64_t out_stride, void *scratch, const bough_ops *ops, bough_thread *thread) {
    const bough_set_kernels *kernels = bough_set_kernels_for(spec);
    if (kernels != NULL) {
        bough_attend_sets(kernels, spec, step, q, q_stride, out, out_stride, scratch, thread);
        return;
    }
    tiling how = lay_out(spec, step, thread->threads);
    int64_t pieces = (int64_t)spec->kv_heads * how.head_parts, floats = run_floats(spec, &how);
    int64_t row = 0, shared, before = 0; /* tiles of the rows before it; a thread's tiles only ever grow */
    for (int64_t tile; (tile = bough_tile(thread, BOUGH_NO_TILE)) < BOUGH_NO_TILE;) {
        for (; row < step->batch && tile - before >= tiles_of(spec, step, &how, row);
             row += rows_of(spec, step, &how, row, &shared))
            before += tiles_of(spec, step, &how, row);
        if (row == step->batch)
            break;
        int64_t runs = runs_of(spec, step, &how, row), rows = rows_of(spec, step, &how, row, &shared);
        for (int64_t index = tile - before; index < tiles_of(spec, step, &how, row) * how.kv_heads_at_once;
             index += tiles_of(spec, step, &how, row)) {
            bough_attend task = describe(spec, step, &how, row, index, q, q_stride, out, out_stride);
            if (runs > 1) {
                task.out = results_of(scratch, row, pieces, index / runs, floats) + index % runs * floats;
                task.weight = task.out + task.group * bough_run_dim(spec->dim);
            }
            if (rows > 1) {
                task.queries = (int)rows;
                task.last_key = task.shared = shared;
                task.position = shared - 1;
                task.rows = step->rows + row;
                task.context_lens = step->context_lens + row;
                task.table = step->page_table;
                task.table_width = step->page_table_width;
            }
            ops->attend(&task);
        }
    }
    bough_barrier(thread);
    bool joined = false;
    for (row = 0; how.cut && row < step->batch; row++)
        joined |= runs_of(spec, step, &how, row) > 1;
    if (joined)
        join_runs(spec, step, &how, out, out_stride, scratch, ops, thread);
}
