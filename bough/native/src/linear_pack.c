/* Packs rows as files hold them into tiles, and takes them out again.
 *
 * Every source is first read as groups of 32 codes with their scales; a group then goes to its place in a tile. What a
 * source's bytes mean is the format of GGUF.
 */
#include "linear_tile.h"

#include <math.h>

enum { SUPER = 256 /* inputs of a K-quant's block */ };

/* 32 inputs of a row: value = scale[half] * (code - zero) + offset. */
typedef struct {
    int16_t codes[GROUP];
    float scales[2], offset;
    int zero;
} code_group;

static inline float half_at(const uint8_t *bytes) { return half_to_float((uint16_t)(bytes[0] | bytes[1] << 8)); }

int bough_weight_format(int source) {
    switch (source) {
    case BOUGH_SOURCE_F32: return BOUGH_FORMAT_F32;
    case BOUGH_SOURCE_F16: return BOUGH_FORMAT_F16;
    case BOUGH_SOURCE_BF16: return BOUGH_FORMAT_BF16;
    case BOUGH_SOURCE_Q4_0: return BOUGH_FORMAT_Q4;
    case BOUGH_SOURCE_Q4_1:
    case BOUGH_SOURCE_Q4_K: return BOUGH_FORMAT_Q4_MIN;
    case BOUGH_SOURCE_Q5_0:
    case BOUGH_SOURCE_Q8_0: return BOUGH_FORMAT_Q8;
    case BOUGH_SOURCE_Q5_1:
    case BOUGH_SOURCE_Q5_K: return BOUGH_FORMAT_Q8_MIN;
    case BOUGH_SOURCE_Q6_K: return BOUGH_FORMAT_Q8_HALF;
    default: return -1;
    }
}

static bool is_float(int source) { return takes_floats(bough_weight_format(source)); }

static int64_t source_row_bytes(int source, int64_t k) {
    switch (source) {
    case BOUGH_SOURCE_F32: return 4 * k;
    case BOUGH_SOURCE_F16:
    case BOUGH_SOURCE_BF16: return 2 * k;
    case BOUGH_SOURCE_Q4_0: return k / GROUP * 18;
    case BOUGH_SOURCE_Q4_1: return k / GROUP * 20;
    case BOUGH_SOURCE_Q5_0: return k / GROUP * 22;
    case BOUGH_SOURCE_Q5_1: return k / GROUP * 24;
    case BOUGH_SOURCE_Q8_0: return k / GROUP * 34;
    case BOUGH_SOURCE_Q4_K: return k / SUPER * 144;
    case BOUGH_SOURCE_Q5_K: return k / SUPER * 176;
    default: return k / SUPER * 210;
    }
}

static bool fits(int source, int64_t k) {
    bool super = source == BOUGH_SOURCE_Q4_K || source == BOUGH_SOURCE_Q5_K || source == BOUGH_SOURCE_Q6_K;
    return is_float(source) || k % (super ? SUPER : GROUP) == 0;
}

/* A block of a head of float16 numbers (scale, then offset if `offset`), fifth bits if there are, and 4-bit codes. */
static void read_small(const uint8_t *row, int64_t group, bool offset, bool fifth, code_group *out) {
    const uint8_t *block = row + group * (18 + 2 * offset + 4 * fifth);
    const uint8_t *bits = block + 2 + 2 * offset, *nibbles = bits + 4 * fifth;
    out->zero = offset ? 0 : fifth ? 16 : 8;
    out->scales[0] = out->scales[1] = half_at(block);
    out->offset = offset ? half_at(block + 2) : 0.0f;
    for (int i = 0; i < GROUP; i++) {
        int code = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        out->codes[i] = (int16_t)(code + (fifth ? (bits[i / 8] >> i % 8 & 1) << 4 : 0));
    }
}

static void read_q8_0(const uint8_t *row, int64_t group, code_group *out) {
    const uint8_t *block = row + group * 34;
    out->zero = 0;
    out->scales[0] = out->scales[1] = half_at(block);
    out->offset = 0.0f;
    for (int i = 0; i < GROUP; i++)
        out->codes[i] = (int8_t)block[2 + i];
}

/* Q4_K and Q5_K: eight groups with 6-bit scales and minima, packed into 12 bytes. */
static void read_k(const uint8_t *row, int64_t group, bool fifth, code_group *out) {
    const uint8_t *block = row + group / 8 * (fifth ? 176 : 144), *packed = block + 4;
    int at = (int)(group % 8), scale, minimum;
    if (at < 4) {
        scale = packed[at] & 63;
        minimum = packed[at + 4] & 63;
    } else {
        scale = (packed[at + 4] & 15) | packed[at - 4] >> 6 << 4;
        minimum = packed[at + 4] >> 4 | packed[at] >> 6 << 4;
    }
    out->zero = 0;
    out->scales[0] = out->scales[1] = half_at(block) * (float)scale;
    out->offset = -(half_at(block + 2) * (float)minimum);
    const uint8_t *bits = block + 16, *nibbles = block + (fifth ? 48 : 16) + at / 2 * GROUP;
    for (int i = 0; i < GROUP; i++) {
        int code = at % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
        out->codes[i] = (int16_t)(code + (fifth ? (bits[i] >> at & 1) << 4 : 0));
    }
}

static void read_q6_k(const uint8_t *row, int64_t group, code_group *out) {
    const uint8_t *block = row + group / 8 * 210;
    int at = (int)(group % 8), half = at / 4, quarter = at % 4;
    const uint8_t *low = block + half * 64 + quarter % 2 * GROUP, *high = block + 128 + half * GROUP;
    const int8_t *scales = (const int8_t *)block + 192 + at * 2;
    out->zero = 32;
    out->scales[0] = half_at(block + 208) * (float)scales[0];
    out->scales[1] = half_at(block + 208) * (float)scales[1];
    out->offset = 0.0f;
    for (int i = 0; i < GROUP; i++)
        out->codes[i] = (int16_t)((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
}

static void read_codes(int source, const uint8_t *row, int64_t group, code_group *out) {
    switch (source) {
    case BOUGH_SOURCE_Q4_0: read_small(row, group, false, false, out); return;
    case BOUGH_SOURCE_Q4_1: read_small(row, group, true, false, out); return;
    case BOUGH_SOURCE_Q5_0: read_small(row, group, false, true, out); return;
    case BOUGH_SOURCE_Q5_1: read_small(row, group, true, true, out); return;
    case BOUGH_SOURCE_Q8_0: read_q8_0(row, group, out); return;
    case BOUGH_SOURCE_Q4_K: read_k(row, group, false, out); return;
    case BOUGH_SOURCE_Q5_K: read_k(row, group, true, out); return;
    default: read_q6_k(row, group, out); return;
    }
}

static float read_float(int source, const uint8_t *row, int64_t i) {
    float value;
    if (source == BOUGH_SOURCE_F32) {
        memcpy(&value, row + 4 * i, sizeof value);
        return value;
    }
    if (source == BOUGH_SOURCE_F16)
        return half_at(row + 2 * i);
    return bfloat_to_float((uint16_t)(row[2 * i] | row[2 * i + 1] << 8));
}

/* Quantises floats: around zero to 8 bits, or from the least to the largest to 4. Codes are found for the scale and
 * offset as they will be kept. */
static void quantize_group(int format, const float in[GROUP], code_group *out) {
    float least = 0.0f, largest = 0.0f;
    for (int i = 0; i < GROUP; i++) {
        least = fminf(least, in[i]);
        largest = fmaxf(largest, in[i]);
    }
    bool nibbles = format == BOUGH_FORMAT_Q4_MIN;
    float scale = nibbles ? (largest - least) / 15.0f : fmaxf(largest, -least) / 127.0f;
    scale = half_to_float(float_to_half(scale));
    out->zero = 0;
    out->scales[0] = out->scales[1] = scale;
    out->offset = nibbles ? half_to_float(float_to_half(least)) : 0.0f;
    for (int i = 0; i < GROUP; i++) {
        float code = scale > 0.0f ? rintf((in[i] - out->offset) / scale) : 0.0f;
        out->codes[i] = (int16_t)fminf(fmaxf(code, nibbles ? 0.0f : -127.0f), nibbles ? 15.0f : 127.0f);
    }
}

static void write_group(int format, int64_t k, const code_group *in, uint8_t *tile, int row, int64_t group) {
    uint8_t *codes = tile + group * group_bytes(format);
    int shift = format == BOUGH_FORMAT_Q8 || format == BOUGH_FORMAT_Q8_HALF ? in->zero : 0;
    for (int i = 0; i < GROUP; i++) {
        int at = i / 4 * LINE + row * 4 + i % 4;
        if (!has_nibbles(format))
            codes[at] = (uint8_t)(int8_t)(in->codes[i] - shift);
        else if (i < 16)
            codes[at] = (uint8_t)(in->codes[i] | in->codes[i + 16] << 4);
    }
    int parts = scales_of_group(format);
    uint16_t *scales = (uint16_t *)(tile + scales_start(format, k));
    for (int part = 0; part < parts; part++)
        scales[(group * parts + part) * TILE_ROWS + row] = float_to_half(in->scales[part]);
    if (has_offsets(format))
        ((uint16_t *)(tile + offsets_start(format, k)))[group * TILE_ROWS + row] = float_to_half(in->offset);
}

static void pack_row_as_floats(int source, int64_t k, const uint8_t *data, float *tile, int row) {
    if (is_float(source)) {
        for (int64_t i = 0; i < k; i++)
            tile[i * TILE_ROWS + row] = read_float(source, data, i);
        return;
    }
    for (int64_t group = 0; group < k / GROUP; group++) {
        code_group read;
        read_codes(source, data, group, &read);
        for (int i = 0; i < GROUP; i++)
            tile[(group * GROUP + i) * TILE_ROWS + row] =
                read.scales[i / 16] * (float)(read.codes[i] - read.zero) + read.offset;
    }
}

/* Where a row's input is in a tile of 16-bit floats. */
static int64_t place_of(int format, int row, int64_t input) {
    return format == BOUGH_FORMAT_F16 ? input * TILE_ROWS + row : input / 2 * 2 * TILE_ROWS + row * 2 + input % 2;
}

static void pack_row_as_it_is(int format, int64_t k, const uint8_t *data, uint16_t *tile, int row) {
    for (int64_t i = 0; i < k; i++)
        tile[place_of(format, row, i)] = (uint16_t)(data[2 * i] | data[2 * i + 1] << 8);
}

static void pack_row(int format, int source, int64_t k, const uint8_t *data, uint8_t *tile, int row) {
    for (int64_t group = 0; group < k / GROUP; group++) {
        code_group read;
        if (is_float(source)) {
            float values[GROUP];
            for (int i = 0; i < GROUP; i++)
                values[i] = read_float(source, data, group * GROUP + i);
            quantize_group(format, values, &read);
        } else {
            read_codes(source, data, group, &read);
        }
        write_group(format, k, &read, tile, row, group);
    }
}

size_t bough_weight_bytes(int format, int64_t n, int64_t k) {
    if (format < 0 || format >= BOUGH_FORMATS || n < 1 || k < 1 || (format != BOUGH_FORMAT_F32 && k % GROUP))
        return 0;
    return (size_t)((n + TILE_ROWS - 1) / TILE_ROWS * tile_bytes(format, k));
}

static bool can_pack(int format, int source, int64_t n, int64_t k) {
    int own = bough_weight_format(source);
    if (own < 0 || bough_weight_bytes(format, n, k) == 0 || !fits(source, k))
        return false;
    bool to_fewer_bits = is_float(source) && (format == BOUGH_FORMAT_Q8 || format == BOUGH_FORMAT_Q4_MIN);
    return format == own || format == BOUGH_FORMAT_F32 || to_fewer_bits;
}

int bough_weight_pack(int format, int source, int64_t n, int64_t k, const void *data, void *blob, int64_t first_row,
                      int64_t rows) {
    if (!can_pack(format, source, n, k) || first_row % TILE_ROWS || first_row + rows > n)
        return -1;
    for (int64_t row = first_row; row < first_row + rows; row++) {
        uint8_t *tile = (uint8_t *)blob + row / TILE_ROWS * tile_bytes(format, k);
        const uint8_t *from = (const uint8_t *)data + (row - first_row) * source_row_bytes(source, k);
        if (row % TILE_ROWS == 0)
            memset(tile, 0, (size_t)tile_bytes(format, k));
        if (format == BOUGH_FORMAT_F32)
            pack_row_as_floats(source, k, from, (float *)tile, (int)(row % TILE_ROWS));
        else if (takes_floats(format))
            pack_row_as_it_is(format, k, from, (uint16_t *)tile, (int)(row % TILE_ROWS));
        else
            pack_row(format, source, k, from, tile, (int)(row % TILE_ROWS));
    }
    return 0;
}

void bough_weight_row(const bough_weight *weight, int64_t row, float *out) {
    int format = (int)weight->format, parts = scales_of_group(format), in_tile = (int)(row % TILE_ROWS);
    const uint8_t *tile = weight->blob + row / TILE_ROWS * tile_bytes(format, weight->k);
    if (format == BOUGH_FORMAT_F32) {
        for (int64_t i = 0; i < weight->k; i++)
            out[i] = ((const float *)tile)[i * TILE_ROWS + in_tile];
        return;
    }
    if (takes_floats(format)) {
        for (int64_t i = 0; i < weight->k; i++) {
            uint16_t bits = ((const uint16_t *)tile)[place_of(format, in_tile, i)];
            out[i] = format == BOUGH_FORMAT_F16 ? half_to_float(bits) : bfloat_to_float(bits);
        }
        return;
    }
    const uint16_t *scales = (const uint16_t *)(tile + scales_start(format, weight->k));
    const uint16_t *offsets = (const uint16_t *)(tile + offsets_start(format, weight->k));
    for (int64_t group = 0; group < weight->k / GROUP; group++) {
        const uint8_t *codes = tile + group * group_bytes(format);
        float offset = has_offsets(format) ? half_to_float(offsets[group * TILE_ROWS + in_tile]) : 0.0f;
        for (int i = 0; i < GROUP; i++) {
            float scale = half_to_float(scales[(group * parts + i * parts / GROUP) * TILE_ROWS + in_tile]);
            int at = i / 4 * LINE + in_tile * 4 + i % 4;
            int code = !has_nibbles(format) ? (int8_t)codes[at] : i < 16 ? codes[at] & 15 : codes[at - 4 * LINE] >> 4;
            out[group * GROUP + i] = scale * (float)(code - (format == BOUGH_FORMAT_Q4 ? 8 : 0)) + offset;
        }
    }
}
