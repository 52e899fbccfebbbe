/* Included before every source: takes the first version of symbols that have newer ones, of the same code, so that what
 * is built with a new glibc loads with 2.28, as torch does. A symbol that a source does not use is not affected. */
#include <features.h>
#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#ifdef __x86_64__
#define FIRST_VERSION(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#else
#define FIRST_VERSION(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
FIRST_VERSION(log);
FIRST_VERSION(pthread_create);
FIRST_VERSION(pthread_join);
FIRST_VERSION(pthread_sigmask);
#endif
