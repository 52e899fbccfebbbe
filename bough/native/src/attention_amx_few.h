/* A run of keys with few columns of one tile, as one sequence that decodes has them: of `attention_amx.c`.
 *
 * A tile of keys or values is multiplied after the next is made ready, when what was stored can be loaded without
 * waiting. Vectors are of keys, as soon as scores are there, and values need not be transposed: outputs are. All sums
 * are the same to the last bit as with many columns.
 *
 * Sequences with a common beginning that ends within a run come one after the other. What is the same stays: scores,
 * which are of all columns of a tile, and values.
 */
#ifndef BOUGH_ATTENTION_AMX_FEW_H
#define BOUGH_ATTENTION_AMX_FEW_H

#include "attention_amx_weights.h"

/* A block is four columns; `FEW_BLOCKS` of them are not too many. */
enum { BLOCK = 4, FEW_BLOCKS = 2, FEW_COLUMNS = BLOCK * FEW_BLOCKS };

/* Keys are made ready by turns in four places: few, which stay in the nearest cache; and none is loaded from where
 * others are stored by the last 12 bits of the address, which are all that CPUs look at in a hurry. */
ALWAYS_INLINE uint8_t *place_of(uint8_t *tiles, int step) { return tiles + step % 4 * BOTH_PARTS; }

/* Adds a tile of keys, times queries, to register `sum`. */
#define ADD_SCORES(sum)                                                                                                \
    do {                                                                                                               \
        if (group == 0)                                                                                                \
            _tile_zero(sum);                                                                                           \
        _tile_dpbf16ps(sum, 4, 6);                                                                                     \
        _tile_dpbf16ps(sum, 4, 7);                                                                                     \
        if (w->number == BOUGH_FLOAT16)                                                                                \
            _tile_dpbf16ps(sum, 5, 7);                                                                                 \
        if (group == w->groups - 1)                                                                                    \
            _tile_stored(sum, w->scores + tile * 16 * COLUMNS, LINE);                                                  \
    } while (0)

ALWAYS_INLINE void add_scores(const workspace *w, const uint8_t *queries, int step) {
    const uint8_t *keys = place_of(w->keys, step);
    int tile = step / w->groups, group = step % w->groups;
    __asm__ __volatile__("" ::: "memory"); /* compilers do not know what tiles are loaded from */
    _tile_loadd(4, keys, LINE);
    _tile_loadd(5, keys + REGISTER, LINE);
    _tile_loadd(6, queries + group * BOTH_PARTS + REGISTER, LINE);
    _tile_loadd(7, queries + group * BOTH_PARTS, LINE);
    if (tile % 2 == 0)
        ADD_SCORES(0);
    else
        ADD_SCORES(1);
}

/* A step is a tile of keys by a group of dimensions. */
static void score_few(workspace *w, int tile, const run *r, const run *next) {
    const uint8_t *queries = w->queries + tile * w->groups * BOTH_PARTS;
    int behind = -1;
    if (w->scored != tile)
        memset(w->scored_keys, 0xFF, sizeof w->scored_keys);
    w->scored = tile;
    for (int keys = 0; keys < 2 * r->groups; keys++) {
        if (is_kept(w->scored_keys + keys * 16, r->offsets + keys * 16, 16))
            continue;
        for (int group = 0, step = keys * w->groups; group < w->groups; group++, step++) {
            load_keys(w, r, next, keys, group, place_of(w->keys, step));
            if (behind >= 0)
                add_scores(w, queries, behind);
            behind = step;
        }
    }
    if (behind >= 0)
        add_scores(w, queries, behind);
}

/* Adds weights, times a tile of values, to register `sum`. */
#define ADD_VALUES(sum)                                                                                                \
    do {                                                                                                               \
        _tile_dpbf16ps(sum, 6, 4);                                                                                     \
        _tile_dpbf16ps(sum, 7, 4);                                                                                     \
        if (w->number == BOUGH_FLOAT16)                                                                                \
            _tile_dpbf16ps(sum, 7, 5);                                                                                 \
    } while (0)

/* Where a group of values has a tile of dimensions: by turns too, if no other sequence can need it. */
ALWAYS_INLINE uint8_t *values_at(const workspace *w, int group, int tile) {
    int step = group * 2 * w->groups + tile;
    return w->set->count == 1 ? place_of(w->values, step) : w->values + step * BOTH_PARTS;
}

ALWAYS_INLINE void add_values(const workspace *w, int group, int first, int tile) {
    const uint8_t *values = values_at(w, group, first + tile), *weights = w->weights + group * BOTH_PARTS;
    __asm__ __volatile__("" ::: "memory");
    _tile_loadd(4, values, LINE);
    _tile_loadd(5, values + REGISTER, LINE);
    if (tile == 0) {
        _tile_loadd(6, weights + REGISTER, LINE);
        _tile_loadd(7, weights, LINE);
    }
    switch (tile) {
    case 0: ADD_VALUES(0); break;
    case 1: ADD_VALUES(1); break;
    case 2: ADD_VALUES(2); break;
    default: ADD_VALUES(3); break;
    }
}

/* Weighted sums of up to four tiles of dimensions; a column's are a row. */
static void combine_tiles(const workspace *w, const run *r, const run *next, const bool *kept, int first, int tiles) {
    uint8_t *to = (uint8_t *)w->sums + first * REGISTER;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step <= r->groups * tiles; step++) {
        int group = step / tiles, tile = first + step % tiles;
        if (group < r->groups && !kept[group])
            load_values(w, r, next, group, tile, values_at(w, group, tile));
        if (step > 0)
            add_values(w, (step - 1) / tiles, first, (step - 1) % tiles);
    }
    _tile_stored(0, to, LINE);
    _tile_stored(1, to + REGISTER, LINE);
    if (tiles == 2)
        return;
    _tile_stored(2, to + 2 * REGISTER, LINE);
    _tile_stored(3, to + 3 * REGISTER, LINE);
}

static void combine_few(workspace *w, const run *r, const run *next) {
    bool kept[KEY_GROUPS];
    for (int group = 0; group < r->groups; group++)
        kept[group] = w->set->count > 1 &&
                      is_kept(w->ready_values + group * WIDTH, r->offsets + group * WIDTH, WIDTH);
    for (int first = 0; first < 2 * w->groups; first += 4)
        combine_tiles(w, r, next, kept, first, 2 * w->groups - first < 4 ? 2 : 4);
}

/* Scores of 16 keys for each of four columns. */
ALWAYS_INLINE void take_columns(const float *scores, __m512 columns[BLOCK]) {
    for (int i = 0; i < 4; i++) {
        __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(scores + i * COLUMNS));
        v = _mm512_insertf32x4(v, _mm_loadu_ps(scores + (4 + i) * COLUMNS), 1);
        v = _mm512_insertf32x4(v, _mm_loadu_ps(scores + (8 + i) * COLUMNS), 2);
        columns[i] = _mm512_insertf32x4(v, _mm_loadu_ps(scores + (12 + i) * COLUMNS), 3);
    }
    transpose_quarters(columns);
}

/* The sum in every lane, taken as `weigh` takes it. */
ALWAYS_INLINE __m512 sum_16(__m512 v) {
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));
    v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xB1));
    return _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4E));
}

/* What is cut off as `pair` does it, so that the rest is the same to the last bit. */
ALWAYS_INLINE parts split_weights(__m512 low, __m512 high) {
    __m512 less_low = _mm512_sub_ps(low, greater_part(low)), less_high = _mm512_sub_ps(high, greater_part(high));
    return (parts){(__m512i)_mm512_cvtne2ps_pbh(greater_part(high), greater_part(low)),
                   (__m512i)_mm512_cvtne2ps_pbh(greater_part(less_high), greater_part(less_low))};
}

/* One column: its scores to weights, a line for each group of keys. */
static void weigh_column(float *scores, int groups, float unit, uint8_t *weights, float *peak, float *total) {
    __m512 most = _mm512_load_ps(scores);
    for (int at = 16; at < groups * WIDTH; at += 16)
        most = _mm512_max_ps(most, _mm512_load_ps(scores + at));
    float highest = _mm512_reduce_max_ps(most);
    bool blind = highest <= LEAST; /* who sees nothing has weights of 0 */
    *peak = blind ? LEAST : highest * unit;
    __m512 top = _mm512_set1_ps(blind ? 0.0f : *peak), units = _mm512_set1_ps(unit);
    __m512 sum = _mm512_setzero_ps();
    for (int group = 0; group < groups; group++, weights += BOTH_PARTS) {
        const float *at = scores + group * WIDTH;
        __m512 low = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at), units, top));
        __m512 high = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at + 16), units, top));
        store_parts(weights, split_weights(low, high));
        sum = _mm512_add_ps(_mm512_add_ps(sum, sum_16(low)), sum_16(high));
    }
    *total = _mm512_cvtss_f32(sum);
}

/* Puts the scores of a tile's columns from `column` on one behind the other, [KEYS] each; hidden ones are hidden. */
static void turn_scores(const workspace *w, int column, int blocks, int64_t first, int groups, float *to) {
    const bough_attention_spec *spec = w->set->spec;
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    int keys = groups * WIDTH;
    for (int block = 0; block < blocks; block++)
        for (int j = 0; j < keys; j += 16) {
            __m512 columns[BLOCK];
            take_columns(w->scores + j * COLUMNS + column % COLUMNS + block * BLOCK, columns);
            for (int i = 0; i < BLOCK; i++)
                _mm512_store_ps(to + (block * BLOCK + i) * KEYS + j, columns[i]);
        }
    for (int i = 0; i < blocks * BLOCK; i++) {
        float *scores = to + i * KEYS;
        if (spec->softcap != 0.0f)
            cap(spec, keys / COLUMNS, scores);
        int64_t end = w->last_key[column + i] + 1 - first, begin = spec->window == 0 ? 0 : end - spec->window;
        for (int j = 0; j < keys; j += 16) {
            if (begin <= j && end >= j + 16)
                continue;
            __m512i key = _mm512_add_epi32(steps, _mm512_set1_epi32(j));
            __mmask16 seen = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32((int32_t)(end < keys ? end : keys)));
            seen &= _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32((int32_t)(begin > 0 ? begin : 0)));
            __m512 shown = _mm512_mask_mov_ps(_mm512_set1_ps(LEAST), seen, _mm512_load_ps(scores + j));
            _mm512_store_ps(scores + j, shown);
        }
    }
}

/* As `fold`; of the sums, the columns from `column` on are rows. */
static void fold_few(const workspace *w, int column, int blocks, __mmask16 columns, const float *sums, extent added) {
    int tile = column / COLUMNS, base = column % COLUMNS;
    _Alignas(LINE) float old[COLUMNS], fresh[COLUMNS];
    factors by = meet(w, tile, columns, added);
    _mm512_store_ps(old, by.old);
    _mm512_store_ps(fresh, by.fresh);
    for (int block = 0; block < blocks; block++, base += BLOCK) {
        __m128 by_old = _mm_loadu_ps(old + base), by_fresh = _mm_loadu_ps(fresh + base);
        __mmask8 taken = (__mmask8)(columns >> base & 0xF);
        for (int d = 0; d < w->groups * WIDTH; d += 16) {
            float *out = w->out + (tile * w->groups * WIDTH + d) * COLUMNS + base;
            __m512 v[BLOCK];
            for (int i = 0; i < BLOCK; i++)
                v[i] = _mm512_load_ps(sums + d * COLUMNS + (block * BLOCK + i) * 16);
            transpose_quarters(v);
            _Alignas(LINE) float turned[4][4][BLOCK];
            for (int i = 0; i < 4; i++)
                _mm512_store_ps(turned[i][0], v[i]);
            for (int i = 0; i < 16; i++, out += COLUMNS) {
                __m128 added = _mm_mul_ps(_mm_load_ps(turned[i % 4][i / 4]), by_fresh);
                _mm_mask_storeu_ps(out, taken, _mm_fmadd_ps(_mm_loadu_ps(out), by_old, added));
            }
        }
    }
}

/* The columns from `first` to `end`, few and in one tile, with a run of keys. */
static void attend_few(workspace *w, const run *r, const run *next, int first, int end) {
    const bough_attention_spec *spec = w->set->spec;
    int tile = first / COLUMNS, blocks = (end - first + BLOCK - 1) / BLOCK;
    int column = first % COLUMNS + blocks * BLOCK <= COLUMNS ? first : (tile + 1) * COLUMNS - blocks * BLOCK;
    float unit = (spec->softcap != 0.0f ? spec->softcap : spec->scale) * LOG2_E, *turned = w->scores + KEYS * COLUMNS;
    score_few(w, tile, r, next);
    turn_scores(w, column, blocks, r->first_key, r->groups, turned);
    _Alignas(LINE) float peaks[COLUMNS] = {0}, totals[COLUMNS] = {0};
    for (int i = first - column; i < end - column; i++)
        weigh_column(turned + i * KEYS, r->groups, unit, w->weights + i * LINE, peaks + column % COLUMNS + i,
                     totals + column % COLUMNS + i);
    combine_few(w, r, next);
    fold_few(w, column, blocks, columns_between(tile, first, end), w->sums,
             (extent){_mm512_load_ps(peaks), _mm512_load_ps(totals)});
}

#endif
