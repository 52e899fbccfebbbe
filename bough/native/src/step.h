/* One step as the operations see it: which sequences compute how many tokens, and where their keys and values stand.
 * The rows' tokens stand back to back. All arrays belong to the caller.
 */
#ifndef BOUGH_STEP_H
#define BOUGH_STEP_H

#include <stdint.h>

typedef struct {
    int64_t tokens, batch, wanted;
    const int64_t *token_ids, *positions, *slots; /* [tokens] */
    const int64_t *wanted_tokens;                 /* [wanted] whose results alone are asked for */
    const int32_t *rows;                          /* [batch] lines of the page table */
    const int32_t *query_starts;                  /* [batch + 1] */
    const int32_t *context_lens;                  /* [batch] tokens of the sequence before this step */
    const int32_t *page_table;
    int64_t page_table_width, page_size;
} bough_step;

#endif
