/* What the variants of the product share: the layout of a tile, of quantised tokens, and the way results are stored.
 *
 * A tile is 16 rows of a weight, padded with zeros at the weight's end. Quantised, it holds first the codes of group
 * after group of 32 inputs, then all scales, then all offsets, 16 numbers (one for each row) at a time:
 *
 *   8 bits: 512 bytes a group: for inputs 0-3, 4-7, … 28-31: row 0's four codes, row 1's, … row 15's.
 *   4 bits: 256 bytes a group: the low halves of its bytes are inputs 0-15, laid out like that, the high halves 16-31.
 *
 * So one 64-byte line (one AVX-512 register, two of AVX2, four of NEON) times four broadcast activations adds to the
 * sums of 16 rows without any shuffling. As float32 and float16 a tile holds for every input the 16 rows' weights, as
 * bfloat16 for every two inputs: row 0's two weights, row 1's, … row 15's, which is how matrix instructions take them.
 */
#ifndef BOUGH_LINEAR_TILE_H
#define BOUGH_LINEAR_TILE_H

#include "linear.h"
#include "numbers.h"

#include <string.h>

#if defined(__GNUC__)
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

enum { TILE_ROWS = 16, GROUP = 32, LINE = 64 };

/* Floats of many tokens are multiplied a block of inputs after the other: of some tokens it is copied so that these do
 * not compete for the same lines of the cache, and of the tiles of a run it stays in a core's own cache. */
enum { BLOCK_INPUTS = 384, COPY_STRIDE = BLOCK_INPUTS + TILE_ROWS, RUN_TILES = 24, MAX_MANY_TOKENS = 14 };

static inline bool has_offsets(int format) { return format == BOUGH_FORMAT_Q4_MIN || format == BOUGH_FORMAT_Q8_MIN; }

/* Whether activations are multiplied as they are, not quantised. */
static inline bool takes_floats(int format) {
    return format == BOUGH_FORMAT_F32 || format == BOUGH_FORMAT_BF16 || format == BOUGH_FORMAT_F16;
}

static inline bool is_narrow_float(int format) { return takes_floats(format) && format != BOUGH_FORMAT_F32; }

static inline bool has_nibbles(int format) { return format == BOUGH_FORMAT_Q4 || format == BOUGH_FORMAT_Q4_MIN; }

static inline int scales_of_group(int format) { return format == BOUGH_FORMAT_Q8_HALF ? 2 : 1; }

static inline int64_t group_bytes(int format) { return TILE_ROWS * (has_nibbles(format) ? GROUP / 2 : GROUP); }

static inline int64_t scales_start(int format, int64_t k) { return k / GROUP * group_bytes(format); }

static inline int64_t offsets_start(int format, int64_t k) {
    return scales_start(format, k) + k / GROUP * scales_of_group(format) * TILE_ROWS * (int64_t)sizeof(uint16_t);
}

static inline int64_t tile_bytes(int format, int64_t k) {
    if (format == BOUGH_FORMAT_F32)
        return k * TILE_ROWS * (int64_t)sizeof(float);
    if (takes_floats(format))
        return k * TILE_ROWS * (int64_t)sizeof(uint16_t);
    int64_t offsets = has_offsets(format) ? k / GROUP * TILE_ROWS * (int64_t)sizeof(uint16_t) : 0;
    return (offsets_start(format, k) + offsets + LINE - 1) / LINE * LINE;
}

/* Asks for a tile's lines before they are needed: those that are its share for one of its groups. A product with few
 * tokens takes no longer than its weights take to arrive, and they do not arrive at full speed unasked: a tile's scales
 * and offsets are streams of their own, and hardware prefetch stops at page boundaries. */
ALWAYS_INLINE void fetch_group(int format, const uint8_t *tile, int64_t group) {
    int halves = scales_of_group(format) + (has_offsets(format) ? 1 : 0);
    int64_t share = group_bytes(format) + halves * TILE_ROWS * (int64_t)sizeof(uint16_t);
    if (takes_floats(format))
        share = tile_bytes(format, GROUP);
    for (int64_t at = 0; tile != NULL && at < share; at += LINE)
        __builtin_prefetch(tile + group * share + at);
}

/* The same for two inputs of a tile of floats. */
ALWAYS_INLINE void fetch_pair(int format, const uint8_t *tile, int64_t input) {
    int64_t share = (format == BOUGH_FORMAT_F32 ? 2 : 1) * LINE;
    for (int64_t at = 0; tile != NULL && at < share; at += LINE)
        __builtin_prefetch(tile + input / 2 * share + at);
}

/* 32 activations of a token: one line of the cache, at which a single pointer suffices. */
typedef struct {
    int8_t codes[GROUP]; /* -127 to 127 */
    float scale;
    float offset;                 /* scale * sum of the codes: for weights with offsets */
    int32_t negated_sum;          /* minus that sum: for weights whose codes are shifted by a constant */
    int32_t negated_half_sums[2]; /* the same for either half */
    int32_t padding[3];
} token_group;

/* Fills in what stands beside the codes, given the sums of those of either half. */
ALWAYS_INLINE void describe_codes(token_group *token, float largest, int32_t first_sum, int32_t second_sum) {
    token->scale = largest / 127.0f;
    token->offset = token->scale * (float)(first_sum + second_sum);
    token->negated_sum = -(first_sum + second_sum);
    token->negated_half_sums[0] = -first_sum;
    token->negated_half_sums[1] = -second_sum;
}

/* One line more than the groups need, so that tokens do not all compete for the same lines of the cache. */
static inline int64_t token_bytes(int64_t k) { return (k / GROUP + 1) * (int64_t)sizeof(token_group); }

static inline const token_group *token_at(const void *tokens, int64_t token, int64_t k) {
    return (const token_group *)((const uint8_t *)tokens + token * token_bytes(k));
}

/* Where a tile's results go. */
typedef struct {
    float *y; /* the first token's first row of the tile */
    int64_t stride;
    const float *bias; /* of the tile's rows, or NULL */
    int rows;          /* that exist: 16, or fewer at the end of the weight */
} tile_output;

static inline void store_rows(const tile_output *out, int64_t token, const float sums[TILE_ROWS]) {
    float *y = out->y + token * out->stride;
    if (out->rows == TILE_ROWS && out->bias == NULL) {
        memcpy(y, sums, TILE_ROWS * sizeof(float));
        return;
    }
    for (int row = 0; row < out->rows; row++)
        y[row] = sums[row] + (out->bias ? out->bias[row] : 0.0f);
}

/* Multiplies tokens with one tile. `tokens` are quantised tokens, or floats with a stride for a weight of floats. `next`
 * is the tile that this thread is going to need after this one, or NULL. */
typedef void (*tile_product)(const uint8_t *tile, const uint8_t *next, int64_t k, const void *tokens, int64_t stride,
                             int64_t count, const tile_output *out);

/* Quantises one token, of whose k inputs every 32 are a group. A group with NaN or infinity in it has such a scale, so
 * that no product hides them. */
typedef void (*token_quantizer)(const float *x, int64_t k, token_group *token);

/* Multiplies a block of inputs of `many_tokens` copied tokens with up to `many_tiles` of float32 that are so far apart.
 * `bias` is NULL where there is none and before the last block; all but the block that begins add to `y`. */
typedef void (*many_product)(int tiles, const float *weights, int64_t apart, int64_t inputs, const float *tokens,
                             const float *bias, bool begins, float *y, int64_t y_stride);

/* Makes a tile of float32 of one of 16-bit floats. */
typedef void (*tile_widener)(int format, const uint8_t *tile, int64_t k, float *wide);

typedef struct linear_kernels {
    const char *name;
    token_quantizer quantize;
    tile_widener widen;
    tile_product product[BOUGH_FORMATS];
    int many_tokens, many_tiles;
    many_product many;
} linear_kernels;

/* The functions of a variant that has `quantize` and `multiply(format, tokens at once, …)`, always inlined: one for each
 * format, which takes eight tokens at a time, then four, two and one. */
#define DEFINE_PRODUCT(name, format)                                                                                   \
    static void name(const uint8_t *tile, const uint8_t *next, int64_t k, const void *tokens, int64_t stride,          \
                     int64_t count, const tile_output *out) {                                                          \
        int64_t token = 0;                                                                                             \
        for (; token + 8 <= count; token += 8, next = NULL)                                                            \
            multiply(format, 8, tile, next, k, tokens, stride, token, out);                                            \
        if (count & 4) {                                                                                               \
            multiply(format, 4, tile, next, k, tokens, stride, token, out);                                            \
            token += 4, next = NULL;                                                                                   \
        }                                                                                                              \
        if (count & 2) {                                                                                               \
            multiply(format, 2, tile, next, k, tokens, stride, token, out);                                            \
            token += 2, next = NULL;                                                                                   \
        }                                                                                                              \
        if (count & 1)                                                                                                 \
            multiply(format, 1, tile, next, k, tokens, stride, token, out);                                            \
    }

#define DEFINE_KERNELS(variant)                                                                                        \
    DEFINE_PRODUCT(multiply_f32, BOUGH_FORMAT_F32)                                                                     \
    DEFINE_PRODUCT(multiply_q4, BOUGH_FORMAT_Q4)                                                                       \
    DEFINE_PRODUCT(multiply_q4_min, BOUGH_FORMAT_Q4_MIN)                                                               \
    DEFINE_PRODUCT(multiply_q8, BOUGH_FORMAT_Q8)                                                                       \
    DEFINE_PRODUCT(multiply_q8_min, BOUGH_FORMAT_Q8_MIN)                                                               \
    DEFINE_PRODUCT(multiply_q8_half, BOUGH_FORMAT_Q8_HALF)                                                             \
    DEFINE_PRODUCT(multiply_bf16, BOUGH_FORMAT_BF16)                                                                   \
    DEFINE_PRODUCT(multiply_f16, BOUGH_FORMAT_F16)                                                                     \
    static const linear_kernels kernels = {#variant,                                                                   \
                                           quantize,                                                                   \
                                           widen,                                                                      \
                                           {multiply_f32, multiply_q4, multiply_q4_min, multiply_q8, multiply_q8_min,  \
                                            multiply_q8_half, multiply_bf16, multiply_f16},                            \
                                           MANY_TOKENS, MANY_TILES, multiply_many};                                    \
    const linear_kernels *linear_##variant(void) { return &kernels; }

/* The same for many tokens at a time, by matrix instructions: two tiles of weights are unpacked once into `unpacked`
 * and multiplied with all tokens of a panel. */
typedef struct linear_wide_kernels {
    const char *name;
    int64_t (*panel_bytes)(int64_t k, int64_t tokens);
    int64_t (*unpacked_bytes)(int64_t k);
    /* Converts tokens (at most 16, from a multiple of 16 on) of a panel. */
    void (*convert)(const float *x, int64_t x_stride, int64_t k, int64_t first, int64_t count, void *panel);
    void (*begin)(void); /* on every thread, before products and after */
    void (*end)(void);
    void (*product)(const bough_weight *weight, int64_t first_tile, int64_t tiles, const uint8_t *next,
                    const void *panel, int64_t count, const tile_output *outs, void *unpacked);
} linear_wide_kernels;

/* Each variant's functions; NULL where it was not compiled. */
const linear_kernels *linear_plain(void);
const linear_kernels *linear_avx2(void);
const linear_kernels *linear_avxvnni(void);
const linear_kernels *linear_avx512(void);
const linear_kernels *linear_neon(void);
const linear_wide_kernels *linear_amx(void);

static inline float bfloat_to_float(uint16_t bfloat) {
    uint32_t bits = (uint32_t)bfloat << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
