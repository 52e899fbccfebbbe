/* The product in plain C: for CPUs without a variant of their own, and the one that the others are compared with. */
#include "linear_floats.h"

#include <math.h>

static void quantize(const float *x, int64_t k, token_group *token) {
    for (int64_t group = 0; group < k / GROUP; group++, x += GROUP, token++) {
        float largest = 0.0f; /* or NaN, if one is */
        for (int i = 0; i < GROUP; i++)
            largest = fabsf(x[i]) > largest || x[i] != x[i] ? fabsf(x[i]) : largest;
        float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < GROUP; i++) {
            float rounded = rintf(x[i] * inverse);
            int32_t code = rounded == rounded ? (int32_t)rounded : 0;
            token->codes[i] = (int8_t)code;
            sums[i / 16] += code;
        }
        describe_codes(token, largest, sums[0], sums[1]);
    }
}

/* The code of a row's input in a group. */
static inline int32_t code_at(int format, const uint8_t *group, int row, int input) {
    int in_line = input / 4 * LINE + row * 4 + input % 4;
    if (!has_nibbles(format))
        return (int8_t)group[in_line];
    return input < 16 ? group[in_line] & 15 : group[in_line - 4 * LINE] >> 4;
}

static void multiply_token(int format, const uint8_t *tile, int64_t k, const token_group *token,
                           float sums[TILE_ROWS]) {
    const uint16_t *scales = (const uint16_t *)(tile + scales_start(format, k));
    const uint16_t *offsets = (const uint16_t *)(tile + offsets_start(format, k));
    int parts = scales_of_group(format), part_size = GROUP / parts;
    for (int64_t group = 0; group < k / GROUP; group++, token++, tile += group_bytes(format)) {
        for (int row = 0; row < TILE_ROWS; row++) {
            for (int part = 0; part < parts; part++) {
                int32_t dot = format == BOUGH_FORMAT_Q4 ? 8 * token->negated_sum : 0;
                for (int i = part * part_size; i < (part + 1) * part_size; i++)
                    dot += code_at(format, tile, row, i) * token->codes[i];
                float scale = half_to_float(scales[(group * parts + part) * TILE_ROWS + row]);
                sums[row] += (float)dot * (scale * token->scale);
            }
            if (has_offsets(format))
                sums[row] += half_to_float(offsets[group * TILE_ROWS + row]) * token->offset;
        }
    }
}

ALWAYS_INLINE void multiply(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                            const void *tokens, int64_t stride, int64_t first, const tile_output *out) {
    if (takes_floats(format))
        multiply_floats(format, at_once, tile, next, k, tokens, stride, first, out);
    for (int64_t token = first; !takes_floats(format) && token < first + at_once; token++) {
        float sums[TILE_ROWS] = {0};
        multiply_token(format, tile, k, token_at(tokens, token, k), sums);
        store_rows(out, token, sums);
    }
}

DEFINE_KERNELS(plain)
