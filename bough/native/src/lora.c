#include "lora.h"

#include "linear_runs.h"

enum { MOST_ROWS = 16 /* of a block */, PIECE = 8 * TILE_ROWS /* outputs that a thread takes at a time */ };

/* Rows that a thread takes at a time: where they are few, each thread gets some. */
static int64_t block_size(int64_t rows, int threads) { return at_most(MOST_ROWS, ceil_div(rows, 2 * threads)); }

/* What the slot of a row adds to a matrix, and where the rows behind it end that have the same slot. */
static bough_thin find_thin(const bough_lora *l, const int64_t *slots, int64_t matrix, int64_t row, int64_t end,
                            int64_t *past) {
    for (*past = row + 1; *past < end && slots[*past] == slots[row];)
        ++*past;
    return slots[row] == 0 ? (bough_thin){0} : l->thin[(slots[row] - 1) * l->matrices + matrix];
}

static void multiply(const linear_kernels *kernels, const float *tile, int64_t k, const float *x, int64_t stride,
                     int64_t rows, const tile_output *out) {
    kernels->product[BOUGH_FORMAT_F32]((const uint8_t *)tile, NULL, k, x, stride, rows, out);
}

/* A · x of neighbouring rows with one adapter. */
static void shrink(const bough_lora *l, const bough_lora_rows *r, const bough_thin *own, int64_t first, int64_t count,
                   float *thin, const linear_kernels *kernels) {
    int64_t width = bough_lora_width(l);
    for (int64_t rank = 0; rank < own->rank; rank += TILE_ROWS) {
        const float *tile = own->down + rank * l->inputs;
        tile_output out = {thin + rank, width, NULL, (int)at_most(TILE_ROWS, own->rank - rank)};
        if (r->x != NULL) {
            multiply(kernels, tile, l->inputs, r->x + first * r->x_stride, r->x_stride, count, &out);
            continue;
        }
        for (int64_t row = 0; row < count; row++)
            for (int i = 0; i < out.rows; i++)
                out.y[row * width + i] = tile[r->columns[first + row] * TILE_ROWS + i] * r->scale;
    }
}

/* Adds B · thin of such rows to the outputs from `at` to `end` of a matrix. */
static void expand(const bough_thin *own, const float *thin, int64_t width, float *y, int64_t y_stride, int64_t count,
                   int64_t at, int64_t end, const linear_kernels *kernels) {
    for (; at < end; at += TILE_ROWS) {
        float sums[MOST_ROWS * TILE_ROWS];
        tile_output out = {sums, TILE_ROWS, NULL, (int)at_most(TILE_ROWS, end - at)};
        multiply(kernels, own->up + at * own->rank, own->rank, thin, width, count, &out);
        for (int64_t row = 0; row < count; row++)
            for (int i = 0; i < out.rows; i++)
                y[row * y_stride + at + i] += sums[row * TILE_ROWS + i];
    }
}

void bough_add_lora(const bough_lora *l, const bough_lora_rows *r, float *thin, bough_thread *thread) {
    const linear_kernels *kernels = linear_narrow();
    int64_t size = block_size(r->rows, thread->threads), blocks = ceil_div(r->rows, size), width = bough_lora_width(l);
    int64_t items = blocks * l->matrices, past;
    for (int64_t item; (item = bough_tile(thread, items)) < items;) {
        int64_t matrix = item / blocks, row = item % blocks * size, end = at_most(row + size, r->rows);
        for (; row < end; row = past) {
            bough_thin own = find_thin(l, r->slots, matrix, row, end, &past);
            shrink(l, r, &own, row, past - row, thin + row * width + matrix * BOUGH_MAX_RANK, kernels);
        }
    }
    bough_barrier(thread);
    items = 0;
    for (int64_t matrix = 0; matrix < l->matrices; matrix++)
        items += ceil_div(l->bands[matrix + 1] - l->bands[matrix], PIECE) * blocks;
    for (int64_t item; (item = bough_tile(thread, items)) < items;) {
        int64_t piece = item / blocks, row = item % blocks * size, end = at_most(row + size, r->rows), matrix = 0;
        for (int64_t pieces; piece >= (pieces = ceil_div(l->bands[matrix + 1] - l->bands[matrix], PIECE)); matrix++)
            piece -= pieces;
        int64_t first = l->bands[matrix], outputs = l->bands[matrix + 1] - first;
        for (; row < end; row = past) {
            bough_thin own = find_thin(l, r->slots, matrix, row, end, &past);
            if (own.rank > 0)
                expand(&own, thin + row * width + matrix * BOUGH_MAX_RANK, width, r->y + row * r->y_stride + first,
                       r->y_stride, past - row, piece * PIECE, at_most((piece + 1) * PIECE, outputs), kernels);
        }
    }
    bough_barrier(thread);
}
