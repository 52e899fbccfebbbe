/* How `attention_amx.c` computes with numbers: bfloat16 in two parts, powers of two, transposed blocks. Included by
 * that file alone and by what it is made of. */
#ifndef BOUGH_ATTENTION_AMX_NUMBERS_H
#define BOUGH_ATTENTION_AMX_NUMBERS_H

#include "ops.h"

#include <immintrin.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum {
    LINE = 64,
    REGISTER = 16 * LINE,
    BOTH_PARTS = 2 * REGISTER,
    WIDTH = 32, /* numbers in a line: what one instruction sums */
};

/* Two numbers of each lane as a pair of bfloat16, and what is left of them as another. */
typedef struct {
    __m512i great, less;
} parts;

ALWAYS_INLINE void store_parts(uint8_t *to, parts line) {
    _mm512_store_si512((void *)to, line.great);
    _mm512_store_si512((void *)(to + REGISTER), line.less);
}

ALWAYS_INLINE __m512 greater_part(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xFFFF0000)));
}

/* The upper halves of two numbers in one lane: bfloat16, cut off. */
ALWAYS_INLINE __m512i pair(__m512 first, __m512 second) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    return _mm512_ternarylogic_epi32(upper, _mm512_castps_si512(second), low, 0xEA); /* (upper & second) | low */
}

ALWAYS_INLINE parts split_pair(__m512 first, __m512 second) {
    __m512 less_first = _mm512_sub_ps(first, greater_part(first));
    __m512 less_second = _mm512_sub_ps(second, greater_part(second));
    return (parts){pair(first, second), pair(less_first, less_second)};
}

/* Which of 32 numbers there are, if so many are left. */
ALWAYS_INLINE __mmask32 there(int left) { return left >= WIDTH ? ~0u : left <= 0 ? 0 : (1u << left) - 1; }

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

/* The same of a tile register's dwords in memory. */
static inline void transpose_tile(uint8_t *tile) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++)
        rows[i] = _mm512_load_si512(tile + i * LINE);
    transpose(rows);
    for (int i = 0; i < 16; i++)
        _mm512_store_si512((void *)(tile + i * LINE), rows[i]);
}

/* In each quarter of four vectors, rows to columns. */
ALWAYS_INLINE void transpose_quarters(__m512 v[4]) {
    __m512 a = _mm512_unpacklo_ps(v[0], v[1]), b = _mm512_unpackhi_ps(v[0], v[1]);
    __m512 c = _mm512_unpacklo_ps(v[2], v[3]), d = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    v[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    v[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    v[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
}

#endif
