/* Attention with AMX: tiles of bfloat16, summed in float32.
 *
 * A number of a cache is the sum of two bfloat16, exactly, or one already. A query's or a weight's is so to 16 bits. Of
 * the four products, that of the two lesser parts is left out; what is left is as good as float32's to about 2^-16.
 *
 * Columns are the same in all matrices, the heads of queries: scores are keys · queries, outputs are values' · weights.
 * So keys lie in tiles as they do in their cache, maxima and sums are taken of whole vectors, and a pair of weights is
 * packed within its lane. Only values are transposed. Scores and their maxima are logarithms to the base 2.
 *
 * A tile register has 16 rows of 64 bytes. Of keys and values: 16 keys by 32 dimensions, 16 dimensions by 32 keys. Of
 * queries and weights: pairs of dimensions or keys by 16 columns. A matrix is kept as tiles, of each the greater part
 * and behind it the lesser.
 */
#include "attention_sets.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "attention_amx_few.h"
#include "attention_amx_products.h"
#include "attention_amx_weights.h"

/* One or two tiles, of which the columns from `first` to `end`, with the run whose keys and values are loaded. */
static void attend_tiles(workspace *w, int tile, int count, int64_t first_key, int groups, int first, int end) {
    extent runs[2];
    score(w, tile, count, groups);
    for (int i = 0; i < count; i++)
        runs[i] = score_to_weights(w, tile + i, first_key, groups, w->scores + i * KEYS * COLUMNS,
                                   w->weights + i * KEY_GROUPS * BOTH_PARTS);
    combine(w, count, groups);
    for (int i = 0; i < count; i++)
        fold(w, tile + i, columns_between(tile + i, first, end), w->sums + i * w->groups * WIDTH * COLUMNS, runs[i]);
}

static int64_t last_seen(const bough_piece *piece) { return piece->position + piece->tokens - 1; }

static bool sees(const bough_set *set, const bough_piece *piece, int64_t first_key) {
    int64_t window = set->spec->window;
    return last_seen(piece) >= first_key && (window == 0 || piece->position - window + 1 < first_key + KEYS);
}

/* Whether both see the whole run, in the same slots. */
static bool share(const bough_set *set, const bough_piece *a, const bough_piece *b, int64_t first_key) {
    int64_t last = first_key + KEYS - 1, page = first_key / set->page_size;
    if (last_seen(a) < last || last_seen(b) < last || !sees(set, b, first_key))
        return false;
    size_t bytes = (size_t)(last / set->page_size - page + 1) * sizeof *a->pages;
    return memcmp(a->pages + page, b->pages + page, bytes) == 0;
}

/* Goes on to the next pieces that see the same keys, in this run or the next; false if there are none. */
static bool advance(const bough_set *set, run *r) {
    const bough_piece *after = set->pieces + set->count, *piece = r->end;
    for (; r->number < set->end_run; r->number++, piece = set->pieces) {
        r->first_key = r->number * KEYS;
        while (piece < after && !sees(set, piece, r->first_key))
            piece++;
        if (piece == after)
            continue;
        r->first = piece;
        r->end = piece + 1;
        while (r->end < after && share(set, piece, r->end, r->first_key))
            r->end++;
        int64_t keys = last_seen(piece) + 1 - r->first_key;
        r->keys = keys < KEYS ? (int)keys : KEYS;
        r->groups = (r->keys + WIDTH - 1) / WIDTH;
        find_slots(set, set->kv_head, r);
        return true;
    }
    return false;
}

/* What is to be asked for after the last run: likely the next head's first. */
static void guess(const bough_set *set, run *r) {
    *r = (run){.number = set->first_run, .end = set->pieces};
    if (advance(set, r))
        find_slots(set, (set->kv_head + set->kv_heads) % set->spec->kv_heads, r);
}

/* The pieces of a run with the key head in hand. */
static void attend_pieces(workspace *w, const run *r, const run *next) {
    int before = w->head * w->set->tiles * COLUMNS, from = before + r->first->first_column;
    int to = before + r->end[-1].first_column + r->end[-1].tokens * w->set->heads;
    if (to - from <= FEW_COLUMNS && from / COLUMNS == (to - 1) / COLUMNS) {
        attend_few(w, r, next, from, to);
        return;
    }
    load_run(w, r, next);
    for (int tile = from / COLUMNS, count; tile * COLUMNS < to; tile += count) {
        count = (tile + 1) * COLUMNS < to ? 2 : 1;
        int32_t last = w->highest[tile];
        if (count == 2 && w->highest[tile + 1] > last)
            last = w->highest[tile + 1];
        int64_t seen = last + 1 - r->first_key < r->keys ? last + 1 - r->first_key : r->keys;
        if (seen > 0)
            attend_tiles(w, tile, count, r->first_key, (int)(seen + WIDTH - 1) / WIDTH, from, to);
    }
}

static void attend_runs(workspace *w) {
    run runs[2] = {{.number = w->set->first_run, .end = w->set->pieces}};
    bool more = advance(w->set, &runs[0]);
    for (int at = 0; more; at = !at) {
        runs[!at] = runs[at];
        more = advance(w->set, &runs[!at]);
        if (!more)
            guess(w->set, &runs[!at]);
        for (w->head = 0; w->head < w->set->kv_heads; w->head++) {
            attend_pieces(w, &runs[at], &runs[!at]);
            for (int i = 0; i < KEYS; i++) /* on to the next head's keys */
                runs[at].offsets[i] += w->dim;
        }
    }
}

/* Outputs to where they belong, divided by the sums of the weights. */
static void store_outputs(const workspace *w) {
    const bough_set *set = w->set;
    for (int tile = 0; tile < set->tiles * set->kv_heads; tile++) {
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(w->total + tile * COLUMNS));
        for (int d = 0; d < w->dim; d += 16) {
            const float *from = w->out + (tile * w->groups * WIDTH + d) * COLUMNS;
            __m512i block[16];
            for (int i = 0; i < 16; i++)
                block[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + i * COLUMNS), factor));
            transpose(block);
            for (int i = 0; i < 16; i++) {
                int column = tile * COLUMNS + i;
                if (w->token[column] < 0)
                    continue;
                float *to = set->out + w->token[column] * set->out_stride + w->of_head[column] * w->dim + d;
                _mm512_mask_storeu_ps(to, (__mmask16)there(w->dim - d), _mm512_castsi512_ps(block[i]));
            }
        }
    }
}

static void clear(workspace *w) {
    int64_t columns = w->set->tiles * w->set->kv_heads * COLUMNS;
    memset(w->out, 0, (size_t)(columns * w->groups * WIDTH) * sizeof(float));
    memset(w->total, 0, (size_t)columns * sizeof(float));
    for (int64_t i = 0; i < columns; i++)
        w->peak[i] = LEAST;
}

static workspace open_set(const bough_set *set, void *scratch) {
    workspace w = {.set = set, .number = set->spec->number};
    lay_out(&w, set->spec->dim, scratch);
    find_columns(&w);
    clear(&w);
    keep_nothing(&w);
    return w;
}

static void gather(workspace *w) {
    static const struct { /* all eight registers: 16 rows of 64 bytes */
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE}, {16, 16, 16, 16, 16, 16, 16, 16}};
    load_queries(w);
    _tile_loadconfig(&shapes);
    attend_runs(w);
    _tile_release();
}

static void attend(const bough_set *set, void *scratch) {
    workspace w = open_set(set, scratch);
    gather(&w);
    store_outputs(&w);
}

/* What is left behind of a set's only run is what it is joined from, because nothing was before it. */
static void attend_run(const bough_set *set, float *result, void *scratch) {
    workspace w = open_set(set, scratch);
    gather(&w);
    int64_t floats = (int64_t)w.groups * WIDTH * COLUMNS;
    memcpy(result, w.out, (size_t)floats * sizeof(float));
    memcpy(result + floats, w.peak, COLUMNS * sizeof(float));
    memcpy(result + floats + COLUMNS, w.total, COLUMNS * sizeof(float));
}

static void join_runs(const bough_set *set, const float *results, void *scratch) {
    workspace w = open_set(set, scratch);
    int64_t floats = (int64_t)w.groups * WIDTH * COLUMNS;
    for (int64_t i = set->first_run; i < set->end_run; i++, results += bough_result_floats(w.dim)) {
        extent of_run = {_mm512_load_ps(results + floats), _mm512_load_ps(results + floats + COLUMNS)};
        fold(&w, 0, 0xFFFF, results, of_run);
    }
    store_outputs(&w);
}

static bool reads(int number) { return number == BOUGH_FLOAT16 || number == BOUGH_BFLOAT16; }

const bough_set_kernels *bough_attention_amx(void) {
    static const bough_set_kernels kernels = {reads, scratch_bytes, attend, attend_run, join_runs};
    return &kernels;
}
#else
const bough_set_kernels *bough_attention_amx(void) { return NULL; }
#endif
