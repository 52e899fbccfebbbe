/* The product with NEON's dot products of bytes (ARMv8.2): one register is four inputs of four rows.
 *
 * A lane of the activations' register, four inputs, multiplies four rows at once. The tile's 16 rows are worked through
 * four at a time for several tokens, so that a group's unpacked codes (eight registers) and all sums stay in registers;
 * for a single token all 16 rows go together, so that the weights are read in order.
 */
#include "linear_tile.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include "linear_floats.h"

#include <arm_neon.h>

enum { QUADS = GROUP / 4, QUARTER = 16 /* bytes of a line that belong to four rows */ };

static void quantize(const float *x, int64_t k, token_group *token) {
    for (int64_t group = 0; group < k / GROUP; group++, x += GROUP, token++) {
        float32x4_t values[8];
        float32x4_t largest_of = vdupq_n_f32(0.0f);
        for (int i = 0; i < 8; i++) {
            values[i] = vld1q_f32(x + 4 * i);
            largest_of = vmaxq_f32(largest_of, vabsq_f32(values[i])); /* NaN, if one is */
        }
        float largest = vmaxvq_f32(largest_of), inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int32_t sums[2];
        for (int half = 0; half < 2; half++) {
            int32x4_t codes[4];
            for (int i = 0; i < 4; i++)
                codes[i] = vcvtnq_s32_f32(vmulq_n_f32(values[half * 4 + i], inverse));
            int16x8_t low = vcombine_s16(vmovn_s32(codes[0]), vmovn_s32(codes[1]));
            int16x8_t high = vcombine_s16(vmovn_s32(codes[2]), vmovn_s32(codes[3]));
            sums[half] = vaddvq_s16(vaddq_s16(low, high));
            vst1q_s8(token->codes + 16 * half, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
        describe_codes(token, largest, sums[0], sums[1]);
    }
}

/* Four rows' codes of a group. Symmetric 4-bit ones are left multiplied by 16, which the conversion of their sums to
 * floats takes back. */
ALWAYS_INLINE void load_codes(int format, const uint8_t *group, int8x16_t codes[QUADS]) {
    for (int i = 0; i < QUADS; i++) {
        if (!has_nibbles(format)) {
            codes[i] = vld1q_s8((const int8_t *)group + i * LINE);
            continue;
        }
        if (i >= QUADS / 2)
            continue;
        uint8x16_t both = vld1q_u8(group + i * LINE);
        if (format == BOUGH_FORMAT_Q4) {
            both = veorq_u8(both, vdupq_n_u8(0x88)); /* unsigned with 8 for zero, to signed */
            codes[i] = vreinterpretq_s8_u8(vshlq_n_u8(both, 4));
            codes[i + QUADS / 2] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(0xF0)));
        } else {
            codes[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            codes[i + QUADS / 2] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    }
}

ALWAYS_INLINE int32x4_t dot_half(int32x4_t sums, const int8x16_t codes[4], int8x16_t activations) {
    sums = vdotq_laneq_s32(sums, codes[0], activations, 0);
    sums = vdotq_laneq_s32(sums, codes[1], activations, 1);
    sums = vdotq_laneq_s32(sums, codes[2], activations, 2);
    return vdotq_laneq_s32(sums, codes[3], activations, 3);
}

ALWAYS_INLINE float32x4_t to_floats(int format, int32x4_t dots) {
    return format == BOUGH_FORMAT_Q4 ? vcvtq_n_f32_s32(dots, 4) : vcvtq_f32_s32(dots);
}

ALWAYS_INLINE float32x4_t load_halves(const uint8_t *at) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)at)));
}

/* What one group of four rows adds to a token's sums. */
ALWAYS_INLINE float32x4_t add_group(int format, float32x4_t sums, const int8x16_t codes[QUADS], float32x4_t scale,
                                    float32x4_t second, float32x4_t offset, const token_group *x) {
    int8x16_t low = vld1q_s8(x->codes), high = vld1q_s8(x->codes + 16);
    float32x2_t factors = vld1_f32(&x->scale); /* the scale, and the offset behind it */
    int32x4_t dots = dot_half(vdupq_n_s32(0), codes, low);
    if (format == BOUGH_FORMAT_Q8_HALF) {
        float32x4_t scaled = vmulq_f32(to_floats(format, dots), scale);
        scaled = vfmaq_f32(scaled, to_floats(format, dot_half(vdupq_n_s32(0), codes + 4, high)), second);
        return vfmaq_lane_f32(sums, scaled, factors, 0);
    }
    dots = dot_half(dots, codes + 4, high);
    sums = vfmaq_f32(sums, to_floats(format, dots), vmulq_lane_f32(scale, factors, 0));
    return has_offsets(format) ? vfmaq_lane_f32(sums, offset, factors, 1) : sums;
}

enum { HALVES = TILE_ROWS * 2 };

ALWAYS_INLINE void multiply_group(int format, int at_once, const uint8_t *tile, const uint8_t *scales,
                                  const uint8_t *offsets, int64_t group, int rows, const uint8_t *token, int64_t size,
                                  float32x4_t sums[]) {
    int8x16_t codes[QUADS];
    load_codes(format, tile + group * group_bytes(format) + rows * QUARTER, codes);
    const uint8_t *of_group = scales + group * scales_of_group(format) * HALVES + rows * 8;
    float32x4_t scale = load_halves(of_group);
    float32x4_t second = format == BOUGH_FORMAT_Q8_HALF ? load_halves(of_group + HALVES) : scale;
    float32x4_t offset = has_offsets(format) ? load_halves(offsets + group * HALVES + rows * 8) : scale;
    for (int t = 0; t < at_once; t++) {
        const token_group *x = (const token_group *)(token + t * size) + group;
        sums[t] = add_group(format, sums[t], codes, scale, second, offset, x);
    }
}

ALWAYS_INLINE void multiply_groups(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                                   const void *tokens, int64_t first, float results[][TILE_ROWS]) {
    const uint8_t *scales = tile + scales_start(format, k), *offsets = tile + offsets_start(format, k);
    const uint8_t *token = (const uint8_t *)token_at(tokens, first, k);
    int64_t size = token_bytes(k), groups = k / GROUP;
    if (at_once == 1) {
        float32x4_t sums[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
        for (int64_t group = 0; group < groups; group++) {
            fetch_group(format, next, group);
            for (int rows = 0; rows < 4; rows++)
                multiply_group(format, 1, tile, scales, offsets, group, rows, token, size, &sums[rows]);
        }
        for (int rows = 0; rows < 4; rows++)
            vst1q_f32(results[0] + 4 * rows, sums[rows]);
        return;
    }
    for (int rows = 0; rows < 4; rows++) {
        float32x4_t sums[8];
        for (int t = 0; t < at_once; t++)
            sums[t] = vdupq_n_f32(0.0f);
        for (int64_t group = 0; group < groups; group++) {
            fetch_group(format, rows == 0 ? next : NULL, group);
            multiply_group(format, at_once, tile, scales, offsets, group, rows, token, size, sums);
        }
        for (int t = 0; t < at_once; t++)
            vst1q_f32(results[t] + 4 * rows, sums[t]);
    }
}

ALWAYS_INLINE void multiply(int format, int at_once, const uint8_t *tile, const uint8_t *next, int64_t k,
                            const void *tokens, int64_t stride, int64_t first, const tile_output *out) {
    if (takes_floats(format)) {
        multiply_floats(format, at_once, tile, next, k, tokens, stride, first, out);
        return;
    }
    float results[8][TILE_ROWS];
    multiply_groups(format, at_once, tile, next, k, tokens, first, results);
    for (int t = 0; t < at_once; t++)
        store_rows(out, first + t, results[t]);
}

DEFINE_KERNELS(neon)
#else
const linear_kernels *linear_neon(void) { return NULL; }
#endif
