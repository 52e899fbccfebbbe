/* The threads that compute a step together, and the two things by which they agree: a barrier and a counter of tiles.
 *
 * Every operation is called by all threads of a team at once. It deals out its work with `bough_tile`, which hands out
 * 0, 1, 2, … to whichever thread asks next, counted anew from every barrier on: a thread that the system takes off its
 * core delays the others by one tile at most.
 *
 *     for (int64_t tile; (tile = bough_tile(team)) < tiles;)
 *         work_on(tile);
 *     bough_barrier(team);        // all tiles are done, and their results visible to all
 *
 * An operation leaves no tile unfinished behind it: it ends with a barrier, unless its caller says otherwise.
 */
#ifndef BOUGH_TEAM_H
#define BOUGH_TEAM_H

#include <stdatomic.h>
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
} bough_team;

typedef void (*bough_job)(bough_team *team, void *argument);

/* A team of `threads`, the caller being one of them; NULL where threads cannot be had. */
BOUGH_EXPORT bough_crew *bough_crew_create(int threads);
BOUGH_EXPORT void bough_crew_destroy(bough_crew *crew);

/* Calls job on all threads and returns when all are done. One caller at a time. */
BOUGH_EXPORT void bough_crew_run(bough_crew *crew, bough_job job, void *argument);

/* Waits for all threads of the team. */
void bough_barrier(bough_team *team);

/* The next tile since the last barrier. */
int64_t bough_tile(bough_team *team);

/* The first of `count` tiles that no other thread gets; for work in pieces so small that asking would cost. */
int64_t bough_tiles(bough_team *team, int64_t count);

#endif
