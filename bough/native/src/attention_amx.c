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
#include <immintrin.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum {
    LINE = 64,
    REGISTER = 16 * LINE,
    BOTH_PARTS = 2 * REGISTER,
    WIDTH = 32, /* numbers in a line: what one instruction sums */
    KEYS = BOUGH_RUN_KEYS,
    KEY_TILES = KEYS / 16,
    KEY_GROUPS = KEYS / WIDTH,
    COLUMNS = BOUGH_TILE_COLUMNS,
};
#define LOG2_E 1.44269504f
#define LEAST (-1e30f) /* of a key that a query does not see; finite, so that differences are numbers */

typedef struct {
    const bough_set *set;
    int dim, number;
    int groups;                /* of WIDTH dimensions */
    uint8_t *queries;          /* [tiles][groups] */
    float *out;                /* [tiles][dimensions][COLUMNS], of all runs so far, as peak and total */
    float *peak, *total;       /* [tiles][COLUMNS] */
    int32_t *last_key;         /* [tiles][COLUMNS] that a column sees; -1: it is none */
    int32_t *lowest, *highest; /* [tiles] of those */
    uint8_t *keys;             /* of a run: [KEY_TILES][groups] */
    uint8_t *values;           /* [2 * groups][KEY_GROUPS] */
    float *scores;             /* of two tiles of columns: [2][KEYS][COLUMNS] */
    uint8_t *weights;          /* [2][KEY_GROUPS] */
    float *sums;               /* [2][dimensions][COLUMNS], of one run */
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

/* ---- numbers */

ALWAYS_INLINE __m512 greater_part(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xFFFF0000)));
}

typedef struct {
    __m512i great, less;
} parts;

ALWAYS_INLINE void store_line(uint8_t *to, parts line) {
    _mm512_store_si512((void *)to, line.great);
    _mm512_store_si512((void *)(to + REGISTER), line.less);
}

/* The upper halves of two numbers in one lane: bfloat16, cut off. */
ALWAYS_INLINE __m512i pair(__m512 first, __m512 second) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    return _mm512_ternarylogic_epi32(upper, _mm512_castps_si512(second), low, 0xEA); /* (upper & second) | low */
}

ALWAYS_INLINE parts split_pair(__m512 first, __m512 second) {
    __m512 less_first = _mm512_sub_ps(first, greater_part(first)), less_second = _mm512_sub_ps(second, greater_part(second));
    return (parts){pair(first, second), pair(less_first, less_second)};
}

/* Some of 16 numbers of a cache, and zeros. */
ALWAYS_INLINE __m512 load_numbers(int number, __mmask16 taken, const uint16_t *from) {
    __m256i x = _mm256_maskz_loadu_epi16(taken, from);
    if (number == BOUGH_FLOAT16)
        return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* 2 to the x, to a relative 2e-7; x is at most 0. */
ALWAYS_INLINE __m512 power_of_two(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n), p = _mm512_set1_ps(1.3264726e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6715127e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507337e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022242e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314698e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* 16 rows of 16 to 16 columns. */
ALWAYS_INLINE void transpose(__m512i rows[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 16; half += 8)
#pragma GCC unroll 4
        for (int i = half; i < half + 4; i++) {
            t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
            t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xDD);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

/* ---- what is multiplied */

/* Which columns there are, what they ask, and how far they see. */
static void find_columns(workspace *w, const float *columns[BOUGH_SET_TILES * COLUMNS]) {
    const bough_set *set = w->set;
    memset(w->last_key, 0xFF, (size_t)(set->tiles * COLUMNS) * sizeof(int32_t));
    for (int i = 0; i < set->tiles * COLUMNS; i++)
        columns[i] = NULL;
    for (const bough_piece *piece = set->pieces; piece < set->pieces + set->count; piece++)
        for (int token = 0; token < piece->tokens; token++)
            for (int head = 0; head < set->heads; head++) {
                int column = piece->first_column + token * set->heads + head;
                columns[column] = set->q + (piece->token + token) * set->q_stride + (set->first_head + head) * w->dim;
                w->last_key[column] = (int32_t)(piece->position + token);
            }
    for (int tile = 0; tile < set->tiles; tile++) {
        __m512i last = _mm512_load_si512(w->last_key + tile * COLUMNS);
        w->lowest[tile] = _mm512_mask_reduce_min_epi32(_mm512_cmpge_epi32_mask(last, _mm512_setzero_si512()), last);
        w->highest[tile] = _mm512_reduce_max_epi32(last);
    }
}

/* Some of 32 numbers, and zeros. */
ALWAYS_INLINE __mmask32 there(int left) { return left >= WIDTH ? ~0u : left <= 0 ? 0 : (1u << left) - 1; }

/* A tile of columns that are no queries has zeros. */
static void load_queries(workspace *w) {
    const float *columns[BOUGH_SET_TILES * COLUMNS];
    find_columns(w, columns);
    uint8_t *to = w->queries;
    for (int tile = 0; tile < w->set->tiles; tile++)
        for (int group = 0; group < w->groups; group++, to += BOTH_PARTS) {
            __m512i great[16], less[16];
            for (int i = 0; i < 16; i++) {
                const float *q = columns[tile * COLUMNS + i];
                __mmask32 taken = q == NULL ? 0 : there(w->dim - group * WIDTH);
                q = q == NULL ? w->set->q : q + group * WIDTH;
                parts line = split_pair(_mm512_maskz_loadu_ps((__mmask16)taken, q),
                                        _mm512_maskz_loadu_ps((__mmask16)(taken >> 16), q + 16));
                great[i] = line.great;
                less[i] = line.less;
            }
            transpose(great);
            transpose(less);
            for (int i = 0; i < 16; i++)
                store_line(to + i * LINE, (parts){great[i], less[i]});
        }
}

/* A run of keys as some pieces see it. */
typedef struct {
    int64_t number, first_key;
    int keys, groups;               /* that any of them sees, and how many times WIDTH that is */
    const bough_piece *first, *end; /* the pieces */
    int64_t offsets[KEYS];          /* of the keys in their cache, in numbers; -1: there is no key */
} run;

static void find_slots(const bough_set *set, int kv_head, run *r) {
    int64_t size = set->page_size, dim = set->spec->dim, page = r->first_key / size, within = r->first_key % size;
    for (int j = 0; j < r->keys; j++) {
        r->offsets[j] = ((r->first->pages[page] * size + within) * set->spec->kv_heads + kv_head) * dim;
        if (++within == size) {
            page++;
            within = 0;
        }
    }
    for (int j = r->keys; j < KEYS; j++)
        r->offsets[j] = -1;
}

/* The numbers of a key or value; of one that is not there, zeros. */
ALWAYS_INLINE const uint16_t *numbers_of(const uint16_t *cache, int64_t offset) {
    static const uint16_t zeros[BOUGH_MAX_HEAD_DIM];
    return offset < 0 ? zeros : cache + offset;
}

/* Asks for what will be loaded in the next run. */
ALWAYS_INLINE void fetch(const workspace *w, const uint16_t *cache, int64_t offset) {
    const uint16_t *next = numbers_of(cache, offset);
    for (int at = 0; at < w->dim; at += WIDTH)
        __builtin_prefetch(next + at, 0, 2);
}

/* 32 keys, in two rows of tiles. */
ALWAYS_INLINE void load_keys_as(int number, bool whole, const workspace *w, const int64_t *offsets, const int64_t *next,
                                uint8_t *to) {
    for (int j = 0; j < WIDTH; j++) {
        const uint16_t *from = numbers_of(w->set->spec->keys, offsets[j]);
        fetch(w, w->set->spec->keys, next[j]);
        uint8_t *line = to + j / 16 * w->groups * BOTH_PARTS + j % 16 * LINE;
        for (int group = 0; group < w->groups; group++, line += BOTH_PARTS, from += WIDTH) {
            __mmask32 taken = whole ? ~0u : there(w->dim - group * WIDTH);
            parts both = split_pair(load_numbers(number, (__mmask16)taken, from),
                                    load_numbers(number, (__mmask16)(taken >> 16), from + 16));
            _mm512_store_si512((void *)line, both.great);
            if (number == BOUGH_FLOAT16)
                _mm512_store_si512((void *)(line + REGISTER), both.less);
        }
    }
}

/* Some dimensions, 16 in a tile, of 32 values: pairs of values by dimensions. */
ALWAYS_INLINE void load_values_as(int number, bool whole, const workspace *w, const int64_t *offsets,
                                  const int64_t *next, int first, int tiles, uint8_t *to, int64_t stride) {
    for (int i = 0; i < 16; i++, to += LINE) {
        const uint16_t *even = numbers_of(w->set->spec->values, offsets[2 * i]);
        const uint16_t *odd = numbers_of(w->set->spec->values, offsets[2 * i + 1]);
        fetch(w, w->set->spec->values, next[2 * i]);
        fetch(w, w->set->spec->values, next[2 * i + 1]);
        for (int tile = 0; tile < tiles; tile++) {
            int at = (first + tile) * 16;
            __mmask16 taken = (__mmask16)(whole ? ~0u : there(w->dim - at));
            parts both = split_pair(load_numbers(number, taken, even + at), load_numbers(number, taken, odd + at));
            _mm512_store_si512((void *)(to + tile * stride), both.great);
            if (number == BOUGH_FLOAT16)
                _mm512_store_si512((void *)(to + tile * stride + REGISTER), both.less);
        }
    }
}

static void load_keys(const workspace *w, const run *r, const run *next, int group, uint8_t *to) {
    const int64_t *offsets = r->offsets + group * WIDTH, *fetched = next->offsets + group * WIDTH;
    if (w->number == BOUGH_BFLOAT16)
        load_keys_as(BOUGH_BFLOAT16, false, w, offsets, fetched, to);
    else if (w->dim % WIDTH != 0)
        load_keys_as(BOUGH_FLOAT16, false, w, offsets, fetched, to);
    else
        load_keys_as(BOUGH_FLOAT16, true, w, offsets, fetched, to);
}

static void load_values(const workspace *w, const run *r, const run *next, int group, int first, int tiles, uint8_t *to,
                        int64_t stride) {
    const int64_t *offsets = r->offsets + group * WIDTH, *fetched = next->offsets + group * WIDTH;
    if (w->number == BOUGH_BFLOAT16)
        load_values_as(BOUGH_BFLOAT16, false, w, offsets, fetched, first, tiles, to, stride);
    else if (w->dim % WIDTH != 0)
        load_values_as(BOUGH_FLOAT16, false, w, offsets, fetched, first, tiles, to, stride);
    else
        load_values_as(BOUGH_FLOAT16, true, w, offsets, fetched, first, tiles, to, stride);
}

static void transpose_tile(uint8_t *tile) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++)
        rows[i] = _mm512_load_si512(tile + i * LINE);
    transpose(rows);
    for (int i = 0; i < 16; i++)
        _mm512_store_si512((void *)(tile + i * LINE), rows[i]);
}

/* Makes the keys and the values, transposed, of a run ready. */
static void load_run(const workspace *w, const run *r, const run *next) {
    for (int group = 0; group < r->groups; group++) {
        uint8_t *values = w->values + group * BOTH_PARTS;
        load_keys(w, r, next, group, w->keys + 2 * group * w->groups * BOTH_PARTS);
        load_values(w, r, next, group, 0, 2 * w->groups, values, KEY_GROUPS * BOTH_PARTS);
        for (int tile = 0; tile < 2 * w->groups; tile++) {
            transpose_tile(values + tile * KEY_GROUPS * BOTH_PARTS);
            if (w->number == BOUGH_FLOAT16)
                transpose_tile(values + tile * KEY_GROUPS * BOTH_PARTS + REGISTER);
        }
    }
}

/* ---- products: a of tiles by `groups` (of those that a row of tiles has) with b of columns by groups. For each group the
 * greater part of a with the lesser of b, with the greater, and its lesser with b's greater, in this order always. */

typedef struct {
    const uint8_t *a;
    int64_t a_row; /* bytes from one row of tiles to the next */
    const uint8_t *b;
    int64_t b_column;
    float *sums;
    int64_t sums_column; /* bytes from one tile of columns to the next; rows follow each other */
    int groups;
    bool exact;  /* a has no lesser part */
    bool turned; /* a's tiles are what b's else are, and the other way round, with the same sums, transposed */
} product;

static void store_sums(const product *p, int row) {
    uint8_t *to = (uint8_t *)p->sums + row * REGISTER;
    _tile_stored(0, to, LINE);
    _tile_stored(1, to + REGISTER, LINE);
    _tile_stored(2, to + p->sums_column, LINE);
    _tile_stored(3, to + p->sums_column + REGISTER, LINE);
}

static void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Two rows of tiles by two columns. */
ALWAYS_INLINE void multiply_square(const product *p, int row) {
    clear_sums();
    const uint8_t *a = p->a + row * p->a_row, *b = p->b;
    for (int group = 0; group < p->groups; group++, a += BOTH_PARTS, b += BOTH_PARTS) {
        _tile_loadd(4, a, LINE);
        _tile_loadd(6, b + REGISTER, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + p->a_row, LINE);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, b + p->b_column + REGISTER, LINE);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(6, b, LINE);
        _tile_loadd(7, b + p->b_column, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        if (p->exact)
            continue;
        _tile_loadd(4, a + REGISTER, LINE);
        _tile_loadd(5, a + p->a_row + REGISTER, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(p, row);
}

/* One part of up to four rows of tiles with the part of b in register `one`. */
#define MULTIPLY_ROWS(one)                                                                                             \
    do {                                                                                                               \
        _tile_loadd(4, from, LINE);                                                                                    \
        _tile_loadd(5, from + p->a_row, LINE);                                                                         \
        MULTIPLY(0, 4, one);                                                                                           \
        MULTIPLY(1, 5, one);                                                                                           \
        if (four) {                                                                                                    \
            _tile_loadd(4, from + 2 * p->a_row, LINE);                                                                 \
            _tile_loadd(5, from + 3 * p->a_row, LINE);                                                                 \
            MULTIPLY(2, 4, one);                                                                                       \
            MULTIPLY(3, 5, one);                                                                                       \
        }                                                                                                              \
    } while (0)
#define MULTIPLY(sum, row, one)                                                                                        \
    do {                                                                                                               \
        if (p->turned)                                                                                                 \
            _tile_dpbf16ps(sum, one, row);                                                                             \
        else                                                                                                           \
            _tile_dpbf16ps(sum, row, one);                                                                             \
    } while (0)

/* Two or four rows of tiles by one column, of one group. */
ALWAYS_INLINE void multiply_group(const product *p, const uint8_t *from, const uint8_t *b, bool four) {
    __asm__ __volatile__("" ::: "memory"); /* compilers do not know what tiles are loaded from */
    _tile_loadd(6, b + REGISTER, LINE);
    _tile_loadd(7, b, LINE);
    MULTIPLY_ROWS(6);
    MULTIPLY_ROWS(7);
    from += REGISTER;
    if (!p->exact)
        MULTIPLY_ROWS(7);
}

ALWAYS_INLINE void store_rows(const product *p, int row, bool four) {
    uint8_t *to = (uint8_t *)p->sums + row * REGISTER;
    _tile_stored(0, to, LINE);
    _tile_stored(1, to + REGISTER, LINE);
    if (four) {
        _tile_stored(2, to + 2 * REGISTER, LINE);
        _tile_stored(3, to + 3 * REGISTER, LINE);
    }
}

ALWAYS_INLINE void multiply_rows(const product *p, int row, bool four) {
    clear_sums();
    for (int group = 0; group < p->groups; group++)
        multiply_group(p, p->a + row * p->a_row + group * BOTH_PARTS, p->b + group * BOTH_PARTS, four);
    store_rows(p, row, four);
}

/* An even number of rows of tiles by one or two columns. */
static void multiply(const product *p, int rows, int columns) {
    __asm__ __volatile__("" ::: "memory"); /* compilers do not know what tiles are loaded from */
    int row = 0;
    for (; columns == 2 && row < rows; row += 2)
        multiply_square(p, row);
    for (; row + 4 <= rows; row += 4)
        multiply_rows(p, row, true);
    if (row < rows)
        multiply_rows(p, row, false);
}

/* ---- a run of keys, with one tile of columns */

/* Scores in units of the exponent, with those that a column does not see hidden. */
static void hide(const workspace *w, int tile, int64_t first, int keys, float *scores) {
    const bough_attention_spec *spec = w->set->spec;
    __m512i last = _mm512_load_si512(w->last_key + tile * COLUMNS);
    __m512i before = _mm512_set1_epi32(-1);
    if (spec->window != 0 && spec->window < INT32_MAX)
        before = _mm512_sub_epi32(last, _mm512_set1_epi32((int32_t)spec->window));
    for (int j = 0; j < keys; j++) {
        __m512i key = _mm512_set1_epi32((int32_t)first + j);
        __mmask16 seen = _mm512_cmple_epi32_mask(key, last) & _mm512_cmpgt_epi32_mask(key, before);
        __m512 score = _mm512_load_ps(scores + j * COLUMNS);
        _mm512_store_ps(scores + j * COLUMNS, _mm512_mask_mov_ps(_mm512_set1_ps(LEAST), seen, score));
    }
}

static void cap(const bough_attention_spec *spec, int keys, float *scores) {
    const __m512 one = _mm512_set1_ps(1.0f), twice = _mm512_set1_ps(-2.8853901f * spec->scale / spec->softcap);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    for (int j = 0; j < keys; j++) {
        __m512 x = _mm512_load_ps(scores + j * COLUMNS);
        __m512 shrunk = power_of_two(_mm512_mul_ps(_mm512_andnot_ps(sign, x), twice)); /* tanh by e^(-2 |x|) */
        __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, shrunk), _mm512_add_ps(one, shrunk));
        tanh = _mm512_or_ps(tanh, _mm512_and_ps(sign, x));
        _mm512_store_ps(scores + j * COLUMNS, tanh);
    }
}

static __m512 largest(const float *scores, int keys) {
    __m512 most[4];
    for (int i = 0; i < 4; i++)
        most[i] = _mm512_load_ps(scores + i * COLUMNS);
    for (int j = 4; j < keys; j += 4)
        for (int i = 0; i < 4; i++)
            most[i] = _mm512_max_ps(most[i], _mm512_load_ps(scores + (j + i) * COLUMNS));
    return _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
}

/* Scores to weights in pairs of keys, and their sums: of 16 keys neighbours first, then pairs of them, and so on. */
ALWAYS_INLINE __m512 weigh(const float *scores, int groups, __m512 unit, __m512 top, uint8_t *weights) {
    __m512 total = _mm512_setzero_ps();
    for (int tile = 0; tile < 2 * groups; tile++, scores += 16 * COLUMNS) {
        uint8_t *to = weights + tile / 2 * BOTH_PARTS + tile % 2 * 8 * LINE;
        __m512 sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512 even = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + 2 * i * COLUMNS), unit, top));
            __m512 odd = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + (2 * i + 1) * COLUMNS), unit, top));
            store_line(to + i * LINE, split_pair(even, odd));
            sums[i] = _mm512_add_ps(even, odd);
        }
        __m512 low = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
        __m512 high = _mm512_add_ps(_mm512_add_ps(sums[4], sums[5]), _mm512_add_ps(sums[6], sums[7]));
        total = _mm512_add_ps(total, _mm512_add_ps(low, high));
    }
    return total;
}

typedef struct {
    __m512 peak, total;
} extent;

static extent score_to_weights(const workspace *w, int tile, int64_t first, int groups, float *scores,
                               uint8_t *weights) {
    const bough_attention_spec *spec = w->set->spec;
    int keys = groups * WIDTH;
    __m512 unit = _mm512_set1_ps((spec->softcap != 0.0f ? spec->softcap : spec->scale) * LOG2_E);
    if (spec->softcap != 0.0f)
        cap(spec, keys, scores);
    bool windowed = spec->window != 0 && first + spec->window <= w->highest[tile];
    if (windowed || w->lowest[tile] < first + keys - 1)
        hide(w, tile, first, keys, scores);
    __m512 most = largest(scores, keys), least = _mm512_set1_ps(LEAST);
    __mmask16 blind = _mm512_cmp_ps_mask(most, least, _CMP_LE_OQ); /* who sees nothing has weights of 0 */
    __m512 top = _mm512_maskz_mul_ps((__mmask16)~blind, most, unit);
    return (extent){_mm512_mask_mov_ps(top, blind, least), weigh(scores, groups, unit, top, weights)};
}

typedef struct {
    __m512 old, fresh;
} factors;

/* Brings a run and those before it to the same maximum, for some of the columns. */
static factors meet(const workspace *w, int tile, __mmask16 columns, extent added) {
    float *peak = w->peak + tile * COLUMNS, *total = w->total + tile * COLUMNS;
    __m512 peak_before = _mm512_load_ps(peak), top = _mm512_max_ps(added.peak, peak_before);
    factors by = {power_of_two(_mm512_sub_ps(peak_before, top)), power_of_two(_mm512_sub_ps(added.peak, top))};
    __m512 both = _mm512_fmadd_ps(_mm512_load_ps(total), by.old, _mm512_mul_ps(added.total, by.fresh));
    _mm512_mask_store_ps(total, columns, both);
    _mm512_mask_store_ps(peak, columns, top);
    return by;
}

static void fold(const workspace *w, int tile, __mmask16 columns, const float *sums, extent added) {
    float *out = w->out + tile * w->groups * WIDTH * COLUMNS;
    factors by = meet(w, tile, columns, added);
    for (int d = 0; d < w->groups * WIDTH * COLUMNS; d += COLUMNS) {
        __m512 fresh = _mm512_mul_ps(_mm512_load_ps(sums + d), by.fresh);
        _mm512_mask_store_ps(out + d, columns, _mm512_fmadd_ps(_mm512_load_ps(out + d), by.old, fresh));
    }
}

/* Which columns of a tile are from `first` to `end`. */
static __mmask16 columns_between(int tile, int first, int end) {
    int from = first - tile * COLUMNS, to = end - tile * COLUMNS;
    uint32_t before = from <= 0 ? 0 : (1u << from) - 1, until = to >= COLUMNS ? 0xFFFF : (1u << to) - 1;
    return (__mmask16)(until & ~before);
}

/* Scores of one or two tiles of columns. */
static void score(const workspace *w, int tile, int count, int groups) {
    int64_t bytes = w->groups * BOTH_PARTS;
    product p = {.a = w->keys,
                 .a_row = bytes,
                 .b = w->queries + tile * bytes,
                 .b_column = bytes,
                 .sums = w->scores,
                 .sums_column = KEYS * LINE,
                 .groups = w->groups,
                 .exact = w->number == BOUGH_BFLOAT16};
    multiply(&p, 2 * groups, count);
}

/* Weighted sums of values, of one or two tiles of weights. */
static void combine(const workspace *w, int count, int groups) {
    product p = {.a = w->values,
                 .a_row = KEY_GROUPS * BOTH_PARTS,
                 .b = w->weights,
                 .b_column = KEY_GROUPS * BOTH_PARTS,
                 .sums = w->sums,
                 .sums_column = w->groups * WIDTH * LINE,
                 .groups = groups,
                 .exact = w->number == BOUGH_BFLOAT16};
    multiply(&p, 2 * w->groups, count);
}

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

/* ---- a run of keys, with few columns of one tile: vectors are of keys, as soon as scores are there */

/* A block is four columns; `FEW_BLOCKS` of them are not too many. */
enum { BLOCK = 4, FEW_BLOCKS = 2, FEW_COLUMNS = BLOCK * FEW_BLOCKS };

/* In each quarter of four vectors, rows to columns. */
ALWAYS_INLINE void transpose_quarters(__m512 v[4]) {
    __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    v[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    v[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    v[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
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
        store_line(weights, split_weights(low, high));
        sum = _mm512_add_ps(_mm512_add_ps(sum, sum_16(low)), sum_16(high));
    }
    *total = _mm512_cvtss_f32(sum);
}

/* Puts the scores of a tile's columns from `base` on one behind the other, [KEYS] each; hidden ones are hidden. */
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

/* Scores of a tile; keys are made ready while those before are multiplied. */
static void score_few(const workspace *w, int tile, const run *r, const run *next) {
    int64_t bytes = w->groups * BOTH_PARTS;
    product p = {.a = w->keys,
                 .a_row = bytes,
                 .b = w->queries + tile * bytes,
                 .sums = w->scores,
                 .groups = w->groups,
                 .exact = w->number == BOUGH_BFLOAT16};
    for (int group = 0; group < r->groups; group++, p.sums += WIDTH * COLUMNS) {
        load_keys(w, r, next, group, w->keys);
        multiply_rows(&p, 0, false);
    }
}

/* Weighted sums of values, up to 64 dimensions at a time; a column's are a row. */
static void combine_few(const workspace *w, const run *r, const run *next) {
    product p = {.a = w->values,
                 .a_row = BOTH_PARTS,
                 .sums = w->sums,
                 .exact = w->number == BOUGH_BFLOAT16,
                 .turned = true};
    for (int tile = 0; tile < 2 * w->groups; tile += 4) {
        bool four = tile + 4 <= 2 * w->groups;
        clear_sums();
        for (int group = 0; group < r->groups; group++) {
            load_values(w, r, next, group, tile, four ? 4 : 2, w->values, BOTH_PARTS);
            multiply_group(&p, w->values, w->weights + group * BOTH_PARTS, four);
        }
        store_rows(&p, tile, four);
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

/* ---- sets */

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
        find_slots(set, (set->kv_head + 1) % set->spec->kv_heads, r);
}

static void attend_pieces(workspace *w, const run *r, const run *next) {
    int from = r->first->first_column, to = r->end[-1].first_column + r->end[-1].tokens * w->set->heads;
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
        attend_pieces(w, &runs[at], &runs[!at]);
    }
}

/* Outputs to where they belong, divided by the sums of the weights. */
static void store_outputs(const workspace *w) {
    const bough_set *set = w->set;
    _Alignas(LINE) float rows[COLUMNS][COLUMNS];
    for (const bough_piece *piece = set->pieces; piece < set->pieces + set->count; piece++) {
        int columns = piece->tokens * set->heads, end = piece->first_column + columns;
        for (int tile = piece->first_column / COLUMNS; tile * COLUMNS < end; tile++) {
            __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(w->total + tile * COLUMNS));
            for (int d = 0; d < w->dim; d += 16) {
                const float *from = w->out + (tile * w->groups * WIDTH + d) * COLUMNS;
                __m512i block[16];
                for (int i = 0; i < 16; i++)
                    block[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + i * COLUMNS), factor));
                transpose(block);
                for (int i = 0; i < 16; i++)
                    _mm512_store_si512((void *)rows[i], block[i]);
                for (int i = 0; i < COLUMNS; i++) {
                    int column = tile * COLUMNS + i - piece->first_column;
                    if (column < 0 || column >= columns)
                        continue;
                    int64_t token = piece->token + column / set->heads, head = set->first_head + column % set->heads;
                    float *to = set->out + token * set->out_stride + head * w->dim + d;
                    _mm512_mask_storeu_ps(to, (__mmask16)there(w->dim - d), _mm512_load_ps(rows[i]));
                }
            }
        }
    }
}

static void clear(workspace *w) {
    int64_t columns = w->set->tiles * COLUMNS;
    memset(w->out, 0, (size_t)(columns * w->groups * WIDTH) * sizeof(float));
    memset(w->total, 0, (size_t)columns * sizeof(float));
    for (int64_t i = 0; i < columns; i++)
        w->peak[i] = LEAST;
}

static workspace open_set(const bough_set *set, void *scratch) {
    workspace w = {.set = set, .number = set->spec->number};
    lay_out(&w, set->spec->dim, scratch);
    clear(&w);
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
