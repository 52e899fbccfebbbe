/* Products of tiles for `attention_amx.c`, of many columns: a's rows of tiles with b's columns, over some groups. For
 * each group the greater part of a with the lesser of b, with the greater, and its lesser with b's greater, in this
 * order always. */
#ifndef BOUGH_ATTENTION_AMX_PRODUCTS_H
#define BOUGH_ATTENTION_AMX_PRODUCTS_H

#include "attention_amx_tiles.h"

typedef struct {
    const uint8_t *a;
    int64_t a_row; /* bytes from one row of tiles to the next */
    const uint8_t *b;
    int64_t b_column;
    float *sums;
    int64_t sums_column; /* bytes from one tile of columns to the next; rows follow each other */
    int groups;
    bool exact; /* a has no lesser part */
} product;

/* Registers 0 and 1: sums of two rows by the first column, 2 and 3: by the second; 4, 5: rows; 6, 7: columns. */
#define ADD_PRODUCTS()                                                                                                 \
    do {                                                                                                               \
        _tile_dpbf16ps(0, 4, 6);                                                                                       \
        _tile_dpbf16ps(1, 5, 6);                                                                                       \
        if (columns == 2) {                                                                                            \
            _tile_dpbf16ps(2, 4, 7);                                                                                   \
            _tile_dpbf16ps(3, 5, 7);                                                                                   \
        }                                                                                                              \
    } while (0)

/* Two rows of tiles by one or two columns. */
ALWAYS_INLINE void multiply_rows(const product *p, int row, const int columns) {
    const uint8_t *a = p->a + row * p->a_row, *b = p->b;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int group = 0; group < p->groups; group++, a += BOTH_PARTS, b += BOTH_PARTS) {
        _tile_loadd(4, a, LINE);
        _tile_loadd(5, a + p->a_row, LINE);
        _tile_loadd(6, b + REGISTER, LINE);
        if (columns == 2)
            _tile_loadd(7, b + p->b_column + REGISTER, LINE);
        ADD_PRODUCTS();
        _tile_loadd(6, b, LINE);
        if (columns == 2)
            _tile_loadd(7, b + p->b_column, LINE);
        ADD_PRODUCTS();
        if (p->exact)
            continue;
        _tile_loadd(4, a + REGISTER, LINE);
        _tile_loadd(5, a + p->a_row + REGISTER, LINE);
        ADD_PRODUCTS();
    }
    uint8_t *to = (uint8_t *)p->sums + row * REGISTER;
    _tile_stored(0, to, LINE);
    _tile_stored(1, to + REGISTER, LINE);
    if (columns == 2) {
        _tile_stored(2, to + p->sums_column, LINE);
        _tile_stored(3, to + p->sums_column + REGISTER, LINE);
    }
}

/* An even number of rows of tiles by one or two columns. */
static void multiply(const product *p, int rows, int columns) {
    __asm__ __volatile__("" ::: "memory"); /* compilers do not know what tiles are loaded from */
    for (int row = 0; row < rows; row += 2)
        if (columns == 2)
            multiply_rows(p, row, 2);
        else
            multiply_rows(p, row, 1);
}

/* Scores of one or two tiles of columns. */
static void score(const workspace *w, int tile, int count, int groups) {
    int64_t bytes = w->groups * BOTH_PARTS;
    product p = {.a = w->keys,
                 .a_row = bytes,
                 .b = w->queries + tile * bytes,
                 .b_column = bytes,
                 .sums = w->scores,
                 .sums_column = KEYS * LINE,
                 .groups = w->groups,
                 .exact = w->number == BOUGH_BFLOAT16};
    multiply(&p, 2 * groups, count);
}

/* Weighted sums of values, of one or two tiles of weights. */
static void combine(const workspace *w, int count, int groups) {
    product p = {.a = w->values,
                 .a_row = KEY_GROUPS * BOTH_PARTS,
                 .b = w->weights,
                 .b_column = KEY_GROUPS * BOTH_PARTS,
                 .sums = w->sums,
                 .sums_column = w->groups * WIDTH * LINE,
                 .groups = groups,
                 .exact = w->number == BOUGH_BFLOAT16};
    multiply(&p, 2 * w->groups, count);
}

#endif
