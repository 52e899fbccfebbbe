/* The product in plain C: for CPUs without a variant of their own, and the one that the others are compared with. */
#include "linear_tile.h"

#include <math.h>

static void quantize(const float *x, int64_t k, void *token) {
    token_view view = view_token(token, 0, k);
    int8_t *codes = (int8_t *)view.codes;
    for (int64_t group = 0; group < k / GROUP; group++) {
        const float *in = x + group * GROUP;
        float largest = 0.0f;
        for (int i = 0; i < GROUP; i++)
            largest = fmaxf(largest, fabsf(in[i]));
        float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            int32_t code = (int32_t)rintf(in[i] * inverse);
            codes[group * GROUP + i] = (int8_t)code;
            sums[i / 16] += code;
        }
        ((float *)view.scales)[group] = scale;
        ((float *)view.offsets)[group] = scale * (float)(sums[0] + sums[1]);
        ((int32_t *)view.negated_sums)[group] = -(sums[0] + sums[1]);
        ((int32_t *)view.negated_half_sums)[2 * group] = -sums[0];
        ((int32_t *)view.negated_half_sums)[2 * group + 1] = -sums[1];
    }
}

/* The code of a row's input in a group. */
static inline int32_t code_at(int format, const uint8_t *group, int row, int input) {
    int in_line = input / 4 * LINE + row * 4 + input % 4;
    if (!has_nibbles(format))
        return (int8_t)group[in_line];
    return input < 16 ? group[in_line] & 15 : group[in_line - 4 * LINE] >> 4;
}

static inline void multiply(int format, const uint8_t *tile, int64_t k, const void *tokens, int64_t count,
                            const tile_output *out) {
    const uint16_t *scales = (const uint16_t *)(tile + scales_start(format, k));
    const uint16_t *offsets = (const uint16_t *)(tile + offsets_start(format, k));
    int parts = scales_of_group(format), part_size = GROUP / parts;
    for (int64_t t = 0; t < count; t++) {
        token_view token = view_token(tokens, t, k);
        float sums[TILE_ROWS] = {0};
        for (int64_t group = 0; group < k / GROUP; group++) {
            const uint8_t *codes = tile + group * group_bytes(format);
            for (int row = 0; row < TILE_ROWS; row++) {
                for (int part = 0; part < parts; part++) {
                    int32_t dot = format == BOUGH_FORMAT_Q4 ? 8 * token.negated_sums[group] : 0;
                    for (int i = part * part_size; i < (part + 1) * part_size; i++)
                        dot += code_at(format, codes, row, i) * token.codes[group * GROUP + i];
                    float scale = half_to_float(scales[(group * parts + part) * TILE_ROWS + row]);
                    sums[row] += (float)dot * (scale * token.scales[group]);
                }
                if (has_offsets(format))
                    sums[row] += half_to_float(offsets[group * TILE_ROWS + row]) * token.offsets[group];
            }
        }
        store_rows(out, t, sums);
    }
}

static void multiply_floats(const uint8_t *tile, int64_t k, const void *tokens, int64_t stride, int64_t count,
                            const tile_output *out) {
    const float *weights = (const float *)tile;
    for (int64_t t = 0; t < count; t++) {
        const float *x = (const float *)tokens + t * stride;
        float sums[TILE_ROWS] = {0};
        for (int64_t i = 0; i < k; i++)
            for (int row = 0; row < TILE_ROWS; row++)
                sums[row] += weights[i * TILE_ROWS + row] * x[i];
        store_rows(out, t, sums);
    }
}

#define PRODUCT(name, format)                                                                                          \
    static void name(const uint8_t *tile, int64_t k, const void *tokens, int64_t stride, int64_t count,                \
                     const tile_output *out) {                                                                         \
        multiply(format, tile, k, tokens, count, out);                                                                 \
    }
PRODUCT(multiply_q4, BOUGH_FORMAT_Q4)
PRODUCT(multiply_q4_min, BOUGH_FORMAT_Q4_MIN)
PRODUCT(multiply_q8, BOUGH_FORMAT_Q8)
PRODUCT(multiply_q8_min, BOUGH_FORMAT_Q8_MIN)
PRODUCT(multiply_q8_half, BOUGH_FORMAT_Q8_HALF)

const linear_kernels *linear_plain(void) {
    static const linear_kernels kernels = {
        "plain", quantize, {multiply_floats, multiply_q4, multiply_q4_min, multiply_q8, multiply_q8_min, multiply_q8_half}};
    return &kernels;
}
