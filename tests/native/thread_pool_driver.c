/* Deals tiles out in all ways, phase after phase, and counts: every tile is drawn once, and no phase begins before all
 * tiles of the one before it are done. More threads than cores, so that some come late. Prints what went wrong. */
#include "thread_pool.h"

#include <stdio.h>
#include <stdlib.h>

enum { PHASES = 300, TILES = 40, JOBS = 60 };

static _Atomic int drawn[PHASES][TILES], done[PHASES], early;

static int64_t tiles_of(int phase) { return (phase * 7 + phase / 3) % (TILES + 1); }

static void take(int phase, int64_t tile) {
    if (phase > 0 && atomic_load(&done[phase - 1]) != tiles_of(phase - 1))
        atomic_fetch_add(&early, 1);
    for (volatile int i = 0; i < 40 * (int)(tile % 3); i++)
        ;
    atomic_fetch_add(&drawn[phase][tile], 1);
    atomic_fetch_add(&done[phase], 1);
}

static void job(bough_thread *thread, void *argument) {
    (void)argument;
    for (int phase = 0; phase < PHASES; phase++) {
        int64_t tiles = tiles_of(phase);
        if (phase % 3 == 0)
            for (int64_t tile; (tile = bough_tile(thread, tiles)) < tiles;)
                take(phase, tile);
        else if (phase % 3 == 1)
            for (int64_t tile; (tile = bough_shared_out_tile(thread, tiles)) < tiles;)
                take(phase, tile);
        else
            for (int64_t first; (first = bough_tiles(thread, 4, tiles)) < tiles;)
                for (int64_t tile = first; tile < first + 4 && tile < tiles; tile++)
                    take(phase, tile);
        bough_barrier(thread);
    }
}

int main(int count, char **arguments) {
    int threads = count > 1 ? atoi(arguments[1]) : 4, wrong = 0;
    bough_thread_pool *pool = bough_thread_pool_create(threads, threads % 2 == 0);
    for (int number = 0; number < JOBS; number++) {
        bough_thread_pool_run(pool, job, NULL);
        for (int phase = 0; phase < PHASES; phase++) {
            for (int64_t tile = 0; tile < TILES; tile++)
                wrong += atomic_exchange(&drawn[phase][tile], 0) != (tile < tiles_of(phase));
            atomic_store(&done[phase], 0);
        }
    }
    bough_thread_pool_destroy(pool);
    printf("%d tiles not drawn once, %d phases begun early\n", wrong, atomic_load(&early));
    return wrong > 0 || atomic_load(&early) > 0;
}
