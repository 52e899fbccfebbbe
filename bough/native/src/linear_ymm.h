/* The product in AVX2's registers, each four inputs of eight rows; included by the variants with and without the dot
 * products of bytes (AVX-VNNI), which differ in one step.
 *
 * Without them, products of bytes are summed in pairs of 16 bits, which must not overflow: 4-bit codes can be summed
 * over a whole group so; signed 8-bit ones are multiplied as |code| · (activation with the code's sign), at most 128 ·
 * 127 · 2.
 */
#include "linear_floats.h"

#include <immintrin.h>

enum { QUADS = GROUP / 4, HALVES = TILE_ROWS * 2, AT_ONCE = 4 /* registers of sums */ };

static int32_t sum_numbers(__m256i numbers) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

/* The largest size; as whole numbers, sizes stand in the same order, and NaN is above all. */
static float largest_size(const __m256 values[4]) {
    const __m256i size = _mm256_set1_epi32(INT32_MAX);
    __m256i largest = _mm256_and_si256(size, _mm256_castps_si256(values[0]));
    for (int i = 1; i < 4; i++)
        largest = _mm256_max_epi32(largest, _mm256_and_si256(size, _mm256_castps_si256(values[i])));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

static void quantize(const float *x, int64_t k, token_group *token) {
    for (int64_t group = 0; group < k / GROUP; group++, x += GROUP, token++) {
        __m256 values[4];
        for (int i = 0; i < 4; i++)
            values[i] = _mm256_loadu_ps(x + 8 * i);
        float largest = largest_size(values);
        __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f), top = _mm256_set1_ps(127.0f);
        __m256i codes[4];
        for (int i = 0; i < 4; i++)
            codes[i] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_mul_ps(values[i], inverse), top)); /* NaN: 127 */
        __m256i low = _mm256_packs_epi32(codes[0], codes[1]), high = _mm256_packs_epi32(codes[2], codes[3]);
        __m256i bytes = _mm256_packs_epi16(low, high); /* packing keeps to halves: fours come out of order */
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)token->codes, bytes);
        int32_t first = sum_numbers(_mm256_add_epi32(codes[0], codes[1]));
        describe_codes(token, largest, first, sum_numbers(_mm256_add_epi32(codes[2], codes[3])));
    }
}

ALWAYS_INLINE bool is_signed(int format) { return format == BOUGH_FORMAT_Q8 || format == BOUGH_FORMAT_Q8_HALF; }

/* Four inputs of eight rows. */
ALWAYS_INLINE __m256i load_quad(int format, const uint8_t *group, int quad, int half) {
    int line = has_nibbles(format) ? quad % (QUADS / 2) : quad;
    __m256i codes = _mm256_loadu_si256((const __m256i *)(group + line * LINE + half * LINE / 2));
    if (has_nibbles(format))
        return _mm256_and_si256(quad < QUADS / 2 ? codes : _mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
#if defined(__AVXVNNI__)
    if (is_signed(format))
        return _mm256_xor_si256(codes, _mm256_set1_epi8((char)128));
#endif
    return codes;
}

/* Adds the products of four inputs. */
ALWAYS_INLINE __m256i add_quad(int format, __m256i sums, __m256i codes, const int8_t *activations) {
    int32_t four;
    memcpy(&four, activations, sizeof four);
    __m256i x = _mm256_set1_epi32(four);
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
    if (has_nibbles(format))
        return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
    __m256i pairs = is_signed(format) ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                                      : _mm256_maddubs_epi16(codes, x);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* The sums of a group or half of one, as floats; what codes are shifted by is taken back. */
ALWAYS_INLINE __m256 finish(int format, __m256i sums, int32_t negated_sum) {
#if defined(__AVXVNNI__)
    if (is_signed(format))
        sums = _mm256_add_epi32(sums, _mm256_set1_epi32(negated_sum * 128));
#else
    if (has_nibbles(format))
        sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
    if (format == BOUGH_FORMAT_Q4)
        sums = _mm256_add_epi32(sums, _mm256_set1_epi32(negated_sum * 8));
    return _mm256_cvtepi32_ps(sums);
}

ALWAYS_INLINE __m256 load_halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

/* `tokens` times one or both halves of the tile's rows, from `half` on: four registers of sums at most. */
ALWAYS_INLINE void multiply_groups(int format, int tokens, int halves, int half, const uint8_t *tile,
                                   const uint8_t *next, int64_t k, const uint8_t *token, __m256 results[AT_ONCE]) {
    const uint8_t *scales = tile + scales_start(format, k) + half * HALVES / 2;
    const uint8_t *offsets = tile + offsets_start(format, k) + half * HALVES / 2;
    int parts = scales_of_group(format), quads = QUADS / parts, count = tokens * halves;
    int64_t size = token_bytes(k);
    for (int64_t group = 0; group < k / GROUP; group++, tile += group_bytes(format), token += sizeof(token_group)) {
        fetch_group(format, next, group);
        for (int part = 0; part < parts; part++) {
            __m256i sums[AT_ONCE];
            for (int i = 0; i < count; i++)
                sums[i] = _mm256_setzero_si256();
            for (int quad = part * quads; quad < (part + 1) * quads; quad++) {
                for (int h = 0; h < halves; h++) {
                    __m256i codes = load_quad(format, tile, quad, half + h);
                    for (int t = 0; t < tokens; t++) {
                        const int8_t *four = (const int8_t *)token + t * size + 4 * quad;
                        sums[t * halves + h] = add_quad(format, sums[t * halves + h], codes, four);
                    }
                }
            }
            for (int i = 0; i < count; i++) {
                const token_group *x = (const token_group *)(token + i / halves * size);
                __m256 scale = load_halves(scales + (group * parts + part) * HALVES + i % halves * HALVES / 2);
                __m256 dots = finish(format, sums[i], parts == 2 ? x->negated_half_sums[part] : x->negated_sum);
                results[i] = _mm256_fmadd_ps(dots, _mm256_mul_ps(scale, _mm256_set1_ps(x->scale)), results[i]);
            }
        }
        for (int i = 0; has_offsets(format) && i < count; i++) {
            const token_group *x = (const token_group *)(token + i / halves * size);
            __m256 offset = load_halves(offsets + group * HALVES + i % halves * HALVES / 2);
            results[i] = _mm256_fmadd_ps(offset, _mm256_set1_ps(x->offset), results[i]);
        }
    }
}

/* Up to four tokens; both halves of the rows at once where registers suffice. */
ALWAYS_INLINE void multiply_few(int format, int tokens, const uint8_t *tile, const uint8_t *next, int64_t k,
                                const void *all, int64_t first, const tile_output *out) {
    float sums[AT_ONCE][TILE_ROWS];
    int halves = tokens > AT_ONCE / 2 ? 1 : 2;
    for (int half = 0; half < 2; half += halves) {
        __m256 results[AT_ONCE];
        for (int i = 0; i < tokens * halves; i++)
            results[i] = _mm256_setzero_ps();
        multiply_groups(format, tokens, halves, half, tile, half == 0 ? next : NULL, k,
                        (const uint8_t *)token_at(all, first, k), results);
        for (int i = 0; i < tokens * halves; i++)
            _mm256_storeu_ps(&sums[i / halves][8 * (half + i % halves)], results[i]);
    }
    for (int t = 0; t < tokens; t++)
        store_rows(out, first + t, sums[t]);
}

ALWAYS_INLINE void multiply(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                            const void *tokens, int64_t stride, int64_t first, const tile_output *out) {
    if (takes_floats(format))
        multiply_floats(format, at_once, tile, next, k, tokens, stride, first, out);
    for (int64_t token = first; !takes_floats(format) && token < first + at_once; token += AT_ONCE, next = NULL)
        multiply_few(format, at_once < AT_ONCE ? at_once : AT_ONCE, tile, next, k, tokens, token, out);
}
