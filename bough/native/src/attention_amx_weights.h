/* Scores to weights, and a run's outputs to those of the runs before it: of `attention_amx.c`. A vector is 16
 * columns. */
#ifndef BOUGH_ATTENTION_AMX_WEIGHTS_H
#define BOUGH_ATTENTION_AMX_WEIGHTS_H

#include "attention_amx_tiles.h"

/* Hides the scores of keys that a column does not see. */
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

/* tanh of the scores by their cap, of `keys` vectors. */
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
            store_parts(to + i * LINE, split_pair(even, odd));
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

#endif
