/* One step as the operations see it: which sequences compute how many tokens, and where their keys and values stand.
 * The rows' tokens stand back to back. All arrays belong to the caller.
 */
#ifndef BOUGH_STEP_H
#define BOUGH_STEP_H

#include <stdbool.h>
#include <stdint.h>

/* Marks some of many tokens: those from bounds[1] to bounds[2], from bounds[3] to bounds[4], …; `count` spans in all, of
 * which the first begins at bounds[0] = 0 and is not marked. Without spans no token is. */
typedef struct {
    const int64_t *bounds;
    int64_t count;
} bough_spans;

typedef struct {
    int64_t tokens, batch, logits_count;
    const int64_t *token_ids, *positions; /* [tokens] */
    const int64_t *slots;                 /* [KV groups][tokens], with slots_stride from group to group */
    const int64_t *logits_indices;        /* [logits_count] the tokens whose logits are asked for */
    const int32_t *rows;                  /* [batch] lines of the page table */
    const int32_t *query_starts;          /* [batch + 1] */
    const int32_t *context_lens;          /* [batch] tokens of the sequence before this step */
    const int32_t *page_table;            /* [KV groups][rows][page_table_width] */
    int64_t slots_stride, page_table_stride, page_table_width, page_size;
    const float *media;   /* [tokens][hidden] vectors in the place of those of tokens; NULL: there are none */
    const bool *is_media; /* [tokens] where there is one */
    const int64_t *adapters, *logits_adapters; /* slots of the tokens' adapters, and of those with logits; NULL: none */
    const int32_t *common;               /* [batch] first tokens on the same pages as the row before; or NULL */
    bough_spans prompts, logits_prompts; /* which of the tokens, and of those with logits, are of prompts */
} bough_step;

#endif
