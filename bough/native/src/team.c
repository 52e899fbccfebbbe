/* Waiting is the whole difficulty here: a step has hundreds of barriers, so threads must meet within a microsecond, yet
 * on a machine that others use too, a thread that spins may hold the very core that its fellow needs. So a waiter spins
 * for a bounded while, then offers its core to others, then sleeps in the kernel until it is woken.
 *
 * One number holds all that the threads agree on: the phase (how many barriers are closed), how many threads have drawn
 * tiles in it and not yet come to its end, and the next tile. It changes at one stroke, so that nobody ever draws a tile
 * of a phase that is not his.
 */
#define _GNU_SOURCE
#include "team.h"

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

/* A patient crew yields for about a millisecond: longer than what lies between two steps, because waking a thread costs
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

/* A thread, and what is dealt out to it. Each on lines of its own: a line that two cores write to wanders between them. */
typedef struct {
    _Alignas(CACHE_LINE) bough_team view;
    pthread_t worker;
    /* How much of its share is drawn: the phase, and the number of tiles. What stands there of another phase counts as
     * nothing drawn, so that nobody need clear it. */
    _Alignas(CACHE_LINE) _Atomic uint64_t drawn;
} member;

struct bough_crew {
    _Alignas(CACHE_LINE) _Atomic uint64_t common;
    signal_word closed;     /* changes with each phase that is closed */
    signal_word job_number; /* counts the jobs: workers wait for the next */
    signal_word departures; /* of workers from jobs */
    /* Lowest bit: the job is open to workers; the others count those in it. */
    _Alignas(CACHE_LINE) _Atomic uint32_t gate;
    _Atomic bool dismissed;
    bough_job job;
    void *argument;
    uint32_t first_phase; /* of the job */
    int threads, yields;
    member *members;
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
static bool enter(bough_team *team, int64_t count, int64_t tiles, uint64_t *seen) {
    bough_crew *crew = team->crew;
    *seen = atomic_load_explicit(&crew->common, memory_order_acquire);
    do {
        if (phase_of(*seen) != team->phase || (uint32_t)*seen >= tiles)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&crew->common, seen, *seen + ONE_WORKING + (uint64_t)count,
                                                    memory_order_acquire, memory_order_acquire));
    team->working = 1;
    return true;
}

int64_t bough_tile(bough_team *team, int64_t tiles) { return bough_tiles(team, 1, tiles); }

int64_t bough_tiles(bough_team *team, int64_t count, int64_t tiles) {
    uint64_t seen;
    if (team->working) /* so the phase cannot end */
        return (uint32_t)atomic_fetch_add_explicit(&team->crew->common, (uint64_t)count, memory_order_relaxed);
    return enter(team, count, tiles, &seen) ? (uint32_t)seen : BOUGH_NO_TILE;
}

/* One tile of the share of thread `owner`, which is `size` large. */
static int64_t draw(bough_team *team, int owner, int64_t size) {
    _Atomic uint64_t *drawn = &team->crew->members[owner].drawn;
    uint64_t seen = atomic_load_explicit(drawn, memory_order_relaxed), next;
    do {
        uint64_t count = seen >> 32 == team->phase ? (uint32_t)seen : 0;
        if ((int64_t)count >= size)
            return BOUGH_NO_TILE;
        next = ((uint64_t)team->phase << 32) + count + 1;
    } while (!atomic_compare_exchange_weak_explicit(drawn, &seen, next, memory_order_relaxed, memory_order_relaxed));
    return (uint32_t)next - 1;
}

int64_t bough_shared_out_tile(bough_team *team, int64_t tiles) {
    uint64_t seen;
    if (!team->working && !enter(team, 0, BOUGH_NO_TILE, &seen))
        return BOUGH_NO_TILE;
    for (; team->host < team->threads; team->host++) {
        int owner = (team->thread + team->host) % team->threads;
        int64_t first = tiles * owner / team->threads, end = tiles * (owner + 1) / team->threads;
        int64_t tile = draw(team, owner, end - first);
        if (tile != BOUGH_NO_TILE)
            return first + tile;
    }
    return BOUGH_NO_TILE;
}

/* Whether the phase is over, as far as one can know without waiting; the last to come closes it. */
static bool arrive(bough_team *team) {
    bough_crew *crew = team->crew;
    uint64_t seen = atomic_load_explicit(&crew->common, memory_order_acquire), next;
    do {
        if (phase_of(seen) != team->phase)
            return true; /* closed without this thread */
        next = seen - (team->working ? ONE_WORKING : 0);
        if (working_of(next) > 0 && !team->working)
            return false; /* nothing to say: whoever works closes the phase */
        if (working_of(next) == 0)
            next = (uint64_t)((team->phase + 1) & PHASE_MASK) * ONE_PHASE;
    } while (!atomic_compare_exchange_weak_explicit(&crew->common, &seen, next, memory_order_acq_rel,
                                                    memory_order_acquire));
    if (phase_of(next) == team->phase)
        return false;
    word_advance(&crew->closed);
    return true;
}

static void begin_phase(bough_team *team, uint32_t phase) {
    team->phase = phase & PHASE_MASK;
    team->working = team->host = 0;
}

static bool is_closed(const bough_team *team) {
    return phase_of(atomic_load_explicit(&team->crew->common, memory_order_acquire)) != team->phase;
}

void bough_barrier(bough_team *team) {
    signal_word *closed = &team->crew->closed;
    if (!arrive(team))
        for (;;) { /* not for the common number: looking at it all the time would slow down those that still draw */
            uint32_t seen = atomic_load_explicit(&closed->value, memory_order_acquire);
            if (is_closed(team))
                break;
            word_await_change(closed, seen, team->crew->yields);
        }
    begin_phase(team, team->phase + 1);
}

/* Takes part in the job if it is still open. */
static void join(bough_team *team) {
    bough_crew *crew = team->crew;
    uint32_t gate = atomic_load(&crew->gate);
    do {
        if (!(gate & 1))
            return;
    } while (!atomic_compare_exchange_weak(&crew->gate, &gate, gate + 2));
    begin_phase(team, crew->first_phase);
    crew->job(team, crew->argument);
    atomic_fetch_sub(&crew->gate, 2);
    word_advance(&crew->departures);
}

static void *work(void *view) {
    bough_team *team = view;
    bough_crew *crew = team->crew;
    for (uint32_t seen = 0;;) {
        word_await_change(&crew->job_number, seen, crew->yields);
        seen = atomic_load(&crew->job_number.value);
        if (atomic_load(&crew->dismissed))
            return NULL;
        join(team);
    }
}

void bough_crew_run(bough_crew *crew, bough_job job, void *argument) {
    bough_team *team = &crew->members[0].view;
    crew->job = job;
    crew->argument = argument;
    crew->first_phase = phase_of(atomic_load(&crew->common));
    begin_phase(team, crew->first_phase);
    if (crew->threads == 1) {
        job(team, argument);
        return;
    }
    atomic_store(&crew->gate, 1);
    word_advance(&crew->job_number);
    job(team, argument);
    atomic_fetch_sub(&crew->gate, 1);
    for (;;) { /* those that are in it may still look at the argument */
        uint32_t seen = atomic_load(&crew->departures.value);
        if (atomic_load(&crew->gate) == 0)
            return;
        word_await_change(&crew->departures, seen, crew->yields);
    }
}

/* Starts the workers; signals are for the threads of the program that called. */
static bool start_workers(bough_crew *crew) {
    sigset_t all, earlier;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &earlier);
    int wanted = crew->threads, started = 1;
    while (started < wanted && pthread_create(&crew->members[started].worker, NULL, work, &crew->members[started].view) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &earlier, NULL);
    crew->threads = started; /* so that, short of some, those that are there can be sent home */
    return started == wanted;
}

bough_crew *bough_crew_create(int threads, bool patient) {
    _Static_assert(BOUGH_MAX_THREADS < 1 << WORKING_BITS, "all may work at once");
    if (threads < 1 || threads > BOUGH_MAX_THREADS)
        return NULL;
    bough_crew *crew = aligned_alloc(CACHE_LINE, sizeof(bough_crew));
    if (crew == NULL)
        return NULL;
    memset(crew, 0, sizeof *crew);
    word_init(&crew->closed);
    word_init(&crew->job_number);
    word_init(&crew->departures);
    crew->threads = threads;
    crew->yields = patient ? MANY_YIELDS : FEW_YIELDS;
    crew->members = aligned_alloc(CACHE_LINE, (size_t)threads * sizeof *crew->members);
    for (int thread = 0; crew->members != NULL && thread < threads; thread++) {
        memset(&crew->members[thread], 0, sizeof *crew->members);
        crew->members[thread].view = (bough_team){.thread = thread, .threads = threads, .crew = crew};
    }
    if (crew->members != NULL && start_workers(crew))
        return crew;
    if (crew->members == NULL)
        crew->threads = 1;
    bough_crew_destroy(crew);
    return NULL;
}

int bough_crew_threads(const bough_crew *crew) { return crew->threads; }

void bough_crew_destroy(bough_crew *crew) {
    atomic_store(&crew->dismissed, true);
    word_advance(&crew->job_number);
    for (int thread = 1; thread < crew->threads; thread++)
        pthread_join(crew->members[thread].worker, NULL);
    free(crew->members);
    free(crew);
}
