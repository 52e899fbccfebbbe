/* Waiting is the whole difficulty here: a step has hundreds of barriers, so threads must meet within a microsecond, yet
 * on a machine that others use too, a thread that spins may hold the core that another thread of the pool needs. So a
 * waiter spins for a bounded while, then offers its core to others, then sleeps in the kernel until it is woken.
 *
 * One number holds all that the threads agree on: the phase (how many barriers are closed), how many threads have drawn
 * tiles in it and not yet come to its end, and the next tile. It changes atomically, so that no thread draws a tile of
 * another phase.
 */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* A patient pool yields for about a millisecond: longer than what lies between two steps, because waking a thread costs
 * more than its share of one. */
enum { SPINS = 4000, FEW_YIELDS = 20, MANY_YIELDS = 1000, CACHE_LINE = 128 };

/* A number that threads wait for a change of. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t value;
    _Atomic int sleepers;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} signal_word;

/* The common number: phase, working threads, next tile. */
enum { TILE_BITS = 32, WORKING_BITS = 8 };
#define ONE_WORKING (UINT64_C(1) << TILE_BITS)
#define ONE_PHASE (ONE_WORKING << WORKING_BITS)
#define PHASE_MASK ((UINT32_C(1) << (64 - TILE_BITS - WORKING_BITS)) - 1)

/* A thread, and what is dealt out to it. Each on cache lines of its own, so that no two cores write to one. */
typedef struct {
    _Alignas(CACHE_LINE) bough_thread view;
    pthread_t worker;
    /* How much of its share is drawn: the phase, and the number of tiles. What stands there of another phase counts as
     * nothing drawn, so that nobody need clear it. */
    _Alignas(CACHE_LINE) _Atomic uint64_t drawn;
} member;

struct bough_thread_pool {
    _Alignas(CACHE_LINE) _Atomic uint64_t common;
    signal_word closed;     /* changes with each phase that is closed */
    signal_word job_number; /* counts the jobs: workers wait for the next */
    signal_word departures; /* of workers from jobs */
    /* Lowest bit: the job is open to workers; the others count those in it. */
    _Alignas(CACHE_LINE) _Atomic uint32_t gate;
    _Atomic bool stopping;
    bough_job job;
    void *argument;
    uint32_t first_phase; /* of the job */
    int threads, yields;
    member members[]; /* one for each thread */
};

static uint32_t phase_of(uint64_t common) { return (uint32_t)(common >> (TILE_BITS + WORKING_BITS)); }

static uint32_t working_of(uint64_t common) { return (uint32_t)(common >> TILE_BITS) & ((1 << WORKING_BITS) - 1); }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* `yield` does nothing on most cores; this waits for some ten cycles */
#endif
}

static void word_init(signal_word *word) {
    atomic_init(&word->value, 0);
    atomic_init(&word->sleepers, 0);
#if !defined(__linux__)
    pthread_mutex_init(&word->mutex, NULL);
    pthread_cond_init(&word->changed, NULL);
#endif
}

static void word_sleep(signal_word *word, uint32_t seen) {
    atomic_fetch_add(&word->sleepers, 1);
#if defined(__linux__)
    while (atomic_load(&word->value) == seen)
        syscall(SYS_futex, &word->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    pthread_mutex_lock(&word->mutex);
    while (atomic_load(&word->value) == seen)
        pthread_cond_wait(&word->changed, &word->mutex);
    pthread_mutex_unlock(&word->mutex);
#endif
    atomic_fetch_sub(&word->sleepers, 1);
}

static void word_await_change(signal_word *word, uint32_t seen, int yields) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&word->value, memory_order_acquire) != seen)
            return;
        relax();
    }
    for (int turn = 0; turn < yields; turn++) {
        if (atomic_load_explicit(&word->value, memory_order_acquire) != seen)
            return;
        sched_yield();
    }
    word_sleep(word, seen);
}

static void word_advance(signal_word *word) {
    atomic_fetch_add(&word->value, 1);
    if (atomic_load(&word->sleepers) == 0)
        return;
#if defined(__linux__)
    syscall(SYS_futex, &word->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&word->mutex);
    pthread_cond_broadcast(&word->changed);
    pthread_mutex_unlock(&word->mutex);
#endif
}

/* Draws `count` of the common tiles, or just enters the phase with `count` 0; false if it is closed, or none is left. */
static bool enter(bough_thread *thread, int64_t count, int64_t tiles, uint64_t *seen) {
    bough_thread_pool *pool = thread->pool;
    *seen = atomic_load_explicit(&pool->common, memory_order_acquire);
    do {
        if (phase_of(*seen) != thread->phase || (uint32_t)*seen >= tiles)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&pool->common, seen, *seen + ONE_WORKING + (uint64_t)count,
                                                    memory_order_acquire, memory_order_acquire));
    thread->working = 1;
    return true;
}

int64_t bough_tile(bough_thread *thread, int64_t tiles) { return bough_tiles(thread, 1, tiles); }

int64_t bough_tiles(bough_thread *thread, int64_t count, int64_t tiles) {
    uint64_t seen;
    if (thread->working) /* so the phase cannot end */
        return (uint32_t)atomic_fetch_add_explicit(&thread->pool->common, (uint64_t)count, memory_order_relaxed);
    return enter(thread, count, tiles, &seen) ? (uint32_t)seen : BOUGH_NO_TILE;
}

/* One tile of the share of thread `owner`, which is `size` large. */
static int64_t draw(bough_thread *thread, int owner, int64_t size) {
    _Atomic uint64_t *drawn = &thread->pool->members[owner].drawn;
    uint64_t seen = atomic_load_explicit(drawn, memory_order_relaxed), next;
    do {
        uint64_t count = seen >> 32 == thread->phase ? (uint32_t)seen : 0;
        if ((int64_t)count >= size)
            return BOUGH_NO_TILE;
        next = ((uint64_t)thread->phase << 32) + count + 1;
    } while (!atomic_compare_exchange_weak_explicit(drawn, &seen, next, memory_order_relaxed, memory_order_relaxed));
    return (uint32_t)next - 1;
}

int64_t bough_shared_out_tile(bough_thread *thread, int64_t tiles) {
    uint64_t seen;
    if (!thread->working && !enter(thread, 0, BOUGH_NO_TILE, &seen))
        return BOUGH_NO_TILE;
    for (; thread->share < thread->threads; thread->share++) {
        int owner = (thread->index + thread->share) % thread->threads;
        int64_t first = tiles * owner / thread->threads, end = tiles * (owner + 1) / thread->threads;
        int64_t tile = draw(thread, owner, end - first);
        if (tile != BOUGH_NO_TILE)
            return first + tile;
    }
    return BOUGH_NO_TILE;
}

/* Whether the phase is over, as far as one can know without waiting; the last to come closes it. */
static bool arrive(bough_thread *thread) {
    bough_thread_pool *pool = thread->pool;
    uint64_t seen = atomic_load_explicit(&pool->common, memory_order_acquire), next;
    do {
        if (phase_of(seen) != thread->phase)
            return true; /* closed without this thread */
        next = seen - (thread->working ? ONE_WORKING : 0);
        if (working_of(next) > 0 && !thread->working)
            return false; /* a working thread closes the phase */
        if (working_of(next) == 0)
            next = (uint64_t)((thread->phase + 1) & PHASE_MASK) * ONE_PHASE;
    } while (!atomic_compare_exchange_weak_explicit(&pool->common, &seen, next, memory_order_acq_rel,
                                                    memory_order_acquire));
    if (phase_of(next) == thread->phase)
        return false;
    word_advance(&pool->closed);
    return true;
}

static void begin_phase(bough_thread *thread, uint32_t phase) {
    thread->phase = phase & PHASE_MASK;
    thread->working = thread->share = 0;
}

static bool is_closed(const bough_thread *thread) {
    return phase_of(atomic_load_explicit(&thread->pool->common, memory_order_acquire)) != thread->phase;
}

void bough_barrier(bough_thread *thread) {
    signal_word *closed = &thread->pool->closed;
    if (!arrive(thread))
        for (;;) { /* not for the common number: looking at it all the time would slow down those that still draw */
            uint32_t seen = atomic_load_explicit(&closed->value, memory_order_acquire);
            if (is_closed(thread))
                break;
            word_await_change(closed, seen, thread->pool->yields);
        }
    begin_phase(thread, thread->phase + 1);
}

/* Takes part in the job if it is still open. */
static void join(bough_thread *thread) {
    bough_thread_pool *pool = thread->pool;
    uint32_t gate = atomic_load(&pool->gate);
    do {
        if (!(gate & 1))
            return;
    } while (!atomic_compare_exchange_weak(&pool->gate, &gate, gate + 2));
    begin_phase(thread, pool->first_phase);
    pool->job(thread, pool->argument);
    atomic_fetch_sub(&pool->gate, 2);
    word_advance(&pool->departures);
}

static void *work(void *view) {
    bough_thread *thread = view;
    bough_thread_pool *pool = thread->pool;
    for (uint32_t seen = 0;;) {
        word_await_change(&pool->job_number, seen, pool->yields);
        seen = atomic_load(&pool->job_number.value);
        if (atomic_load(&pool->stopping))
            return NULL;
        join(thread);
    }
}

void bough_thread_pool_run(bough_thread_pool *pool, bough_job job, void *argument) {
    bough_thread *thread = &pool->members[0].view;
    pool->job = job;
    pool->argument = argument;
    pool->first_phase = phase_of(atomic_load(&pool->common));
    begin_phase(thread, pool->first_phase);
    if (pool->threads == 1) {
        job(thread, argument);
        return;
    }
    atomic_store(&pool->gate, 1);
    word_advance(&pool->job_number);
    job(thread, argument);
    atomic_fetch_sub(&pool->gate, 1);
    for (;;) { /* those that are in it may still look at the argument */
        uint32_t seen = atomic_load(&pool->departures.value);
        if (atomic_load(&pool->gate) == 0)
            return;
        word_await_change(&pool->departures, seen, pool->yields);
    }
}

/* Starts the workers; signals are for the threads of the program that called. */
static bool start_workers(bough_thread_pool *pool) {
    sigset_t all, earlier;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &earlier);
    int wanted = pool->threads, started = 1;
    while (started < wanted && pthread_create(&pool->members[started].worker, NULL, work, &pool->members[started].view) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &earlier, NULL);
    pool->threads = started; /* where some are missing, the others can be stopped */
    return started == wanted;
}

bough_thread_pool *bough_thread_pool_create(int threads, bool patient) {
    _Static_assert(BOUGH_MAX_THREADS < 1 << WORKING_BITS, "all may work at once");
    if (threads < 1 || threads > BOUGH_MAX_THREADS)
        return NULL;
    size_t bytes = sizeof(bough_thread_pool) + (size_t)threads * sizeof(member);
    bough_thread_pool *pool = aligned_alloc(CACHE_LINE, bytes);
    if (pool == NULL)
        return NULL;
    memset(pool, 0, bytes);
    word_init(&pool->closed);
    word_init(&pool->job_number);
    word_init(&pool->departures);
    pool->threads = threads;
    pool->yields = patient ? MANY_YIELDS : FEW_YIELDS;
    for (int i = 0; i < threads; i++)
        pool->members[i].view = (bough_thread){.index = i, .threads = threads, .pool = pool};
    if (start_workers(pool))
        return pool;
    bough_thread_pool_destroy(pool);
    return NULL;
}

int bough_thread_pool_threads(const bough_thread_pool *pool) { return pool->threads; }

void bough_thread_pool_destroy(bough_thread_pool *pool) {
    atomic_store(&pool->stopping, true);
    word_advance(&pool->job_number);
    for (int i = 1; i < pool->threads; i++)
        pthread_join(pool->members[i].worker, NULL);
    free(pool);
}
