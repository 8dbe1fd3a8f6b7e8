/* fuzz_input.h: what the fuzz targets share: the input as a stream, a clock and an allocator that the input decides on.
 *
 * A target defines `LLVMFuzzerTestOneInput`; libFuzzer or fuzz_driver.c calls it. Include this before the code under test and
 * define FUZZ_CLOCK or FUZZ_ALLOCATOR to have it see the clock or the allocator of this file.
 */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                                \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                                    \
        }                                                                                               \
    } while (0)

/* The checks' own branches tell libFuzzer nothing. */
#ifdef __clang__
#define FUZZ_QUIET __attribute__((no_sanitize("coverage")))
#else
#define FUZZ_QUIET
#endif

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n);
void fuzz_summary(void); /* fuzz_driver.c calls it after the last input */

/* ---- the input: zeros after its end ---- */

static const uint8_t *fuzz_at, *fuzz_end;

static inline int fuzz_is_over(void) { return fuzz_at == fuzz_end; }

static inline uint64_t fuzz_take(unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes && fuzz_at < fuzz_end; i++) value |= (uint64_t)*fuzz_at++ << 8 * i;
    return value;
}

static inline uint8_t fuzz_u8(void) { return (uint8_t)fuzz_take(1); }
static inline uint64_t fuzz_below(uint64_t bound) { return fuzz_take(bound > 256 ? 2 : 1) % bound; }

/* n bytes in an allocation of exactly that size; the caller frees them. What the input lacks is zero. */
static inline uint8_t *fuzz_bytes(size_t n) {
    uint8_t *out = calloc(n ? n : 1, 1);
    CHECK(out != NULL);
    size_t left = (size_t)(fuzz_end - fuzz_at), taken = n < left ? n : left;
    if (taken) memcpy(out, fuzz_at, taken);
    fuzz_at += taken;
    if (n != 0) return out;
    free(out);
    return malloc(0); /* not one byte of it is readable */
}

/* A 64-bit number of an edge or of raw bytes. */
static inline uint64_t fuzz_number(void) {
    static const uint64_t edges[] = {0, 1, 2, 255, 256, 4095, 4096, 4097, 65535, 1u << 30, (1u << 30) + 1, UINT32_MAX,
                                     1ull << 32, 1ull << 63, UINT64_MAX - (1u << 30), UINT64_MAX};
    uint8_t which = fuzz_u8();
    return which < 16 ? edges[which] : which < 128 ? fuzz_take(2) : fuzz_take(8);
}

/* ---- the clock: moves by a microsecond a look and as far as the input says ---- */

static uint64_t fuzz_now_ns;

static inline int fuzz_clock(int clock, struct timespec *out) {
    (void)clock;
    fuzz_now_ns += 1000;
    out->tv_sec = (time_t)(fuzz_now_ns / 1000000000u);
    out->tv_nsec = (long)(fuzz_now_ns % 1000000000u);
    return 0;
}

/* ---- the allocator: the input may have one of the next calls fail ---- */

static unsigned fuzz_fail_in; /* 0: none fails */
static uint64_t fuzz_failed;  /* allocations refused so far */

static inline int fuzz_refuses(void) {
    if (fuzz_fail_in == 0 || --fuzz_fail_in != 0) return 0;
    fuzz_failed++;
    return 1;
}

static inline void *fuzz_malloc(size_t n) { return fuzz_refuses() ? NULL : malloc(n); }
static inline void *fuzz_calloc(size_t n, size_t size) { return fuzz_refuses() ? NULL : calloc(n, size); }

static inline void fuzz_begin(const uint8_t *bytes, size_t n) {
    fuzz_at = bytes;
    fuzz_end = bytes + n;
    fuzz_now_ns = 1000000000u;
    fuzz_fail_in = 0;
    fuzz_failed = 0;
}

#endif
