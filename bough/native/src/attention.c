/* Work is dealt out in tiles: some queries of one sequence with the heads that share one key head. Where there are few
 * tiles, as with one sequence that decodes, the keys of a tile are cut into runs too; their results are then joined.
 * A tile that one sequence does not fill takes in queries of its neighbours with a common beginning, and reads that once
 * for all; a full tile computes longer than it reads.
 */
#include "attention.h"

#include "attention_sets.h"
#include "numbers.h"

enum {
    FEW = 4,       /* tiles for each thread, below which keys are cut */
    MAX_RUNS = 64, /* of one tile that is cut; with more keys than that a tile has work enough */
    BUNDLE = 8,    /* tiles of sequences with a common beginning, at most */
};

/* How the tiles of a step are laid out. */
typedef struct {
    int group;            /* query heads that share a key head */
    int heads_at_once;    /* of those, in one tile */
    int head_parts;       /* tiles that share a group's heads among them */
    int queries_at_once;  /* in one tile */
    int together;         /* of sequences with a common beginning, in one tile; 1: each is tiled alone */
    bool cut;             /* keys are cut into runs */
    int kv_heads_at_once; /* in one tile: all where there are many rows, because their keys are neighbours in memory */
} tiling;

static int64_t queries_of(const bough_attention_spec *spec, const bough_step *step, int64_t row) {
    return spec->ends_only ? 1 : step->query_starts[row + 1] - step->query_starts[row];
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

static tiling lay_out(const bough_attention_spec *spec, const bough_step *step, int threads) {
    tiling how = {.group = spec->heads / spec->kv_heads, .together = 1};
    how.heads_at_once = how.group < BOUGH_MAX_QUERIES ? how.group : BOUGH_MAX_QUERIES;
    how.head_parts = (int)ceil_div(how.group, how.heads_at_once);
    how.queries_at_once = BOUGH_MAX_QUERIES / how.heads_at_once;
    int64_t pieces = (int64_t)spec->kv_heads * how.head_parts, enough = (int64_t)FEW * threads;
    how.cut = threads > 1 && step->batch * pieces < enough;
    int64_t sharing = 0, queries = 0;
    for (int64_t row = 0; step->common != NULL && spec->window == 0 && !how.cut && row < step->batch; row++) {
        sharing += step->common[row] >= BOUGH_RUN_KEYS;
        queries += queries_of(spec, step, row);
    }
    bool shares = 2 * sharing >= step->batch && sharing > 0;
    how.kv_heads_at_once = !shares && step->batch >= enough ? spec->kv_heads : 1;
    if (shares) /* each thread should still get several tiles */
        how.together = (int)at_least(at_most(how.queries_at_once, queries * pieces / enough), 1);
    return how;
}

/* Sequences that are tiled together: neighbours with a common beginning, or one. */
typedef struct {
    int64_t row, rows, queries;
    int64_t at_once; /* queries in a tile */
    int64_t runs, tiles;
} bundle;

/* How many rows from this one on are better tiled together: fewer tiles read the common beginning. But where a tile ends
 * within a row, two read what that has of its own. */
static int64_t rows_of(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t first,
                       int64_t *queries) {
    int64_t rows = 0, shared = 0, all = 0, alone = 0, parts = 0, part_keys = 0;
    for (; first + rows < step->batch && all < (int64_t)BUNDLE * how->together; rows++) {
        int64_t row = first + rows, own = queries_of(spec, step, row);
        int64_t common = rows > 0 ? step->common[row] / BOUGH_RUN_KEYS * BOUGH_RUN_KEYS : 0;
        /* Less for all would cost more than this one saves. */
        if (rows > 0 && (common == 0 || (rows > 1 && common < shared / 2)))
            break;
        shared = rows > 1 ? at_most(shared, common) : common;
        int64_t blocks = ceil_div(own, how->queries_at_once);
        int64_t more = at_most(own, ceil_div(own, how->together) + 1) - blocks;
        all += own;
        alone += blocks;
        parts += more;
        part_keys += more * length_of(step, row);
    }
    if (rows == 1 || (alone - ceil_div(all, how->together)) * shared <= part_keys - parts * shared)
        return 1;
    *queries = all;
    return rows;
}

static bundle bundle_at(const bough_attention_spec *spec, const bough_step *step, const tiling *how, int64_t row) {
    bundle found = {.row = row, .rows = 1, .at_once = how->queries_at_once};
    if (row == step->batch)
        return found;
    found.queries = queries_of(spec, step, row);
    found.runs = runs_of(spec, step, how, row);
    if (how->together > 1 && (found.rows = rows_of(spec, step, how, row, &found.queries)) > 1)
        found.at_once = how->together;
    int64_t heads = spec->kv_heads / how->kv_heads_at_once * how->head_parts;
    found.tiles = heads * ceil_div(found.queries, found.at_once) * found.runs;
    return found;
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

/* The tile `index` of a bundle. */
static bough_attend describe(const bough_attention_spec *spec, const bough_step *step, const tiling *how,
                             const bundle *of, int64_t index, const float *q, int64_t q_stride, float *out,
                             int64_t out_stride) {
    int64_t run = index % of->runs, blocks = ceil_div(of->queries, of->at_once), block = index / of->runs % blocks;
    int64_t piece = index / of->runs / blocks, part = piece % how->head_parts, kv_head = piece / how->head_parts;
    int64_t head = kv_head * how->group + part * how->heads_at_once;
    int64_t left = how->group - part * how->heads_at_once;
    size_t size = spec->number == BOUGH_FLOAT32 ? 4 : 2;
    bough_attend task = {
        .q_stride = q_stride,
        .out_stride = out_stride,
        .group = (int)(left < how->heads_at_once ? left : how->heads_at_once),
        .dim = spec->dim,
        .keys = (const char *)spec->keys + (size_t)(kv_head * spec->dim) * size,
        .values = (const char *)spec->values + (size_t)(kv_head * spec->dim) * size,
        .number = spec->number,
        .slot_stride = (int64_t)spec->kv_heads * spec->dim,
        .page_size = (int)step->page_size,
        .window = spec->window,
        .scale = spec->scale,
        .softcap = spec->softcap,
        .sinks = spec->sinks == NULL ? NULL : spec->sinks + head,
    };
    int64_t before = block * of->at_once, room = of->at_once; /* queries of the bundle before the tile, and in it */
    for (int64_t row = of->row, queries; row < of->row + of->rows && room > 0; row++, before -= queries) {
        queries = queries_of(spec, step, row);
        int64_t first = at_least(before, 0), taken = at_most(queries - first, room), length = length_of(step, row);
        if (taken <= 0)
            continue;
        int64_t token = step->query_starts[row + 1] - queries + first, position = length - queries + first;
        if (task.count > 0) {
            int64_t common = step->common[row] / BOUGH_RUN_KEYS * BOUGH_RUN_KEYS;
            task.shared = task.count == 1 ? common : at_most(task.shared, common);
        } else {
            task.last_key = spec->both_ways ? length : position + taken;
            task.first_key = position + 1 - seen_by(spec, position + 1);
            task.first_key -= task.first_key % BOUGH_BLOCK_KEYS;
        }
        task.segments[task.count++] = (bough_segment){
            .q = q == NULL ? NULL : q + token * q_stride + head * spec->dim,
            .out = out + token * out_stride + head * spec->dim,
            .queries = (int)taken,
            .pages = step->page_table + step->rows[row] * step->page_table_width,
            .position = spec->both_ways ? length : position,
        };
        room -= taken;
    }
    if (of->runs > 1) {
        int64_t start = (task.first_key / BOUGH_RUN_KEYS + run) * BOUGH_RUN_KEYS;
        task.first_key = at_least(task.first_key, start);
        task.last_key = at_most(task.last_key, start + BOUGH_RUN_KEYS);
    }
    return task;
}

/* Where the runs of a tile leave their results; `piece` counts the key heads, and the parts of their groups. */
static float *results_of(void *scratch, int64_t row, int64_t pieces, int64_t piece, int64_t floats) {
    return (float *)scratch + (row * pieces + piece) * MAX_RUNS * floats;
}

static void join_runs(const bough_attention_spec *spec, const bough_step *step, const tiling *how, float *out,
                      int64_t out_stride, void *scratch, const bough_ops *ops, bough_thread *thread) {
    int64_t pieces = (int64_t)spec->kv_heads * how->head_parts, floats = run_floats(spec, how);
    for (int64_t tile; (tile = bough_tile(thread, step->batch * pieces)) < step->batch * pieces;) {
        int64_t row = tile / pieces, piece = tile % pieces;
        bundle one = bundle_at(spec, step, how, row);
        if (one.runs == 1)
            continue;
        bough_attend task = describe(spec, step, how, &one, piece * one.runs, NULL, 0, out, out_stride);
        ops->join(&task, one.runs, results_of(scratch, row, pieces, piece, floats), floats);
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
    bundle next = bundle_at(spec, step, &how, 0);
    int64_t before = 0; /* tiles of the bundles before it; a thread's tiles only ever grow */
    for (int64_t tile; (tile = bough_tile(thread, BOUGH_NO_TILE)) < BOUGH_NO_TILE;) {
        for (; next.row < step->batch && tile - before >= next.tiles;
             next = bundle_at(spec, step, &how, next.row + next.rows))
            before += next.tiles;
        if (next.row == step->batch)
            break;
        int64_t all = next.tiles * how.kv_heads_at_once;
        for (int64_t index = tile - before; index < all; index += next.tiles) {
            bough_attend task = describe(spec, step, &how, &next, index, q, q_stride, out, out_stride);
            if (next.runs > 1) {
                float *result = results_of(scratch, next.row, pieces, index / next.runs, floats);
                task.segments[0].out = result + index % next.runs * floats;
                task.weight = task.segments[0].out + task.group * bough_run_dim(spec->dim);
            }
            ops->attend(&task);
        }
    }
    bough_barrier(thread);
    bool joined = false;
    for (int64_t row = 0; how.cut && row < step->batch; row++)
        joined |= runs_of(spec, step, &how, row) > 1;
    if (joined)
        join_runs(spec, step, &how, out, out_stride, scratch, ops, thread);
}
