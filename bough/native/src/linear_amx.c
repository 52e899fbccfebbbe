/* Products of many tokens with AMX: tiles of bfloat16, summed in float32 over all inputs.
 *
 * Tiles of bytes would be exact, but their sums would have to leave the tiles after every group of 32 inputs to be
 * scaled, which takes longer than the products. So two tiles of weights at a time are unpacked into bfloat16, scales
 * included, and multiplied with all tokens of a panel. Activations are rounded to bfloat16 too, a smaller error than
 * that of 8 bits, and so are weights of float16. Weights that are bfloat16 already lie in their tiles as the registers
 * take them.
 *
 * A tile register has 16 rows of 64 bytes. Of activations: 16 tokens by 32 inputs. Of weights: 16 pairs of inputs by 16
 * outputs. Four registers hold the sums of 32 tokens by 32 outputs.
 */
#include "linear_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <immintrin.h>

enum { REGISTER_BYTES = 16 * LINE };

static int64_t panel_bytes(int64_t k, int64_t tokens) {
    return (tokens + TILE_ROWS - 1) / TILE_ROWS * (k / GROUP) * REGISTER_BYTES;
}

static int64_t unpacked_bytes(int64_t k) { return 2 * (k / GROUP) * REGISTER_BYTES; }

/* Sixteen tokens' register for every group of inputs, one behind the other. Tokens that are not there are zeros. */
static void convert(const float *x, int64_t x_stride, int64_t k, int64_t first, int64_t count, void *panel) {
    uint8_t *out = (uint8_t *)panel + panel_bytes(k, first);
    for (int64_t token = 0; token < TILE_ROWS; token++) {
        const float *in = x + (first + token) * x_stride;
        uint8_t *row = out + token * LINE;
        for (int64_t group = 0; group < k / GROUP; group++, row += REGISTER_BYTES) {
            __m512i line = _mm512_setzero_si512();
            if (token < count) {
                __m512 low = _mm512_loadu_ps(in + group * GROUP), high = _mm512_loadu_ps(in + group * GROUP + 16);
                line = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            _mm512_store_si512((void *)row, line);
        }
    }
}

static void begin(void) {
    /* All eight registers in use: 16 rows of 64 bytes. Constant, so that it is in memory whatever the compiler thinks
     * that the instruction reads. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shapes);
}

static void end(void) { _tile_release(); }

typedef struct {
    __m512 scale, base; /* value = scale * (2^15 + byte) + base */
} row_scales;

/* `shift` is what the codes are above their true value. */
ALWAYS_INLINE row_scales load_scales(const uint8_t *scales, const uint8_t *offsets, float shift) {
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
    __m512 offset = offsets ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)offsets)) : _mm512_setzero_ps();
    return (row_scales){scale, _mm512_fnmadd_ps(scale, _mm512_set1_ps(32768.0f + shift), offset)};
}

/* Byte `input` of each four, as the float 2^15 + byte: that of 2^15 with the byte for its second lowest. */
ALWAYS_INLINE __m512 byte_to_float(__m512i line, int input) {
    const __m512i power = _mm512_set1_epi32(0x47000000);
    if (input == 1) /* it is there already */
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(line, _mm512_set1_epi32(0xFF00), power, 0xEA));
    const __m512i fours = _mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0);
    __m512i from = _mm512_add_epi32(fours, _mm512_set1_epi32(input << 8));
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(power, 0x2222222222222222, line, from));
}

/* Two floats of each row as a pair of bfloat16, rounded to the nearest. */
ALWAYS_INLINE __m512i to_pairs(__m512 first, __m512 second) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i upper = _mm512_set4_epi32(0x0F0E, 0x0B0A, 0x0706, 0x0302);
    __m512i low = _mm512_add_epi32(_mm512_castps_si512(first), half);
    __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    return _mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, upper);
}

/* Four inputs of 16 rows to two lines of a weight register. */
ALWAYS_INLINE void unpack_line(__m512i line, row_scales rows, uint8_t *out) {
    __m512 values[4];
    for (int input = 0; input < 4; input++)
        values[input] = _mm512_fmadd_ps(byte_to_float(line, input), rows.scale, rows.base);
    _mm512_store_si512((void *)out, to_pairs(values[0], values[1]));
    _mm512_store_si512((void *)(out + LINE), to_pairs(values[2], values[3]));
}

/* The same of float16: 32 inputs of 16 rows. */
ALWAYS_INLINE void unpack_halves(const uint8_t *from, uint8_t *out) {
    for (int i = 0; i < GROUP / 2; i++, from += LINE, out += LINE) {
        __m512 first = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
        __m512 second = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + LINE / 2)));
        _mm512_store_si512((void *)out, to_pairs(first, second));
    }
}

/* A group of a tile to a weight register. */
ALWAYS_INLINE void unpack_group(int format, const uint8_t *tile, int64_t k, int64_t group, uint8_t *out) {
    enum { HALVES = TILE_ROWS * 2 };
    if (format == BOUGH_FORMAT_F16) {
        unpack_halves(tile + group * REGISTER_BYTES, out);
        return;
    }
    const bool is_signed = format == BOUGH_FORMAT_Q8 || format == BOUGH_FORMAT_Q8_HALF;
    const float shift = is_signed ? 128.0f : format == BOUGH_FORMAT_Q4 ? 8.0f : 0.0f;
    const uint8_t *scales = tile + scales_start(format, k) + group * scales_of_group(format) * HALVES;
    const uint8_t *offsets = has_offsets(format) ? tile + offsets_start(format, k) + group * HALVES : NULL;
    const uint8_t *codes = tile + group * group_bytes(format);
    row_scales rows = load_scales(scales, offsets, shift);
    for (int i = 0; i < 8; i++) {
        if (format == BOUGH_FORMAT_Q8_HALF && i == 4)
            rows = load_scales(scales + HALVES, NULL, shift);
        __m512i line = _mm512_loadu_si512(codes + (has_nibbles(format) ? i % 4 : i) * LINE);
        if (has_nibbles(format))
            line = _mm512_and_si512(i < 4 ? line : _mm512_srli_epi16(line, 4), _mm512_set1_epi8(15));
        else if (is_signed)
            line = _mm512_xor_si512(line, _mm512_set1_epi8((char)128));
        unpack_line(line, rows, out + i * 2 * LINE);
    }
}

/* Sums of 16 tokens by 16 outputs to where they belong. */
static void store_sums(const float sums[16][16], int64_t first, int64_t count, const tile_output *out) {
    __mmask16 rows = (__mmask16)((1u << out->rows) - 1);
    __m512 bias = out->bias ? _mm512_maskz_loadu_ps(rows, out->bias) : _mm512_setzero_ps();
    for (int64_t token = 0; token < count; token++) {
        float *y = out->y + (first + token) * out->stride;
        _mm512_mask_storeu_ps(y, rows, _mm512_add_ps(_mm512_load_ps(sums[token]), bias));
    }
}

/* Registers 0-3: sums of tokens 0-15 and 16-31 by tiles 0 and 1; 4, 5: tokens; 6, 7: weights. */
ALWAYS_INLINE void multiply_group(bool both_tokens, bool both_tiles, int64_t k, const uint8_t *tokens,
                                  const uint8_t *weights) {
    _tile_loadd(4, tokens, LINE);
    _tile_loadd(6, weights, LINE);
    _tile_dpbf16ps(0, 4, 6);
    if (both_tiles) {
        _tile_loadd(7, weights + unpacked_bytes(k) / 2, LINE);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (both_tokens) {
        _tile_loadd(5, tokens + panel_bytes(k, TILE_ROWS), LINE);
        _tile_dpbf16ps(2, 5, 6);
        if (both_tiles)
            _tile_dpbf16ps(3, 5, 7);
    }
}

static void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Multiplies while it unpacks: the products of a group are under way while the next is unpacked, and cost nothing. */
ALWAYS_INLINE void unpack_and_multiply(int format, bool both_tokens, bool both_tiles, const uint8_t *tile,
                                       const uint8_t *next, int64_t k, const uint8_t *tokens, uint8_t *weights) {
    int64_t groups = k / GROUP, size = tile_bytes(format, k);
    clear_sums();
    for (int64_t group = 0; group < groups; group++) {
        fetch_group(format, next, group);
        unpack_group(format, tile, k, group, weights + group * REGISTER_BYTES);
        if (both_tiles) {
            fetch_group(format, next ? next + size : NULL, group);
            unpack_group(format, tile + size, k, group, weights + unpacked_bytes(k) / 2 + group * REGISTER_BYTES);
        }
        __asm__ __volatile__("" ::: "memory"); /* compilers do not know that tiles are loaded from what was unpacked */
        if (group > 0)
            multiply_group(both_tokens, both_tiles, k, tokens + (group - 1) * REGISTER_BYTES,
                           weights + (group - 1) * REGISTER_BYTES);
    }
    multiply_group(both_tokens, both_tiles, k, tokens + (groups - 1) * REGISTER_BYTES,
                   weights + (groups - 1) * REGISTER_BYTES);
}

typedef void (*first_product)(bool both_tokens, bool both_tiles, const uint8_t *tile, const uint8_t *next, int64_t k,
                              const uint8_t *tokens, uint8_t *weights);

#define DEFINE_FIRST_PRODUCT(name, format)                                                                             \
    static void name(bool both_tokens, bool both_tiles, const uint8_t *tile, const uint8_t *next, int64_t k,           \
                     const uint8_t *tokens, uint8_t *weights) {                                                        \
        if (both_tokens && both_tiles)                                                                                 \
            unpack_and_multiply(format, true, true, tile, next, k, tokens, weights);                                   \
        else if (both_tiles)                                                                                           \
            unpack_and_multiply(format, false, true, tile, next, k, tokens, weights);                                  \
        else                                                                                                           \
            unpack_and_multiply(format, true, false, tile, next, k, tokens, weights);                                  \
    }
DEFINE_FIRST_PRODUCT(first_q4, BOUGH_FORMAT_Q4)
DEFINE_FIRST_PRODUCT(first_q4_min, BOUGH_FORMAT_Q4_MIN)
DEFINE_FIRST_PRODUCT(first_q8, BOUGH_FORMAT_Q8)
DEFINE_FIRST_PRODUCT(first_q8_min, BOUGH_FORMAT_Q8_MIN)
DEFINE_FIRST_PRODUCT(first_q8_half, BOUGH_FORMAT_Q8_HALF)
DEFINE_FIRST_PRODUCT(first_f16, BOUGH_FORMAT_F16)
static const first_product FIRST[BOUGH_FORMATS] = {NULL,         first_q4,      first_q4_min, first_q8,
                                                   first_q8_min, first_q8_half, NULL,         first_f16};

/* 32 tokens, or the last 16, with two tiles that are unpacked, or the last. */
static void multiply_unpacked(bool both_tokens, bool both_tiles, int64_t k, const uint8_t *tokens,
                              const uint8_t *weights) {
    clear_sums();
    for (int64_t at = 0; at < k / GROUP * REGISTER_BYTES; at += REGISTER_BYTES) {
        if (both_tokens && both_tiles)
            multiply_group(true, true, k, tokens + at, weights + at);
        else if (both_tiles)
            multiply_group(false, true, k, tokens + at, weights + at);
        else
            multiply_group(true, false, k, tokens + at, weights + at);
    }
}

/* Asks for the lines that results will go to, so that storing need not wait for them. */
static void prefetch_outputs(const tile_output *out, int64_t first, int64_t count) {
    for (int64_t token = first; token < first + count; token++)
        __builtin_prefetch(out->y + token * out->stride, 1);
}

static void product(const bough_weight *weight, int64_t first_tile, int64_t tiles, const uint8_t *next,
                    const void *panel, int64_t count, const tile_output *outs, void *unpacked) {
    int64_t k = weight->k;
    const uint8_t *tile = weight->blob + first_tile * tile_bytes((int)weight->format, k);
    const bool is_unpacked = weight->format == BOUGH_FORMAT_BF16;
    _Alignas(LINE) float sums[4][16][16];
    for (int64_t first = 0; first < count; first += 2 * TILE_ROWS) {
        const uint8_t *tokens = (const uint8_t *)panel + panel_bytes(k, first);
        int64_t left = count - first;
        for (int64_t i = 0; i < tiles; i++)
            prefetch_outputs(&outs[i], first, at_most(left, 2 * TILE_ROWS));
        if (first == 0 && !is_unpacked)
            FIRST[weight->format](left > TILE_ROWS, tiles == 2, tile, next, k, tokens, unpacked);
        else
            multiply_unpacked(left > TILE_ROWS, tiles == 2, k, tokens, is_unpacked ? tile : unpacked);
        _tile_stored(0, sums[0], LINE);
        _tile_stored(1, sums[1], LINE);
        _tile_stored(2, sums[2], LINE);
        _tile_stored(3, sums[3], LINE);
        for (int64_t i = 0; i < tiles; i++) {
            store_sums(sums[i], first, at_most(left, TILE_ROWS), &outs[i]);
            store_sums(sums[2 + i], first + TILE_ROWS, at_most(left - TILE_ROWS, TILE_ROWS), &outs[i]);
        }
    }
}

const linear_wide_kernels *linear_amx(void) {
    static const linear_wide_kernels kernels = {"amx", panel_bytes, unpacked_bytes, convert, begin, end, product};
    return &kernels;
}
#else
const linear_wide_kernels *linear_amx(void) { return NULL; }
#endif
