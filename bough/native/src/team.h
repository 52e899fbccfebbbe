/* The threads that compute a step together, and the two things by which they agree: a counter of tiles and a barrier.
 *
 * Every operation is called by all threads of a team. It deals out its work with `bough_tile`, which hands out 0, 1, 2, …
 * to whichever thread asks next, counted anew from every barrier on.
 *
 *     for (int64_t tile; (tile = bough_tile(team, tiles)) < tiles;)
 *         work_on(tile);
 *     bough_barrier(team);        // all tiles are done, and their results visible to all
 *
 * The team is elastic: a barrier waits until all tiles are done, not for all threads. A thread that the system has taken
 * off its core holds the others up only if it has a tile in hand. When it comes back, it finds its phases closed: it gets
 * no tiles and passes the barriers, and has soon caught up. Hence three rules for operations: draw tiles until there are
 * none before the barrier; write to what others read only with a tile in hand (what a thread computes besides goes to
 * memory that is its own in all operations); let the number of barriers depend on the arguments alone.
 */
#ifndef BOUGH_TEAM_H
#define BOUGH_TEAM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BOUGH_EXPORT __attribute__((visibility("default")))
#else
#define BOUGH_EXPORT
#endif

typedef struct bough_crew bough_crew;

/* One thread's view of its team. */
typedef struct bough_team {
    int thread, threads; /* this one's number, and how many there are */
    bough_crew *crew;
    uint32_t phase; /* barriers that this thread has passed */
    int working;    /* it has drawn a tile since the last one */
    int host;       /* counted from this thread, the one whose share it draws from */
} bough_team;

typedef void (*bough_job)(bough_team *team, void *argument);

enum { BOUGH_MAX_THREADS = 255 };

/* A team of `threads`, the caller being one of them; NULL where threads cannot be had, or are more than that.
 * A patient one waits longer before it sleeps: for where other processes have cores of their own, and need not take turns
 * with it. */
BOUGH_EXPORT bough_crew *bough_crew_create(int threads, bool patient);
BOUGH_EXPORT void bough_crew_destroy(bough_crew *crew);
int bough_crew_threads(const bough_crew *crew);

/* Calls job on all threads and returns when all are done. One caller at a time. */
BOUGH_EXPORT void bough_crew_run(bough_crew *crew, bough_job job, void *argument);

/* Waits until all tiles are done. */
void bough_barrier(bough_team *team);

#define BOUGH_NO_TILE (INT64_C(1) << 40) /* more tiles than anybody has */

/* The next of `tiles` since the last barrier; `tiles` or more when there is none left. BOUGH_NO_TILE for `tiles` where
 * their number is not known. */
int64_t bough_tile(bough_team *team, int64_t tiles);

/* The first of `count` tiles that no other thread gets; for work in pieces so small that asking would cost. */
int64_t bough_tiles(bough_team *team, int64_t count, int64_t tiles);

/* The same for many tiles: each thread has a share of neighbours, and takes from the others' when it is through with its
 * own. Threads that draw from one counter wait for each other's draws, which eight of them do for as long as a small
 * product takes. One operation deals either so or with the others, not both between two barriers. */
int64_t bough_shared_out_tile(bough_team *team, int64_t tiles);

#endif
