/* Waiting is the whole difficulty here: a step has hundreds of barriers, so threads must meet within a microsecond, yet
 * on a machine that others use too, a thread that spins may hold the very core that its fellow needs. So a waiter spins
 * for a bounded while, then offers its core to others, then sleeps in the kernel until it is woken.
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

enum { SPINS = 4000, YIELDS = 20, CACHE_LINE = 128 };

/* A number that threads wait for a change of. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t value;
    _Atomic int sleepers;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} signal_word;

struct bough_crew {
    signal_word job_number; /* counts the jobs: workers wait for the next */
    signal_word phase;      /* counts the barriers */
    _Alignas(CACHE_LINE) _Atomic int arrived;
    _Alignas(CACHE_LINE) _Atomic int64_t tile;
    _Alignas(CACHE_LINE) bough_job job; /* NULL: go home */
    void *argument;
    int threads;
    bough_team *views;
    pthread_t *workers;
};

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

static void word_await_change(signal_word *word, uint32_t seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load_explicit(&word->value, memory_order_acquire) != seen)
            return;
        relax();
    }
    for (int turn = 0; turn < YIELDS; turn++) {
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

void bough_barrier(bough_team *team) {
    bough_crew *crew = team->crew;
    uint32_t seen = atomic_load_explicit(&crew->phase.value, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&crew->arrived, 1, memory_order_acq_rel) + 1 < crew->threads) {
        word_await_change(&crew->phase, seen);
        return;
    }
    atomic_store_explicit(&crew->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&crew->tile, 0, memory_order_relaxed);
    word_advance(&crew->phase);
}

int64_t bough_tile(bough_team *team) { return bough_tiles(team, 1); }

int64_t bough_tiles(bough_team *team, int64_t count) {
    return atomic_fetch_add_explicit(&team->crew->tile, count, memory_order_relaxed);
}

static void *work(void *view) {
    bough_team *team = view;
    bough_crew *crew = team->crew;
    for (uint32_t seen = 0;; seen++) {
        word_await_change(&crew->job_number, seen);
        if (crew->job == NULL)
            return NULL;
        crew->job(team, crew->argument);
        bough_barrier(team);
    }
}

void bough_crew_run(bough_crew *crew, bough_job job, void *argument) {
    crew->job = job;
    crew->argument = argument;
    word_advance(&crew->job_number);
    job(&crew->views[0], argument);
    bough_barrier(&crew->views[0]);
}

/* Starts the workers; signals are for the threads of the program that called. */
static bool start_workers(bough_crew *crew) {
    sigset_t all, earlier;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &earlier);
    int wanted = crew->threads, started = 1;
    while (started < wanted && pthread_create(&crew->workers[started], NULL, work, &crew->views[started]) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &earlier, NULL);
    crew->threads = started; /* so that, short of some, those that are there can be sent home */
    return started == wanted;
}

bough_crew *bough_crew_create(int threads) {
    if (threads < 1)
        return NULL;
    bough_crew *crew = aligned_alloc(CACHE_LINE, sizeof(bough_crew));
    if (crew == NULL)
        return NULL;
    memset(crew, 0, sizeof *crew);
    word_init(&crew->job_number);
    word_init(&crew->phase);
    crew->threads = threads;
    crew->views = calloc((size_t)threads, sizeof *crew->views);
    crew->workers = calloc((size_t)threads, sizeof *crew->workers);
    for (int thread = 0; crew->views != NULL && thread < threads; thread++)
        crew->views[thread] = (bough_team){.thread = thread, .threads = threads, .crew = crew};
    if (crew->views != NULL && crew->workers != NULL && start_workers(crew))
        return crew;
    if (crew->views == NULL || crew->workers == NULL)
        crew->threads = 1;
    bough_crew_destroy(crew);
    return NULL;
}

void bough_crew_destroy(bough_crew *crew) {
    crew->job = NULL;
    word_advance(&crew->job_number);
    for (int thread = 1; thread < crew->threads; thread++)
        pthread_join(crew->workers[thread], NULL);
    free(crew->workers);
    free(crew->views);
    free(crew);
}
