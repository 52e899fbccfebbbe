/* The product with AVX-512's dot products of bytes: one register is four inputs of a tile's 16 rows.
 *
 * The instruction multiplies unsigned bytes with signed ones. Weights with offsets, and 4-bit ones, are unsigned as
 * they are; signed ones are shifted by 128. A shift is taken back exactly, by where the sums begin: minus the shift
 * times the sum of the activations.
 */
#include "linear_tile.h"

#if defined(__AVX512VNNI__)
#include "linear_floats.h"

#include <immintrin.h>

enum { QUADS = GROUP / 4 };

/* The largest size; as whole numbers, sizes stand in the same order, and NaN is above all. */
ALWAYS_INLINE float largest_size(__m512 low, __m512 high) {
    __m512i sizes = _mm512_castps_si512(_mm512_abs_ps(low)), others = _mm512_castps_si512(_mm512_abs_ps(high));
    int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(sizes, others));
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest;
}

static void quantize(const float *x, int64_t k, token_group *token) {
    for (int64_t group = 0; group < k / GROUP; group++, x += GROUP, token++) {
        __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
        float largest = largest_size(low, high);
        __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f), top = _mm512_set1_ps(127.0f);
        __m512i first = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_mul_ps(low, inverse), top)); /* NaN: 127 */
        __m512i second = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_mul_ps(high, inverse), top));
        _mm_storeu_si128((__m128i *)token->codes, _mm512_cvtsepi32_epi8(first));
        _mm_storeu_si128((__m128i *)(token->codes + 16), _mm512_cvtsepi32_epi8(second));
        int32_t sums[2] = {_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)};
        describe_codes(token, largest, sums[0], sums[1]);
    }
}

/* A group's codes as unsigned bytes. */
ALWAYS_INLINE void load_codes(int format, const uint8_t *group, __m512i codes[QUADS]) {
    if (has_nibbles(format)) {
        __m512i mask = _mm512_set1_epi8(15);
        for (int i = 0; i < QUADS / 2; i++) {
            __m512i both = _mm512_loadu_si512(group + i * LINE);
            codes[i] = _mm512_and_si512(both, mask);
            codes[i + QUADS / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        }
        return;
    }
    __m512i shift = _mm512_set1_epi8(format == BOUGH_FORMAT_Q8_MIN ? 0 : (char)128);
    for (int i = 0; i < QUADS; i++)
        codes[i] = _mm512_xor_si512(_mm512_loadu_si512(group + i * LINE), shift);
}

ALWAYS_INLINE __m512i dot(__m512i sums, const __m512i *codes, const int8_t *activations, int quads) {
    for (int i = 0; i < quads; i++) {
        int32_t four;
        memcpy(&four, activations + 4 * i, sizeof four);
        sums = _mm512_dpbusd_epi32(sums, codes[i], _mm512_set1_epi32(four));
    }
    return sums;
}

/* The sums from which the dot products begin. */
ALWAYS_INLINE __m512i beginning(int format, int32_t negated_sum) {
    if (has_offsets(format))
        return _mm512_setzero_si512();
    return _mm512_slli_epi32(_mm512_set1_epi32(negated_sum), format == BOUGH_FORMAT_Q4 ? 3 : 7);
}

ALWAYS_INLINE __m512 load_halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

ALWAYS_INLINE void multiply_groups(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                                   const uint8_t *token, __m512 sums[8]) {
    enum { HALVES = TILE_ROWS * 2 };
    const uint8_t *scales = tile + scales_start(format, k), *offsets = tile + offsets_start(format, k);
    int64_t size = token_bytes(k);
    for (int64_t group = 0; group < k / GROUP; group++, tile += group_bytes(format), token += sizeof(token_group)) {
        __m512i codes[QUADS];
        load_codes(format, tile, codes);
        fetch_group(format, next, group);
        __m512 scale = load_halves(scales + group * scales_of_group(format) * HALVES);
        __m512 second = format == BOUGH_FORMAT_Q8_HALF ? load_halves(scales + (2 * group + 1) * HALVES) : scale;
        __m512 offset = has_offsets(format) ? load_halves(offsets + group * HALVES) : scale;
        for (int t = 0; t < at_once; t++) {
            const token_group *x = (const token_group *)(token + t * size);
            __m512 x_scale = _mm512_set1_ps(x->scale);
            if (format == BOUGH_FORMAT_Q8_HALF) {
                const int32_t *negated = x->negated_half_sums;
                __m512i low = dot(beginning(format, negated[0]), codes, x->codes, QUADS / 2);
                __m512i high = dot(beginning(format, negated[1]), codes + QUADS / 2, x->codes + 16, QUADS / 2);
                __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(low), scale);
                scaled = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), second, scaled);
                sums[t] = _mm512_fmadd_ps(scaled, x_scale, sums[t]);
                continue;
            }
            __m512i sum = dot(beginning(format, x->negated_sum), codes, x->codes, QUADS);
            sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, x_scale), sums[t]);
            if (has_offsets(format))
                sums[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(x->offset), sums[t]);
        }
    }
}

ALWAYS_INLINE void multiply(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                            const void *tokens, int64_t stride, int64_t first, const tile_output *out) {
    if (takes_floats(format)) {
        multiply_floats(format, at_once, tile, next, k, tokens, stride, first, out);
        return;
    }
    __m512 sums[8];
    for (int t = 0; t < at_once; t++)
        sums[t] = _mm512_setzero_ps();
    multiply_groups(format, at_once, tile, next, k, (const uint8_t *)token_at(tokens, first, k), sums);
    __mmask16 rows = (__mmask16)((1u << out->rows) - 1);
    __m512 bias = out->bias ? _mm512_maskz_loadu_ps(rows, out->bias) : _mm512_setzero_ps();
    for (int t = 0; t < at_once; t++) {
        float *y = out->y + (first + t) * out->stride;
        _mm512_mask_storeu_ps(y, rows, _mm512_add_ps(sums[t], bias));
    }
}

DEFINE_KERNELS(avx512)
#else
const linear_kernels *linear_avx512(void) { return NULL; }
#endif
