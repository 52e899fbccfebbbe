#include "lora.h"

#include "linear_runs.h"

enum { MOST_ROWS = 16 /* of a block */, PIECE = 8 * TILE_ROWS /* outputs that a thread takes at a time */ };

static void multiply(const linear_kernels *kernels, const float *tile, int64_t k, const float *x, int64_t stride,
                     int64_t rows, const tile_output *out) {
    kernels->product[BOUGH_FORMAT_F32]((const uint8_t *)tile, NULL, k, x, stride, rows, out);
}

/* A · x of neighbouring rows with one adapter; their inputs begin at `x`. */
static void shrink(const bough_lora *l, const bough_lora_rows *r, const bough_thin *own, const float *x, int64_t first,
                   int64_t count, float *thin, const linear_kernels *kernels) {
    int64_t width = bough_lora_width(l);
    for (int64_t rank = 0; rank < own->rank; rank += TILE_ROWS) {
        const float *tile = own->down + rank * l->inputs;
        tile_output out = {thin + rank, width, NULL, (int)at_most(TILE_ROWS, own->rank - rank)};
        if (r->x != NULL)
            multiply(kernels, tile, l->inputs, x + first * r->x_stride, r->x_stride, count, &out);
        for (int64_t row = first; r->x == NULL && row < first + count; row++, out.y += width)
            for (int i = 0; i < out.rows; i++) {
                bool is_media = r->step->media != NULL && r->step->is_media[row];
                out.y[i] = is_media ? 0.0f : tile[r->step->token_ids[row] * TILE_ROWS + i] * r->scale;
            }
    }
}

/* Adds B · thin of such rows to the outputs from `at` to `end` of a matrix. */
static void expand(const bough_thin *own, const float *thin, int64_t width, float *y, int64_t y_stride, int64_t count,
                   int64_t at, int64_t end, const linear_kernels *kernels) {
    for (; own->rank > 0 && at < end; at += TILE_ROWS) {
        float sums[MOST_ROWS * TILE_ROWS];
        tile_output out = {sums, TILE_ROWS, NULL, (int)at_most(TILE_ROWS, end - at)};
        multiply(kernels, own->up + at * own->rank, own->rank, thin, width, count, &out);
        for (int64_t row = 0; row < count; row++)
            for (int i = 0; i < out.rows; i++)
                y[row * y_stride + at + i] += sums[row * TILE_ROWS + i];
    }
}

/* How many pieces the work for a matrix has, of one block. */
static int64_t pieces_of(const bough_lora *l, int64_t matrix, bool expands) {
    return expands ? ceil_div(l->bands[matrix + 1] - l->gap - l->bands[matrix], PIECE) : 1;
}

void bough_add_lora(const bough_lora *l, const bough_lora_rows *r, float *thin, bough_thread *thread) {
    const linear_kernels *kernels = linear_narrow();
    /* Where rows are few, each thread gets some. */
    int64_t size = at_most(MOST_ROWS, ceil_div(r->rows, 2 * thread->threads)), blocks = ceil_div(r->rows, size);
    for (int expands = 0; expands < 2; expands++) {
        int64_t pieces = 0;
        for (int64_t matrix = 0; matrix < l->matrices; matrix++)
            pieces += pieces_of(l, matrix, expands);
        for (int64_t item; (item = bough_tile(thread, pieces * blocks)) < pieces * blocks;) {
            int64_t matrix = 0, piece = item / blocks, first = item % blocks * size, past;
            for (; piece >= pieces_of(l, matrix, expands); matrix++)
                piece -= pieces_of(l, matrix, expands);
            int64_t band = l->bands[matrix], end = at_most(first + size, r->rows), at = piece * PIECE;
            for (int64_t row = first; row < end; row = past) {
                for (past = row + 1; past < end && r->slots[past] == r->slots[row];)
                    past++;
                if (r->slots[row] == 0)
                    continue;
                const bough_thin *own = &l->thin[(r->slots[row] - 1) * l->matrices + matrix];
                float *products = thin + row * bough_lora_width(l) + matrix * BOUGH_MAX_RANK;
                if (!expands)
                    shrink(l, r, own, r->x + matrix * l->step, row, past - row, products, kernels);
                else
                    expand(own, products, bough_lora_width(l), r->y + row * r->y_stride + band, r->y_stride, past - row,
                           at, at_most(at + PIECE, l->bands[matrix + 1] - l->gap - band), kernels);
            }
        }
        bough_barrier(thread);
    }
}
