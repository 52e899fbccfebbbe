/* Products with floats, for the vectors of `vec.h`: included by each variant. Sums go through the inputs in their order, for
 * few tokens and for many, so that they are the same to the last bit.
 */
#include "linear_tile.h"
#include "vec.h"

/* Tokens and tiles whose sums fill the registers: a weight is then loaded once for all tokens, an activation for all rows. */
#if LANES == 16
enum { FEW_TOKENS = 8, MANY_TOKENS = 14, MANY_TILES = 2 };
#else
enum { FEW_TOKENS = 4, MANY_TOKENS = 6, MANY_TILES = 1 };
#endif
enum { VECTORS = TILE_ROWS / LANES, AHEAD = 16 /* inputs whose weights are asked for before they are needed */ };

#define EACH(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); i++)

/* Some rows' weights of an even input, or of the one behind it. A bfloat16 is the upper half of its float32. */
ALWAYS_INLINE vec load_weights(int format, const uint8_t *tile, int64_t even, int odd, int v) {
    if (format == BOUGH_FORMAT_F32)
        return load((const float *)tile + (even + odd) * TILE_ROWS + v * LANES);
    if (format == BOUGH_FORMAT_F16)
        return load_half((const uint16_t *)tile + (even + odd) * TILE_ROWS + v * LANES);
    ivec both;
    memcpy(&both, tile + even / 2 * LINE + v * (int)sizeof both, sizeof both);
    return (vec)(odd ? both & (int32_t)0xFFFF0000 : both << 16);
}

ALWAYS_INLINE void widen_all(int format, const uint8_t *tile, int64_t k, float *wide) {
    for (int64_t i = 0; i < k; i += 2)
        EACH(v, 2 * VECTORS)
            store(wide + i * TILE_ROWS + v * LANES, load_weights(format, tile, i, v / VECTORS, v % VECTORS));
}

static void widen(int format, const uint8_t *tile, int64_t k, float *wide) {
    if (format == BOUGH_FORMAT_F16)
        widen_all(BOUGH_FORMAT_F16, tile, k, wide);
    else
        widen_all(BOUGH_FORMAT_BF16, tile, k, wide);
}

ALWAYS_INLINE void multiply_floats(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                                   const float *tokens, int64_t stride, int64_t first, const tile_output *out) {
    int together = at_once < FEW_TOKENS ? at_once : FEW_TOKENS;
    for (int64_t token = first; token < first + at_once; token += together, next = NULL) {
        const float *x = tokens + token * stride;
        vec sums[FEW_TOKENS][VECTORS] = {0}, weights[VECTORS];
        for (int64_t i = 0; i < k; i += 2) {
            fetch_pair(format, next, i);
            for (int odd = 0; odd < 2 && i + odd < k; odd++) {
                EACH(v, VECTORS)
                    weights[v] = load_weights(format, tile, i, odd, v);
                EACH(t, together)
                    EACH(v, VECTORS)
                        sums[t][v] += weights[v] * x[t * stride + i + odd];
            }
        }
        EACH(t, together) {
            float rows[TILE_ROWS];
            memcpy(rows, sums[t], sizeof rows);
            store_rows(out, token + t, rows);
        }
    }
}

ALWAYS_INLINE void multiply_tiles(int tiles, const float *weights, int64_t apart, int64_t inputs, const float *tokens,
                                  const float *bias, bool begins, float *y, int64_t y_stride) {
    vec sums[MANY_TOKENS][MANY_TILES * VECTORS], of_input[MANY_TILES * VECTORS];
    EACH(t, MANY_TOKENS)
        EACH(v, tiles * VECTORS)
            sums[t][v] = begins ? (vec){0} : load(y + t * y_stride + v * LANES);
    for (int64_t i = 0; i < inputs; i++, weights += TILE_ROWS) {
        EACH(v, tiles * VECTORS)
            of_input[v] = load(weights + v / VECTORS * apart + v % VECTORS * LANES);
        EACH(tile, tiles)
            __builtin_prefetch(weights + tile * apart + AHEAD * TILE_ROWS);
        EACH(t, MANY_TOKENS) {
            vec activation = splat(tokens[t * COPY_STRIDE + i]);
#if LANES == 16
            __asm__("" : "+v"(activation)); /* stays in a register; or else each product would load it anew */
#endif
            EACH(v, tiles * VECTORS)
                sums[t][v] += of_input[v] * activation;
        }
    }
    EACH(t, MANY_TOKENS)
        EACH(v, tiles * VECTORS) {
            if (bias != NULL)
                sums[t][v] += load(bias + v * LANES);
            store(y + t * y_stride + v * LANES, sums[t][v]);
        }
}

static void multiply_many(int tiles, const float *weights, int64_t apart, int64_t inputs, const float *tokens,
                          const float *bias, bool begins, float *y, int64_t y_stride) {
    if (tiles == MANY_TILES)
        multiply_tiles(MANY_TILES, weights, apart, inputs, tokens, bias, begins, y, y_stride);
    else
        multiply_tiles(1, weights, apart, inputs, tokens, bias, begins, y, y_stride);
}
