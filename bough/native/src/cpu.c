#define _GNU_SOURCE
#include "cpu.h"

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
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found |= BOUGH_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        found |= BOUGH_AVX512;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return found;
    unsigned tiles = 1u << 24, bytes = 1u << 25, bfloat16 = 1u << 22;
    if ((found & BOUGH_AVX512) && (d & tiles) && (d & bytes) && (d & bfloat16) && tiles_granted())
        found |= BOUGH_AMX;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        if ((found & BOUGH_AVX2) && (a & 1u << 4))
            found |= BOUGH_AVXVNNI;
        if ((found & BOUGH_AVX512) && (a & 1u << 5))
            found |= BOUGH_AVX512BF16;
    }
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
static unsigned detect(void) {
    unsigned found = 0;
    unsigned long has = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
    if ((has & HWCAP_ASIMDDP) && (has & HWCAP_ASIMDHP))
        found |= BOUGH_NEON;
    if ((found & BOUGH_NEON) && (more & HWCAP2_I8MM))
        found |= BOUGH_I8MM;
    return found;
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
