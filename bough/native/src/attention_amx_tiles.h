/* What `attention_amx.c` keeps while it goes through a set, and how queries, keys and values get into tiles. */
#ifndef BOUGH_ATTENTION_AMX_TILES_H
#define BOUGH_ATTENTION_AMX_TILES_H

#include "attention_amx_numbers.h"
#include "attention_sets.h"

#include <string.h>

enum {
    KEYS = BOUGH_RUN_KEYS,
    KEY_TILES = KEYS / 16,
    KEY_GROUPS = KEYS / WIDTH,
    COLUMNS = BOUGH_TILE_COLUMNS,
};
#define LOG2_E 1.44269504f
#define LEAST (-1e30f) /* of a key that a query does not see; finite, so that differences are numbers */

typedef struct {
    const bough_set *set;
    int head; /* of the set's key heads, the one in hand; each has its own tiles */
    int dim, number;
    int groups;                /* of WIDTH dimensions */
    uint8_t *queries;          /* [tiles][groups] */
    float *out;                /* [tiles][dimensions][COLUMNS], of all runs so far, as peak and total */
    float *peak, *total;       /* [tiles][COLUMNS] */
    int32_t *token, *of_head;  /* [tiles][COLUMNS] what a column is; token -1: none */
    int32_t *last_key;         /* [tiles][COLUMNS] that it sees; -1: it is none */
    int32_t *lowest, *highest; /* [tiles] of those */
    uint8_t *keys;             /* of a run: [KEY_TILES][groups] */
    uint8_t *values;           /* transposed: [2 * groups][KEY_GROUPS]; of few columns not: [KEY_GROUPS][2 * groups] */
    float *scores;             /* of two tiles of columns: [2][KEYS][COLUMNS] */
    uint8_t *weights;          /* [2][KEY_GROUPS] */
    float *sums;               /* [2][dimensions][COLUMNS], of one run */
    int scored;                /* with few columns: the tile whose scores there are, or -1, … */
    int64_t scored_keys[KEYS]; /* … the keys of these, by their places, and the values that are ready, or -1 */
    int64_t ready_values[KEYS];
} workspace;

static void *take(char **at, size_t bytes) {
    void *taken = *at;
    *at += (bytes + LINE - 1) / LINE * LINE;
    return taken;
}

/* Lays the workspace out in `scratch`; how many bytes it takes. */
static size_t lay_out(workspace *w, int dim, void *scratch) {
    size_t padded = (size_t)bough_padded_dim(dim), tiles = BOUGH_SET_TILES, line = COLUMNS * sizeof(float);
    char *at = scratch;
    w->dim = dim;
    w->groups = (int)padded / WIDTH;
    w->queries = take(&at, tiles * padded / WIDTH * BOTH_PARTS);
    w->out = take(&at, tiles * padded * line);
    w->peak = take(&at, tiles * line);
    w->total = take(&at, tiles * line);
    w->token = take(&at, tiles * line);
    w->of_head = take(&at, tiles * line);
    w->last_key = take(&at, tiles * line);
    w->lowest = take(&at, tiles * sizeof(int32_t));
    w->highest = take(&at, tiles * sizeof(int32_t));
    w->keys = take(&at, KEY_TILES * padded / WIDTH * BOTH_PARTS);
    w->values = take(&at, padded / 16 * KEY_GROUPS * BOTH_PARTS);
    w->scores = take(&at, 2 * KEYS * line);
    w->weights = take(&at, 2 * KEY_GROUPS * BOTH_PARTS);
    w->sums = take(&at, 2 * padded * line);
    return (size_t)(at - (char *)scratch);
}

static size_t scratch_bytes(int dim) {
    workspace w;
    return lay_out(&w, dim, NULL);
}

/* Which columns there are, and how far they see. */
static void find_columns(workspace *w) {
    const bough_set *set = w->set;
    int tiles = set->tiles * set->kv_heads, group = set->spec->heads / set->spec->kv_heads;
    memset(w->last_key, 0xFF, (size_t)(tiles * COLUMNS) * sizeof(int32_t));
    memset(w->token, 0xFF, (size_t)(tiles * COLUMNS) * sizeof(int32_t));
    for (const bough_piece *piece = set->pieces; piece < set->pieces + set->count; piece++)
        for (int i = 0; i < piece->tokens * set->heads * set->kv_heads; i++) {
            int token = i / set->heads % piece->tokens, kv_head = i / set->heads / piece->tokens, head = i % set->heads;
            int column = kv_head * set->tiles * COLUMNS + piece->first_column + token * set->heads + head;
            w->token[column] = (int32_t)piece->token + token;
            w->of_head[column] = set->first_head + kv_head * group + head;
            w->last_key[column] = (int32_t)piece->position + token;
        }
    for (int tile = 0; tile < tiles; tile++) {
        __m512i last = _mm512_load_si512(w->last_key + tile * COLUMNS);
        w->lowest[tile] = _mm512_mask_reduce_min_epi32(_mm512_cmpge_epi32_mask(last, _mm512_setzero_si512()), last);
        w->highest[tile] = _mm512_reduce_max_epi32(last);
    }
}

/* Columns that are no queries have zeros. */
static void load_queries(workspace *w) {
    uint8_t *to = w->queries;
    for (int tile = 0; tile < w->set->tiles * w->set->kv_heads; tile++)
        for (int group = 0; group < w->groups; group++, to += BOTH_PARTS) {
            __m512i great[16], less[16];
            for (int i = 0; i < 16; i++) {
                int column = tile * COLUMNS + i;
                __mmask32 taken = w->token[column] < 0 ? 0 : there(w->dim - group * WIDTH);
                const float *q = w->set->q;
                if (taken)
                    q += w->token[column] * w->set->q_stride + w->of_head[column] * w->dim + group * WIDTH;
                parts line = split_pair(_mm512_maskz_loadu_ps((__mmask16)taken, q),
                                        _mm512_maskz_loadu_ps((__mmask16)(taken >> 16), q + 16));
                great[i] = line.great;
                less[i] = line.less;
            }
            transpose(great);
            transpose(less);
            for (int i = 0; i < 16; i++)
                store_parts(to + i * LINE, (parts){great[i], less[i]});
        }
}

/* A run of keys as some pieces see it. */
typedef struct {
    int64_t number, first_key;
    int keys, groups;               /* that any of them sees, and how many times WIDTH that is */
    const bough_piece *first, *end; /* the pieces */
    int64_t offsets[KEYS];          /* of the keys in their cache, in numbers; behind the last key it again, hidden */
} run;

static void find_slots(const bough_set *set, int kv_head, run *r) {
    int64_t size = set->page_size, stride = (int64_t)set->spec->kv_heads * set->spec->dim;
    int64_t page = r->first_key / size, within = r->first_key % size, head = (int64_t)kv_head * set->spec->dim;
    const int32_t *pages = r->first->pages;
    for (int j = 0; size == 1 && j < r->keys; j++)
        r->offsets[j] = pages[page + j] * stride + head;
    for (int j = 0; size > 1 && j < r->keys; j++) {
        r->offsets[j] = (pages[page] * size + within) * stride + head;
        if (++within == size) {
            page++;
            within = 0;
        }
    }
    for (int j = r->keys; j < KEYS; j++)
        r->offsets[j] = r->offsets[r->keys - 1];
}

/* Asks for what will be loaded in the next run. */
ALWAYS_INLINE void fetch(const uint16_t *cache, const int64_t *offsets, int count, int numbers) {
    for (int i = 0; i < count; i++)
        for (int at = 0; at < numbers; at += WIDTH)
            __builtin_prefetch(cache + offsets[i] + at, 0, 2);
}

/* 16 keys by 32 dimensions; a line has the first 16 and the last 16 by turns, as those of queries have. */
ALWAYS_INLINE void convert_keys(int number, __mmask32 taken, const uint16_t *from, const int64_t *offsets,
                                uint8_t *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++, to += LINE) {
        const uint16_t *key = from + offsets[i];
        parts both = split_pair(load_numbers(number, (__mmask16)taken, key),
                                load_numbers(number, (__mmask16)(taken >> 16), key + 16));
        _mm512_store_si512((void *)to, both.great);
        if (number == BOUGH_FLOAT16)
            _mm512_store_si512((void *)(to + REGISTER), both.less);
    }
}

/* 16 pairs of values by 16 dimensions. */
ALWAYS_INLINE void convert_values(int number, __mmask16 taken, const uint16_t *from, const int64_t *offsets,
                                  uint8_t *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++, to += LINE) {
        parts both = split_pair(load_numbers(number, taken, from + offsets[2 * i]),
                                load_numbers(number, taken, from + offsets[2 * i + 1]));
        _mm512_store_si512((void *)to, both.great);
        if (number == BOUGH_FLOAT16)
            _mm512_store_si512((void *)(to + REGISTER), both.less);
    }
}

/* Tile `tile` of a run's keys, group `group` of their dimensions. */
static void load_keys(const workspace *w, const run *r, const run *next, int tile, int group, uint8_t *to) {
    const uint16_t *cache = w->set->spec->keys;
    const int64_t *offsets = r->offsets + tile * 16;
    __mmask32 taken = there(w->dim - group * WIDTH);
    if (group == 0 && w->head == 0)
        fetch(cache, next->offsets + tile * 16, 16, w->dim * w->set->kv_heads);
    if (w->number == BOUGH_BFLOAT16)
        convert_keys(BOUGH_BFLOAT16, taken, cache + group * WIDTH, offsets, to);
    else if (taken != ~0u)
        convert_keys(BOUGH_FLOAT16, taken, cache + group * WIDTH, offsets, to);
    else
        convert_keys(BOUGH_FLOAT16, ~0u, cache + group * WIDTH, offsets, to);
}

/* Group `group` of a run's values, tile `tile` of their dimensions. */
static void load_values(const workspace *w, const run *r, const run *next, int group, int tile, uint8_t *to) {
    const uint16_t *cache = w->set->spec->values;
    const int64_t *offsets = r->offsets + group * WIDTH;
    __mmask16 taken = (__mmask16)there(w->dim - tile * 16);
    if (tile == 0 && w->head == 0)
        fetch(cache, next->offsets + group * WIDTH, WIDTH, w->dim * w->set->kv_heads);
    if (w->number == BOUGH_BFLOAT16)
        convert_values(BOUGH_BFLOAT16, taken, cache + tile * 16, offsets, to);
    else if (taken != 0xFFFF)
        convert_values(BOUGH_FLOAT16, taken, cache + tile * 16, offsets, to);
    else
        convert_values(BOUGH_FLOAT16, 0xFFFF, cache + tile * 16, offsets, to);
}

/* Whether some keys or values are those that are kept; else notes that they will be. */
static bool is_kept(int64_t *kept, const int64_t *wanted, int count) {
    if (memcmp(kept, wanted, (size_t)count * sizeof *kept) == 0)
        return true;
    memcpy(kept, wanted, (size_t)count * sizeof *kept);
    return false;
}

static void keep_nothing(workspace *w) {
    w->scored = -1;
    memset(w->ready_values, 0xFF, sizeof w->ready_values);
}

/* Makes the keys and the values, transposed, of a run ready. */
static void load_run(workspace *w, const run *r, const run *next) {
    keep_nothing(w);
    for (int tile = 0; tile < 2 * r->groups; tile++)
        for (int group = 0; group < w->groups; group++)
            load_keys(w, r, next, tile, group, w->keys + (tile * w->groups + group) * BOTH_PARTS);
    for (int group = 0; group < r->groups; group++)
        for (int tile = 0; tile < 2 * w->groups; tile++) {
            uint8_t *to = w->values + (tile * KEY_GROUPS + group) * BOTH_PARTS;
            load_values(w, r, next, group, tile, to);
            transpose_tile(to);
            if (w->number == BOUGH_FLOAT16)
                transpose_tile(to + REGISTER);
        }
}

#endif
