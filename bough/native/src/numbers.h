/* Whole numbers, and 16-bit floats for code that no instruction helps. */
#ifndef BOUGH_NUMBERS_H
#define BOUGH_NUMBERS_H

#include <stdint.h>
#include <string.h>

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t at_most(int64_t number, int64_t limit) { return number < limit ? number : limit; }

static inline int64_t at_least(int64_t number, int64_t limit) { return number > limit ? number : limit; }

/* Rounded up to whole cache lines. */
static inline int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline __attribute__((always_inline)) float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits = (rest << 13) + 0x38000000;
    float value;
    if (rest >= 0x7c00)
        bits += 0x38000000;
    memcpy(&value, &bits, sizeof value);
    if (rest < 0x0400)
        value = (float)rest * 5.9604644775390625e-8f;
    memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even. */
static inline __attribute__((always_inline)) uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* a sum with this has the result's bits at its end */
        float small, half = 0.5f;
        memcpy(&small, &rest, sizeof small);
        small += half;
        memcpy(&rest, &small, sizeof rest);
        return (uint16_t)(sign | (rest - 0x3f000000));
    }
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}

#endif
