/* The product of floats with many tokens, in the vectors of the variant that includes this: it has `lanes` (LANES of
 * them), MANY_TOKENS, MANY_TILES, `load_lanes`, `store_lanes`, `spread` and `multiply_add`. Nearly all registers are
 * sums, so that a weight is loaded once for all tokens, and an activation once for all rows. A sum goes through the inputs
 * in their order, as with few tokens: it is the same to the last bit.
 */
#define EACH(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); i++)

enum { VECTORS = TILE_ROWS / LANES, AHEAD = 16 /* inputs whose weights are asked for before they are needed */ };

ALWAYS_INLINE void multiply_tiles(int tiles, const float *weights, int64_t apart, int64_t inputs, const float *tokens,
                                  const float *bias, bool begins, float *y, int64_t y_stride) {
    lanes sums[MANY_TOKENS][MANY_TILES * VECTORS], of_input[MANY_TILES * VECTORS];
    EACH(t, MANY_TOKENS)
        EACH(v, tiles * VECTORS)
            sums[t][v] = begins ? spread(0.0f) : load_lanes(y + t * y_stride + v * LANES);
    for (int64_t i = 0; i < inputs; i++, weights += TILE_ROWS) {
        EACH(v, tiles * VECTORS)
            of_input[v] = load_lanes(weights + v / VECTORS * apart + v % VECTORS * LANES);
        EACH(tile, tiles)
            __builtin_prefetch(weights + tile * apart + AHEAD * TILE_ROWS);
        EACH(t, MANY_TOKENS) {
            lanes activation = spread(tokens[t * COPY_STRIDE + i]);
            EACH(v, tiles * VECTORS)
                sums[t][v] = multiply_add(of_input[v], activation, sums[t][v]);
        }
    }
    EACH(t, MANY_TOKENS)
        EACH(v, tiles * VECTORS) {
            if (bias != NULL)
                sums[t][v] += load_lanes(bias + v * LANES);
            store_lanes(y + t * y_stride + v * LANES, sums[t][v]);
        }
}

static void multiply_tile(const float *weights, int64_t apart, int64_t inputs, const float *tokens, const float *bias,
                          bool begins, float *y, int64_t y_stride) {
    multiply_tiles(1, weights, apart, inputs, tokens, bias, begins, y, y_stride);
}

#if MANY_TILES == 2
static void multiply_two_tiles(const float *weights, int64_t apart, int64_t inputs, const float *tokens,
                               const float *bias, bool begins, float *y, int64_t y_stride) {
    multiply_tiles(2, weights, apart, inputs, tokens, bias, begins, y, y_stride);
}
#else
#define multiply_two_tiles NULL
#endif
