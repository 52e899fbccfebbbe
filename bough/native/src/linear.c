/* Chooses the variant for the CPU and deals the work of a product out to the threads. */
#include "linear.h"

#include "cpu.h"
#include "linear_runs.h"

enum {
    ALONE = 4096,             /* activations that every thread rather quantises for itself than meets the others */
    ALONE_BYTES = 4 * ALONE,  /* what they take quantised, at most */
    CACHED_BYTES = 512 << 10, /* of activations that stay in a core's own cache while weights pass by */
    DEALT_BYTES = 48 << 10,   /* of weights that a thread takes at a time, where there are many */
    DEALS = 6,                /* how often each thread takes some, where there are few */
    WIDE_TILES = 2,
    MANY = 32,        /* tokens, of floats, for which the weights of a block of inputs are kept in a core's own cache */
    MANY_PANEL = 168, /* of them, a multiple of what each variant takes at once */
};

const linear_kernels *linear_narrow(void) {
    unsigned features = bough_cpu_features();
    const linear_kernels *found = NULL;
    if (features & BOUGH_AVX512)
        found = linear_avx512();
    if (found == NULL && (features & BOUGH_AVXVNNI))
        found = linear_avxvnni();
    if (found == NULL && (features & BOUGH_AVX2))
        found = linear_avx2();
    if (found == NULL && (features & BOUGH_NEON))
        found = linear_neon();
    return found ? found : linear_plain();
}

static const linear_wide_kernels *wide_kernels(void) {
    return bough_cpu_features() & BOUGH_AMX ? linear_amx() : NULL;
}

static bool fits(const linear_wide_kernels *wide, const bough_weight *parts, int count) {
    if (wide == NULL)
        return false;
    for (int part = 0; part < count; part++)
        if (parts[part].format == BOUGH_FORMAT_F32)
            return false;
    return true;
}

const char *bough_linear_variant(int format, bool prompt) {
    bough_weight part = {.format = format};
    const linear_wide_kernels *wide = wide_kernels();
    return prompt && fits(wide, &part, 1) ? wide->name : linear_narrow()->name;
}

/* The scratch begins with a slice for each thread; what follows is written with a tile in hand. */
static int64_t slices_bytes(int threads) { return (int64_t)threads * ALONE_BYTES; }

/* Behind them each thread has room for a run's block of 16-bit floats as float32, if there are such weights. */
static int64_t widened_bytes(const bough_weight *parts, int count) {
    for (int part = 0; part < count; part++)
        if (is_narrow_float((int)parts[part].format))
            return RUN_TILES * tile_bytes(BOUGH_FORMAT_F32, at_most(parts[part].k, BLOCK_INPUTS));
    return 0;
}

int64_t linear_shared_start(const bough_weight *parts, int count, int threads) {
    return slices_bytes(threads) + threads * widened_bytes(parts, count);
}

size_t bough_linear_scratch(const bough_weight *parts, int count, int64_t m, int threads) {
    int64_t k = parts[0].k, shared = m * token_bytes(k);
    const linear_wide_kernels *wide = wide_kernels();
    if (fits(wide, parts, count))
        shared = at_least(shared, align(wide->panel_bytes(k, m)) + threads * align(wide->unpacked_bytes(k)));
    return (size_t)(linear_shared_start(parts, count, threads) + shared);
}

static int64_t tiles_of(const bough_weight *weight) { return (weight->n + TILE_ROWS - 1) / TILE_ROWS; }

int64_t linear_count_runs(const bough_weight *parts, int count, int64_t size) {
    int64_t runs = 0;
    for (int part = 0; part < count; part++)
        runs += (tiles_of(&parts[part]) + size - 1) / size;
    return runs;
}

tile_run linear_find_run(const bough_weight *parts, int64_t size, int64_t index) {
    int64_t output = 0;
    for (;; parts++) {
        int64_t runs = (tiles_of(parts) + size - 1) / size;
        if (index < runs)
            return (tile_run){parts, index * size, at_most(size, tiles_of(parts) - index * size), output};
        index -= runs;
        output += parts->n;
    }
}

int64_t linear_run_size(const bough_weight *parts, int count, int64_t tokens, int64_t times, int threads) {
    int64_t tiles = linear_count_runs(parts, count, 1);
    int64_t bytes = tile_bytes((int)parts[0].format, parts[0].k);
    int64_t fair = at_least(tiles * times / (threads * DEALS), 1);
    bool many = tokens >= MANY && takes_floats((int)parts[0].format);
    return at_most(fair, many ? RUN_TILES : at_most(at_least(DEALT_BYTES / bytes, 1), RUN_TILES));
}

static tile_output output_of(const linear_call *call, const tile_run *run, int64_t tile, int64_t first_token) {
    int64_t row = tile * TILE_ROWS, output = run->first_output + row;
    return (tile_output){call->y + first_token * call->y_stride + output, call->y_stride,
                         call->bias ? call->bias + output : NULL, (int)at_most(TILE_ROWS, run->weight->n - row)};
}

/* Quantises the tokens, each thread all of them where that is little. Where they lie then. */
static const uint8_t *quantize_tokens(const linear_call *call, const linear_kernels *kernels, bough_thread *thread) {
    int64_t k = call->parts[0].k, size = token_bytes(k);
    bool needed = false;
    for (int part = 0; part < call->count; part++)
        needed |= !takes_floats((int)call->parts[part].format);
    uint8_t *tokens = (uint8_t *)call->scratch + linear_shared_start(call->parts, call->count, thread->threads);
    if (!needed)
        return tokens;
    if (call->m * k <= ALONE) {
        tokens = (uint8_t *)call->scratch + slices_bytes(thread->index);
        for (int64_t token = 0; token < call->m; token++)
            kernels->quantize(call->x + token * call->x_stride, k, (token_group *)(tokens + token * size));
        return tokens;
    }
    int64_t piece = at_least(ALONE / k, 1);
    for (int64_t first; (first = bough_tiles(thread, piece, call->m)) < call->m;)
        for (int64_t token = first; token < at_most(first + piece, call->m); token++)
            kernels->quantize(call->x + token * call->x_stride, k, (token_group *)(tokens + token * size));
    bough_barrier(thread);
    return tokens;
}

static const uint8_t *tile_at(const bough_weight *weight, int64_t tile) {
    return weight->blob + tile * tile_bytes((int)weight->format, weight->k);
}

const uint8_t *linear_run_start(tile_run run) { return tile_at(run.weight, run.first_tile); }

/* Where run `index` begins; NULL if there are not so many. */
static const uint8_t *start_of(const bough_weight *parts, int64_t size, int64_t runs, int64_t panels, int64_t index) {
    if (index >= runs * panels)
        return NULL;
    return linear_run_start(linear_find_run(parts, size, index % runs));
}

/* Multiplies the first `count` tokens of a run, a multiple of those taken at once, with its first tiles, of floats. */
static void multiply_many(const linear_call *call, const linear_kernels *kernels, const tile_run *run, int64_t tiles,
                          int64_t first_token, int64_t count, bough_thread *thread) {
    const bough_weight *weight = run->weight;
    int64_t k = weight->k, own = slices_bytes(thread->threads) + thread->index * widened_bytes(weight, 1);
    bool narrow = is_narrow_float((int)weight->format);
    _Alignas(LINE) float copies[MAX_MANY_TOKENS * COPY_STRIDE];
    for (int64_t input = 0; input < k; input += BLOCK_INPUTS) {
        int64_t inputs = at_most(k - input, BLOCK_INPUTS), apart = (narrow ? inputs : k) * TILE_ROWS;
        float *wide = (float *)((uint8_t *)call->scratch + own);
        const float *weights = (const float *)tile_at(weight, run->first_tile) + input * TILE_ROWS;
        for (int64_t tile = 0; narrow && tile < tiles; tile++)
            kernels->widen((int)weight->format, tile_at(weight, run->first_tile + tile) + input * TILE_ROWS * 2, inputs,
                           wide + tile * apart);
        for (int64_t token = first_token; token < first_token + count; token += kernels->many_tokens) {
            for (int i = 0; i < kernels->many_tokens; i++)
                memcpy(copies + i * COPY_STRIDE, call->x + (token + i) * call->x_stride + input, (size_t)inputs * 4);
            for (int64_t tile = 0, taken; tile < tiles; tile += taken) {
                tile_output out = output_of(call, run, run->first_tile + tile, token);
                taken = at_most(kernels->many_tiles, tiles - tile);
                kernels->many((int)taken, (narrow ? wide : weights) + tile * apart, apart, inputs, copies,
                              input + inputs == k ? out.bias : NULL, input == 0, out.y, out.stride);
            }
        }
    }
}

void linear_multiply_run(const linear_call *call, const linear_kernels *kernels, const tile_run *run,
                         const uint8_t *next, const uint8_t *tokens, int64_t first_token, int64_t count,
                         bough_thread *thread) {
    const bough_weight *weight = run->weight;
    int format = (int)weight->format;
    int64_t full = at_most(run->tiles, weight->n / TILE_ROWS - run->first_tile); /* tiles with all their rows */
    int64_t done = count >= MANY && takes_floats(format) ? count / kernels->many_tokens * kernels->many_tokens : 0;
    if (done > 0 && full > 0)
        multiply_many(call, kernels, run, full, first_token, done, thread);
    for (int64_t tile = 0; tile < run->tiles; tile++) {
        int64_t first = first_token + (tile < full ? done : 0), left = first_token + count - first;
        if (left == 0)
            continue;
        const void *from = tokens + first * token_bytes(weight->k);
        if (takes_floats(format))
            from = call->x + first * call->x_stride;
        tile_output out = output_of(call, run, run->first_tile + tile, first);
        const uint8_t *after = tile + 1 == run->tiles ? next : tile_at(weight, run->first_tile + tile + 1);
        kernels->product[format](tile_at(weight, run->first_tile + tile), after, weight->k, from, call->x_stride, left,
                                 &out);
    }
}

static void multiply_narrow(const linear_call *call, bough_thread *thread) {
    const linear_kernels *kernels = linear_narrow();
    const uint8_t *tokens = quantize_tokens(call, kernels, thread);
    int64_t panel = at_least(CACHED_BYTES / token_bytes(call->parts[0].k) / 8 * 8, 8);
    if (takes_floats((int)call->parts[0].format))
        panel = MANY_PANEL;
    int64_t panels = (call->m + panel - 1) / panel;
    int64_t size = linear_run_size(call->parts, call->count, call->m, panels, thread->threads);
    int64_t runs = linear_count_runs(call->parts, call->count, size);
    /* A run is drawn while the one before it is still to be multiplied, so that its weights can be on their way. */
    int64_t items = runs * panels;
    for (int64_t item = bough_shared_out_tile(thread, items), following; item < items; item = following) {
        following = bough_shared_out_tile(thread, items);
        tile_run run = linear_find_run(call->parts, size, item % runs);
        const uint8_t *next = start_of(call->parts, size, runs, panels, following);
        int64_t first = item / runs * panel;
        linear_multiply_run(call, kernels, &run, next, tokens, first, at_most(panel, call->m - first), thread);
    }
}

static void multiply_wide(const linear_call *call, const linear_wide_kernels *wide, bough_thread *thread) {
    int64_t k = call->parts[0].k;
    uint8_t *tokens = (uint8_t *)call->scratch + linear_shared_start(call->parts, call->count, thread->threads);
    uint8_t *unpacked = tokens + align(wide->panel_bytes(k, call->m)) + thread->index * align(wide->unpacked_bytes(k));
    for (int64_t first; (first = bough_tile(thread, call->m) * TILE_ROWS) < call->m;)
        wide->convert(call->x, call->x_stride, k, first, at_most(TILE_ROWS, call->m - first), tokens);
    bough_barrier(thread);
    int64_t panel = at_least(CACHED_BYTES / wide->panel_bytes(k, 2 * TILE_ROWS), 1) * 2 * TILE_ROWS;
    int64_t panels = (call->m + panel - 1) / panel, runs = linear_count_runs(call->parts, call->count, WIDE_TILES);
    wide->begin();
    int64_t items = runs * panels;
    for (int64_t item = bough_tile(thread, items), following; item < items; item = following) {
        following = bough_tile(thread, items);
        tile_run run = linear_find_run(call->parts, WIDE_TILES, item % runs);
        const uint8_t *next = start_of(call->parts, WIDE_TILES, runs, panels, following);
        int64_t first = item / runs * panel;
        tile_output outs[WIDE_TILES];
        for (int64_t tile = 0; tile < run.tiles; tile++)
            outs[tile] = output_of(call, &run, run.first_tile + tile, first);
        wide->product(run.weight, run.first_tile, run.tiles, next, tokens + wide->panel_bytes(k, first),
                      at_most(panel, call->m - first), outs, unpacked);
    }
    wide->end();
}

/* The tokens of a call from `first` to `end`. */
static linear_call part_of(const linear_call *call, int64_t first, int64_t end) {
    linear_call part = *call;
    part.x += first * call->x_stride;
    part.y += first * call->y_stride;
    part.m = end - first;
    return part;
}

void bough_linear(const bough_weight *parts, int count, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                  const float *bias, int64_t m, bough_spans prompts, void *scratch, bough_thread *thread) {
    linear_call call = {parts, count, x, x_stride, y, y_stride, bias, m, scratch};
    const linear_wide_kernels *wide = wide_kernels();
    if (prompts.count < 2 || !fits(wide, parts, count)) {
        multiply_narrow(&call, thread);
        bough_barrier(thread);
        return;
    }
    for (int64_t span = 0; span < prompts.count; span++) {
        linear_call part = part_of(&call, prompts.bounds[span], prompts.bounds[span + 1]);
        if (part.m == 0)
            continue;
        if (span % 2 == 0)
            multiply_narrow(&part, thread);
        else
            multiply_wide(&part, wide, thread);
        bough_barrier(thread);
    }
}

typedef struct {
    linear_call call;
    bough_spans prompts;
} lone_call;

static void run_call(bough_thread *thread, void *argument) {
    const lone_call *lone = argument;
    const linear_call *call = &lone->call;
    bough_linear(call->parts, call->count, call->x, call->x_stride, call->y, call->y_stride, call->bias, call->m,
                 lone->prompts, call->scratch, thread);
}

void bough_linear_alone(bough_thread_pool *pool, const bough_weight *parts, int count, const float *x, int64_t x_stride,
                        float *y, int64_t y_stride, const float *bias, int64_t m, bool prompt, void *scratch) {
    int64_t bounds[3] = {0, 0, m};
    lone_call lone = {{parts, count, x, x_stride, y, y_stride, bias, m, scratch}, {bounds, prompt ? 2 : 0}};
    bough_thread_pool_run(pool, run_call, &lone);
}
