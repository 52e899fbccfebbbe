/* The thread pool that computes a step: all its threads run each operation together and share its tiles.
 *
 * `bough_tile` hands out 0, 1, 2, … to whichever thread asks next, counted anew from every barrier on.
 *
 *     for (int64_t tile; (tile = bough_tile(thread, tiles)) < tiles;)
 *         work_on(tile);
 *     bough_barrier(thread);      // all tiles are done, and their results visible to all
 *
 * A barrier waits until all tiles are done, not for all threads: a thread that the system has taken off its core delays
 * the others only if it holds a tile. When it comes back, it gets no tiles of closed phases and passes their barriers
 * until it has caught up. Hence three rules for operations: draw tiles until there are none before the barrier; write
 * what others read only while holding a tile (anything else goes to memory that is the thread's own in all operations);
 * let the number of barriers depend on the arguments alone.
 */
#ifndef BOUGH_THREAD_POOL_H
#define BOUGH_THREAD_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BOUGH_EXPORT __attribute__((visibility("default")))
#else
#define BOUGH_EXPORT
#endif

typedef struct bough_thread_pool bough_thread_pool;

/* One thread's view of its pool. */
typedef struct bough_thread {
    int index, threads; /* this one's number, and how many there are */
    bough_thread_pool *pool;
    uint32_t phase; /* barriers that this thread has passed */
    int working;    /* it has drawn a tile since the last one */
    int share;      /* whose share it draws from, counted from this thread */
} bough_thread;

typedef void (*bough_job)(bough_thread *thread, void *argument);

enum { BOUGH_MAX_THREADS = 255 };

/* A pool of `threads`, the caller being one of them; NULL where they cannot be started or are more than that. The
 * threads of a patient pool wait longer before they sleep: for machines with cores left for other processes. */
BOUGH_EXPORT bough_thread_pool *bough_thread_pool_create(int threads, bool patient);
BOUGH_EXPORT void bough_thread_pool_destroy(bough_thread_pool *pool);
int bough_thread_pool_threads(const bough_thread_pool *pool);

/* Calls job on all threads and returns when all are done. One caller at a time. */
BOUGH_EXPORT void bough_thread_pool_run(bough_thread_pool *pool, bough_job job, void *argument);

/* Waits until all tiles are done. */
void bough_barrier(bough_thread *thread);

#define BOUGH_NO_TILE (INT64_C(1) << 40) /* more tiles than anybody has */

/* The next of `tiles` since the last barrier; `tiles` or more when there is none left. BOUGH_NO_TILE for `tiles` where
 * their number is not known. */
int64_t bough_tile(bough_thread *thread, int64_t tiles);

/* The first of `count` tiles that no other thread gets; for work in pieces so small that asking would cost. */
int64_t bough_tiles(bough_thread *thread, int64_t count, int64_t tiles);

/* The same for many tiles: each thread has a share of neighbours, and takes from the others' when it is through with its
 * own. Threads that draw from one counter wait for each other's draws, which eight of them do for as long as a small
 * product takes. One operation deals either so or with the others, not both between two barriers. */
int64_t bough_shared_out_tile(bough_thread *thread, int64_t tiles);

#endif
