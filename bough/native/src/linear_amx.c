/* Products of many tokens with AMX: tiles of bfloat16, summed in float32 over all inputs.
 *
 * Tiles of bytes would be exact, but their sums would have to leave the tiles after every group of 32 inputs to be scaled,
 * which takes longer than the products. So two tiles of weights at a time are unpacked into bfloat16, scales included, and
 * multiplied with all tokens of a panel. Activations are rounded to bfloat16 too, a smaller error than that of 8 bits.
 *
 * A tile register has 16 rows of 64 bytes. Of activations: 16 tokens by 32 inputs. Of weights: 16 pairs of inputs by 16
 * outputs. Four registers hold the sums of 32 tokens by 32 outputs.
 */
#include "linear_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#include <immintrin.h>

enum { REGISTER_BYTES = 16 * LINE, PAIRS = GROUP / 2, UNPACKED_GROUP = PAIRS * LINE, MANY = 12 };

static int64_t panel_bytes(int64_t k, int64_t tokens) {
    return (tokens + TILE_ROWS - 1) / TILE_ROWS * (k / GROUP) * REGISTER_BYTES;
}

static int64_t unpacked_bytes(int64_t k) { return 2 * (k / GROUP) * UNPACKED_GROUP; }

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
    /* All eight registers in use: 16 rows of 64 bytes. Constant, so that it is in memory whatever the compiler thinks that
     * the instruction reads. */
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shapes);
}

static void end(void) { _tile_release(); }

/* Which bytes of a line (four inputs of 16 rows) become the floats of eight rows' inputs `pair` * 2 and + 1, each as the
 * second lowest byte: 2^15 + byte, where the rest of the float is that of 2^15. */
static __m512i spread(int pair, int rows) {
    uint8_t at[LINE] = {0};
    for (int i = 0; i < 16; i++)
        at[4 * i + 1] = (uint8_t)((rows * 8 + i / 2) * 4 + pair * 2 + i % 2);
    return _mm512_loadu_si512(at);
}

/* Numbers of 8 of 16 rows, each twice. */
static __m512 twice(__m512 numbers, int rows) {
    __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8 * rows)), numbers);
}

typedef struct {
    __m512 scale[2], base[2]; /* of rows 0-7 and 8-15, each twice: value = scale * (2^15 + byte) + base */
} row_scales;

/* `shift` is what the codes are above their true value. */
ALWAYS_INLINE row_scales load_scales(const uint8_t *scales, const uint8_t *offsets, float shift) {
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
    __m512 offset = offsets ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)offsets)) : _mm512_setzero_ps();
    __m512 base = _mm512_fnmadd_ps(scale, _mm512_set1_ps(32768.0f + shift), offset);
    return (row_scales){{twice(scale, 0), twice(scale, 1)}, {twice(base, 0), twice(base, 1)}};
}

/* Four inputs of 16 rows to two lines of a weight register. */
ALWAYS_INLINE void unpack_line(__m512i line, const __m512i spreads[4], const row_scales *rows, uint8_t *out) {
    const __mmask64 second_bytes = 0x2222222222222222;
    const __m512i power = _mm512_set1_epi32(0x47000000);
    for (int pair = 0; pair < 2; pair++) {
        __m512 values[2];
        for (int half = 0; half < 2; half++) {
            __m512i bits = _mm512_mask_permutexvar_epi8(power, second_bytes, spreads[pair * 2 + half], line);
            values[half] = _mm512_fmadd_ps(_mm512_castsi512_ps(bits), rows->scale[half], rows->base[half]);
        }
        _mm512_store_si512((void *)(out + pair * LINE), (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
    }
}

ALWAYS_INLINE void unpack_as(int format, const uint8_t *tile, int64_t k, uint8_t *out) {
    enum { HALVES = TILE_ROWS * 2 };
    const uint8_t *scales = tile + scales_start(format, k), *offsets = tile + offsets_start(format, k);
    const __m512i spreads[4] = {spread(0, 0), spread(0, 1), spread(1, 0), spread(1, 1)};
    const __m512i mask = _mm512_set1_epi8(15);
    const bool is_signed = format == BOUGH_FORMAT_Q8 || format == BOUGH_FORMAT_Q8_HALF;
    const __m512i flip = _mm512_set1_epi8(is_signed ? (char)128 : 0);
    const float shift = is_signed ? 128.0f : format == BOUGH_FORMAT_Q4 ? 8.0f : 0.0f;
    for (int64_t group = 0; group < k / GROUP; group++, tile += group_bytes(format), out += UNPACKED_GROUP) {
        const uint8_t *offset = has_offsets(format) ? offsets + group * HALVES : NULL;
        row_scales rows = load_scales(scales + group * scales_of_group(format) * HALVES, offset, shift);
        for (int i = 0; i < 8; i++) {
            if (format == BOUGH_FORMAT_Q8_HALF && i == 4)
                rows = load_scales(scales + (2 * group + 1) * HALVES, NULL, shift);
            __m512i line = _mm512_loadu_si512(tile + (has_nibbles(format) ? i % 4 : i) * LINE);
            if (has_nibbles(format))
                line = _mm512_and_si512(i < 4 ? line : _mm512_srli_epi16(line, 4), mask);
            unpack_line(_mm512_xor_si512(line, flip), spreads, &rows, out + i * 2 * LINE);
        }
    }
}

static void unpack(int format, const uint8_t *tile, int64_t k, uint8_t *out) {
    switch (format) {
    case BOUGH_FORMAT_Q4: unpack_as(BOUGH_FORMAT_Q4, tile, k, out); return;
    case BOUGH_FORMAT_Q4_MIN: unpack_as(BOUGH_FORMAT_Q4_MIN, tile, k, out); return;
    case BOUGH_FORMAT_Q8: unpack_as(BOUGH_FORMAT_Q8, tile, k, out); return;
    case BOUGH_FORMAT_Q8_MIN: unpack_as(BOUGH_FORMAT_Q8_MIN, tile, k, out); return;
    default: unpack_as(BOUGH_FORMAT_Q8_HALF, tile, k, out); return;
    }
}

/* Sums of 16 tokens by 16 outputs to where they belong. */
static void store_sums(const float sums[16][16], int64_t first, int64_t count, const tile_output *out) {
    __mmask16 rows = (__mmask16)((1u << out->rows) - 1);
    __m512 bias = out->bias ? _mm512_maskz_loadu_ps(rows, out->bias) : _mm512_setzero_ps();
    for (int64_t token = 0; token < count; token++) {
        float *y = out->y + (first + token) * out->stride;
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums[token]), bias);
        if (out->accumulate)
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(rows, y));
        _mm512_mask_storeu_ps(y, rows, sum);
    }
}

/* Registers 0-3: sums of tokens 0-15 and 16-31 by tiles 0 and 1; 4, 5: tokens; 6, 7: weights. */
ALWAYS_INLINE void multiply_block(bool both_tokens, bool both_tiles, int64_t k, const uint8_t *tokens,
                                  const uint8_t *weights, float sums[4][16][16]) {
    const uint8_t *more_tokens = tokens + panel_bytes(k, TILE_ROWS), *more_weights = weights + unpacked_bytes(k) / 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < k / GROUP * REGISTER_BYTES; at += REGISTER_BYTES) {
        _tile_loadd(4, tokens + at, LINE);
        _tile_loadd(6, weights + at, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if (both_tiles) {
            _tile_loadd(7, more_weights + at, LINE);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (both_tokens) {
            _tile_loadd(5, more_tokens + at, LINE);
            _tile_dpbf16ps(2, 5, 6);
            if (both_tiles)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
}

static void product(const bough_weight *weight, int64_t first_tile, int64_t tiles, const void *panel, int64_t count,
                    const tile_output *outs, void *unpacked) {
    int64_t k = weight->k, size = tile_bytes((int)weight->format, k);
    for (int64_t tile = 0; tile < tiles; tile++)
        unpack((int)weight->format, weight->blob + (first_tile + tile) * size, k,
               (uint8_t *)unpacked + tile * unpacked_bytes(k) / 2);
    __asm__ __volatile__("" ::: "memory"); /* compilers do not know that tiles are loaded from what was unpacked */
    _Alignas(LINE) float sums[4][16][16];
    for (int64_t first = 0; first < count; first += 2 * TILE_ROWS) {
        const uint8_t *tokens = (const uint8_t *)panel + panel_bytes(k, first);
        int64_t left = count - first;
        if (left > TILE_ROWS && tiles == 2)
            multiply_block(true, true, k, tokens, unpacked, sums);
        else if (left > TILE_ROWS)
            multiply_block(true, false, k, tokens, unpacked, sums);
        else
            multiply_block(false, tiles == 2, k, tokens, unpacked, sums);
        for (int64_t tile = 0; tile < tiles; tile++) {
            store_sums(sums[tile], first, left < TILE_ROWS ? left : TILE_ROWS, &outs[tile]);
            if (left > TILE_ROWS)
                store_sums(sums[2 + tile], first + TILE_ROWS, left < 2 * TILE_ROWS ? left - TILE_ROWS : TILE_ROWS,
                           &outs[tile]);
        }
    }
}

const linear_wide_kernels *linear_amx(void) {
    static const linear_wide_kernels kernels = {"amx", MANY, panel_bytes, unpacked_bytes, convert, begin, end, product};
    return &kernels;
}
#else
const linear_wide_kernels *linear_amx(void) { return NULL; }
#endif
