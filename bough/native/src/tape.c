#define _GNU_SOURCE
#include "tape.h"

#include "attention.h"
#include "ops.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    bough_weight table;
    float scale, *out;
} embedding_op;

typedef struct {
    const float *x, *residual, *weight;
    float eps;
    bool plus_one;
    int64_t size;
    float *out, *sum;
} rms_norm_op;

typedef struct {
    bough_weight *parts;
    int count;
    const float *x;
    int64_t x_stride;
    const float *bias;
    float *y;
    int64_t y_stride;
} linear_op;

typedef struct {
    float *qkv;
    int heads, kv_heads, dim;
    const float *q_norm, *k_norm;
    float eps;
    bool plus_one;
    const float *cos, *sin;
    void *keys, *values;
    int number, group;
} norm_rope_store_op;

typedef struct {
    bough_attention_spec spec;
    const float *q;
    int64_t q_stride;
    int group;
    float *out;
} attention_op;

typedef struct {
    const float *x;
    int activation;
    int64_t size;
    float *out;
} gate_op;

typedef struct {
    const float *x;
    int64_t x_stride, size;
    float *out;
} take_op;

typedef struct {
    float *x;
    int64_t size;
    float cap;
} softcap_op;

typedef struct operation operation;

/* What all threads know while they run a tape. */
typedef struct {
    const bough_tape *tape;
    const bough_step *step;
    void *attention_scratch, *linear_scratch; /* apart, because a thread may be an operation behind the others */
    const bough_ops *ops;
} running;

typedef void (*runner)(const operation *op, int64_t rows, const running *r, bough_team *team);

struct operation {
    runner run;
    bool on_wanted;
    double seconds;
    union {
        embedding_op embedding;
        rms_norm_op rms_norm;
        linear_op linear;
        norm_rope_store_op norm_rope_store;
        attention_op attention;
        gate_op gate;
        take_op take;
        softcap_op softcap;
    };
};

struct bough_tape {
    operation *operations;
    int64_t count, room;
    bool timed;
};

/* ---- running */

static void run_embedding(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const embedding_op *o = &op->embedding;
    int64_t size = o->table.k;
    for (int64_t row; (row = bough_tile(team, rows)) < rows;) {
        float *out = o->out + row * size;
        bough_weight_row(&o->table, r->step->token_ids[row], out);
        for (int64_t i = 0; o->scale != 1.0f && i < size; i++)
            out[i] *= o->scale;
    }
    bough_barrier(team);
}

static void run_rms_norm(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const rms_norm_op *o = &op->rms_norm;
    for (int64_t row; (row = bough_tile(team, rows)) < rows;) {
        int64_t at = row * o->size;
        r->ops->rms_norm(o->x + at, o->residual == NULL ? NULL : o->residual + at, o->weight, o->eps, o->plus_one,
                         o->size, o->out + at, o->sum == NULL ? NULL : o->sum + at);
    }
    bough_barrier(team);
}

static void run_linear(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const linear_op *o = &op->linear;
    bough_linear(o->parts, o->count, o->x, o->x_stride, o->y, o->y_stride, o->bias, rows,
                 op->on_wanted ? r->step->wanted_prompts : r->step->prompts, false, r->linear_scratch, team);
}

static void run_norm_rope_store(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const norm_rope_store_op *o = &op->norm_rope_store;
    int64_t half = o->dim / 2, stored = (int64_t)o->kv_heads * o->dim;
    const int64_t *slots = r->step->slots + o->group * r->step->slots_stride;
    for (int64_t row; (row = bough_tile(team, rows)) < rows;) {
        float *token = o->qkv + row * (o->heads + 2 * o->kv_heads) * o->dim;
        int64_t position = r->step->positions[row], slot = slots[row];
        for (int head = 0; head < o->heads + o->kv_heads; head++) {
            float *at = token + (int64_t)head * o->dim;
            const float *norm = head < o->heads ? o->q_norm : o->k_norm;
            if (norm != NULL)
                r->ops->rms_norm(at, NULL, norm, o->eps, o->plus_one, o->dim, at, NULL);
            r->ops->rotate(at, o->cos + position * half, o->sin + position * half, half);
        }
        const float *keys = token + (int64_t)o->heads * o->dim;
        int64_t at = slot * stored * (o->number == BOUGH_FLOAT32 ? 4 : 2);
        r->ops->narrow(keys, o->number, stored, (char *)o->keys + at);
        r->ops->narrow(keys + stored, o->number, stored, (char *)o->values + at);
    }
    bough_barrier(team);
}

static void run_attention(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const attention_op *o = &op->attention;
    (void)rows;
    bough_step step = *r->step;
    step.page_table += o->group * step.page_table_stride;
    bough_attention(&o->spec, &step, o->q, o->q_stride, o->out, (int64_t)o->spec.heads * o->spec.dim,
                    r->attention_scratch, r->ops, team);
}

static void run_gate(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const gate_op *o = &op->gate;
    enum { PIECE = 1024 };
    int64_t pieces = (o->size + PIECE - 1) / PIECE;
    for (int64_t tile; (tile = bough_tile(team, rows * pieces)) < rows * pieces;) {
        int64_t row = tile / pieces, at = tile % pieces * PIECE;
        int64_t size = o->size - at < PIECE ? o->size - at : PIECE;
        const float *gate = o->x + row * 2 * o->size + at;
        (o->activation == 0 ? r->ops->silu_mul : r->ops->gelu_tanh_mul)(gate, gate + o->size,
                                                                       o->out + row * o->size + at, size);
    }
    bough_barrier(team);
}

static void run_take(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const take_op *o = &op->take;
    for (int64_t row; (row = bough_tile(team, rows)) < rows;)
        memcpy(o->out + row * o->size, o->x + r->step->wanted_tokens[row] * o->x_stride,
               (size_t)o->size * sizeof(float));
    bough_barrier(team);
}

static void run_softcap(const operation *op, int64_t rows, const running *r, bough_team *team) {
    const softcap_op *o = &op->softcap;
    for (int64_t row; (row = bough_tile(team, rows)) < rows;)
        r->ops->softcap(o->x + row * o->size, o->size, o->cap);
    bough_barrier(team);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run_all(bough_team *team, void *argument) {
    const running *r = argument;
    bool timed = r->tape->timed && team->thread == 0;
    double began = timed ? now() : 0.0;
    for (int64_t i = 0; i < r->tape->count; i++) {
        operation *op = &r->tape->operations[i];
        int64_t rows = op->on_wanted ? r->step->wanted : r->step->tokens;
        if (rows > 0)
            op->run(op, rows, r, team);
        if (timed) {
            double ended = now();
            op->seconds += ended - began;
            began = ended;
        }
    }
}

static size_t attention_scratch(const bough_tape *tape, int threads) {
    size_t most = 0;
    for (int64_t i = 0; i < tape->count; i++)
        if (tape->operations[i].run == run_attention) {
            size_t bytes = bough_attention_scratch(&tape->operations[i].attention.spec, threads);
            most = bytes > most ? bytes : most;
        }
    return (most + 63) / 64 * 64;
}

void bough_tape_run(const bough_tape *tape, const bough_step *step, void *scratch, bough_crew *crew) {
    void *behind = (char *)scratch + attention_scratch(tape, bough_crew_threads(crew));
    running r = {tape, step, scratch, behind, bough_ops_here()};
    bough_crew_run(crew, run_all, &r);
}

double bough_tape_seconds(const bough_tape *tape, int64_t index) { return tape->operations[index].seconds; }

size_t bough_tape_scratch(const bough_tape *tape, int64_t tokens, int threads) {
    size_t most = 0;
    for (int64_t i = 0; i < tape->count; i++) {
        const linear_op *op = &tape->operations[i].linear;
        if (tape->operations[i].run == run_linear) {
            size_t bytes = bough_linear_scratch(op->parts, op->count, tokens, threads);
            most = bytes > most ? bytes : most;
        }
    }
    return most + attention_scratch(tape, threads);
}

/* ---- recording */

bough_tape *bough_tape_create(void) {
    bough_tape *tape = calloc(1, sizeof *tape);
    if (tape != NULL)
        tape->timed = getenv("BOUGH_NATIVE_PROFILE") != NULL;
    return tape;
}

void bough_tape_destroy(bough_tape *tape) {
    for (int64_t i = 0; i < tape->count; i++)
        if (tape->operations[i].run == run_linear)
            free(tape->operations[i].linear.parts);
    free(tape->operations);
    free(tape);
}

static int add(bough_tape *tape, operation op) {
    if (tape->count == tape->room) {
        int64_t room = tape->room * 2 + 64;
        operation *grown = realloc(tape->operations, (size_t)room * sizeof *grown);
        if (grown == NULL)
            return -1;
        tape->operations = grown;
        tape->room = room;
    }
    tape->operations[tape->count++] = op;
    return 0;
}

int bough_tape_embedding(bough_tape *tape, const bough_weight *table, float scale, float *out) {
    return add(tape, (operation){.run = run_embedding, .embedding = {*table, scale, out}});
}

int bough_tape_rms_norm(bough_tape *tape, bool on_wanted, const float *x, const float *residual, const float *weight,
                        float eps, bool plus_one, int64_t size, float *out, float *sum) {
    rms_norm_op op = {x, residual, weight, eps, plus_one, size, out, sum};
    return add(tape, (operation){.run = run_rms_norm, .on_wanted = on_wanted, .rms_norm = op});
}

int bough_tape_linear(bough_tape *tape, bool on_wanted, const bough_weight *parts, int count, const float *x,
                      int64_t x_stride, const float *bias, float *y, int64_t y_stride) {
    size_t bytes = (size_t)count * sizeof *parts;
    bough_weight *copies = malloc(bytes);
    if (copies == NULL)
        return -1;
    memcpy(copies, parts, bytes);
    linear_op op = {copies, count, x, x_stride, bias, y, y_stride};
    int added = add(tape, (operation){.run = run_linear, .on_wanted = on_wanted, .linear = op});
    if (added != 0)
        free(copies);
    return added;
}

int bough_tape_norm_rope_store(bough_tape *tape, float *qkv, int heads, int kv_heads, int dim, const float *q_norm,
                               const float *k_norm, float eps, bool plus_one, const float *cos, const float *sin,
                               void *keys, void *values, int number, int group) {
    norm_rope_store_op op = {qkv,      heads, kv_heads, dim,  q_norm, k_norm, eps,
                             plus_one, cos,   sin,      keys, values, number, group};
    return add(tape, (operation){.run = run_norm_rope_store, .norm_rope_store = op});
}

int bough_tape_attention(bough_tape *tape, const float *q, int64_t q_stride, int heads, int kv_heads, int dim,
                         const void *keys, const void *values, int number, int64_t window, float scale, float softcap,
                         bool ends_only, int group, float *out) {
    if (dim > BOUGH_MAX_HEAD_DIM)
        return -1;
    bough_attention_spec spec = {heads, kv_heads, dim, keys, values, number, window, scale, softcap, ends_only};
    return add(tape, (operation){.run = run_attention, .attention = {spec, q, q_stride, group, out}});
}

int bough_tape_gate(bough_tape *tape, bool on_wanted, const float *x, int activation, int64_t size, float *out) {
    return add(tape, (operation){.run = run_gate, .on_wanted = on_wanted, .gate = {x, activation, size, out}});
}

int bough_tape_take_wanted(bough_tape *tape, const float *x, int64_t x_stride, int64_t size, float *out) {
    return add(tape, (operation){.run = run_take, .on_wanted = true, .take = {x, x_stride, size, out}});
}

int bough_tape_softcap(bough_tape *tape, bool on_wanted, float *x, int64_t size, float cap) {
    return add(tape, (operation){.run = run_softcap, .on_wanted = on_wanted, .softcap = {x, size, cap}});
}
