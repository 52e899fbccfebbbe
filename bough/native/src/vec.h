/* Vectors of float as wide as the instructions that this file is compiled for, with the compilers' own vector types:
 * one source serves AVX-512, AVX2, NEON and whatever else there is.
 */
#ifndef BOUGH_VEC_H
#define BOUGH_VEC_H

#include "numbers.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float vec4 __attribute__((vector_size(16)));

#if LANES == 16
typedef float half_vec __attribute__((vector_size(32)));
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
typedef vec4 half_vec;
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

INLINE vec load_half(const uint16_t *from) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    return (vec){half_to_float(from[0]), half_to_float(from[1]), half_to_float(from[2]), half_to_float(from[3])};
#endif
}

INLINE void store_half(uint16_t *to, vec v) {
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)v, 0));
#elif LANES == 8
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__aarch64__)
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
    for (int i = 0; i < LANES; i++)
        to[i] = float_to_half(v[i]);
#endif
}

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec select_(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

INLINE vec larger(vec a, vec b) { return select_(a > b, a, b); }

INLINE vec smaller(vec a, vec b) { return select_(a < b, a, b); }

/* Lanes of a and b by turns, both folded to half their number: one step on the way from several sums' vectors to a
 * vector of sums. */
INLINE vec fold_pair(vec a, vec b) { return SHUFFLE(a, b, ZIP_LOW) + SHUFFLE(a, b, ZIP_HIGH); }

INLINE void fold_half(vec *sums, int half) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++)
        sums[i] = fold_pair(sums[i], sums[i + half]);
}

/* The sums of LANES vectors, in order; `sums` is used up. */
INLINE vec sum_each(vec *sums) {
#if LANES == 16
    fold_half(sums, 8);
#endif
#if LANES >= 8
    fold_half(sums, 4);
#endif
    fold_half(sums, 2);
    return fold_pair(sums[0], sums[1]);
}

/* Four lanes, each the sum of all lanes of v whose number leaves the same rest by four. */
INLINE vec4 fold_to_four(vec v) {
#if LANES == 4
    return v;
#else
    half_vec low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (char *)&v + sizeof low, sizeof high);
    low += high;
#if LANES == 16
    vec4 a, b;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (char *)&low + sizeof a, sizeof b);
    return a + b;
#else
    return low;
#endif
#endif
}

INLINE float sum_of(vec v) {
    vec4 four = fold_to_four(v);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE float largest_of(vec v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++)
        best = v[i] > best ? v[i] : best;
    return best;
}

/* e to the x, to a relative 2e-7; what would leave the range of normal numbers stays at its edge. */
INLINE vec exp_(vec x) {
    const vec rounder = splat(12582912.0f); /* 1.5 * 2^23: a sum with it has no bits left behind the point */
    x = smaller(splat(88.37f), larger(splat(-87.33f), x)); /* in this order, NaN stays */
    vec shifted = x * 1.44269504f + rounder;
    vec n = shifted - rounder;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2, in two parts */
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = ((ivec)shifted - (ivec)rounder + 127) << 23;
    return p * (vec)exponent;
}

INLINE vec tanh_(vec x) { return 1.0f - 2.0f / (exp_(2.0f * x) + 1.0f); }

#endif
