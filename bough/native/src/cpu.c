#define _GNU_SOURCE
#include "cpu.h"

#include <stdbool.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

static unsigned allowed = ~0u;

#if defined(__x86_64__) || defined(__i386__)
/* Linux hands out the tiles' state, some kilobytes in each thread, only on request. */
static int tiles_granted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

static unsigned detect(void) {
    unsigned found = 0;
    unsigned a, b, c, d;
    __builtin_cpu_init();
    bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && halves)
        found |= BOUGH_AVX2;
    if ((found & BOUGH_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        found |= BOUGH_AVX512;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d))
        return found;
    if ((found & BOUGH_AVX2) && (a & 1u << 4))
        found |= BOUGH_AVXVNNI;
    bool bfloat16 = a & 1u << 5;
    /* Every CPU with tiles has the rest of what that variant is compiled with; a virtual one may hide some of it. */
    unsigned tiles = 1u << 24 | 1u << 25 | 1u << 22, permuted_bytes = 1u << 1;
    if ((found & BOUGH_AVX512) && bfloat16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) == tiles &&
        (c & permuted_bytes) && tiles_granted())
        found |= BOUGH_AMX;
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
static unsigned detect(void) {
    unsigned long has = getauxval(AT_HWCAP);
    return (has & HWCAP_ASIMDDP) && (has & HWCAP_ASIMDHP) ? BOUGH_NEON : 0;
}
#elif defined(__aarch64__) && defined(__APPLE__)
static unsigned detect(void) { return BOUGH_NEON; /* every one of Apple's */ }
#else
static unsigned detect(void) { return 0; }
#endif

unsigned bough_cpu_features(void) {
    static _Atomic unsigned known = 0; /* the highest bit says that the rest has been found out */
    unsigned features = atomic_load(&known);
    if (features == 0) {
        features = detect() | 1u << 31;
        atomic_store(&known, features);
    }
    return features & allowed & ~(1u << 31);
}

void bough_cpu_allow(unsigned mask) { allowed = mask; }
