/* Host tier: sums, copies and gathers without the GIL, and the machine's own copy speed for benchmarks.
 *
 * Invariants: touches only the memory it is given; keeps no state; a cancelled gather has written nothing to the sums
 * of blocks it did not finish, and returns within one chunk (256 KiB) of copying.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "xxh3.h"

enum { KV_CHUNK = 256 * 1024 };

typedef struct { uint64_t addr, len; } kv_iov;

static uint64_t kv_sum(uint64_t addr, size_t n) { return kvx_sum((const void *)(uintptr_t)addr, n); }

static uint64_t kv_copy_sum(uint64_t dst, uint64_t src, size_t n)
{
    return kvx_copy_sum((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, n);
}

static int kv_is_cancelled(const int32_t *cancel) { return cancel && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0; }

/* One value of several pieces, or a long one: false when cancelled under way. */
static int kv_gather_one(const kv_iov *iov, size_t pieces, uint8_t *dst, const int32_t *cancel, uint64_t *sum)
{
    kvx_state state;
    kvx_begin(&state);
    for (size_t p = 0; p < pieces; p++) {
        const uint8_t *src = (const uint8_t *)(uintptr_t)iov[p].addr;
        for (uint64_t left = iov[p].len; left > 0;) {
            size_t n = left < KV_CHUNK ? (size_t)left : KV_CHUNK;
            if (kv_is_cancelled(cancel)) return 0;
            kvx_copy(&state, dst, src, n);
            src += n;
            left -= n;
            if (dst) dst += n;
        }
    }
    *sum = kvx_end(&state);
    return 1;
}

/* Block i: the pieces iov[first[i]] .. iov[first[i + 1] - 1], one after the other, to dst[i] (0 = sum only), its sum to
 * sums[i]. Returns how many blocks were done; fewer than n only when *cancel became non-zero. */
static size_t kv_gather(size_t n, uint64_t first_addr, uint64_t iov_addr, uint64_t dst_addr, uint64_t sums_addr,
                        uint64_t cancel_addr)
{
    const uint32_t *first = (const uint32_t *)(uintptr_t)first_addr;
    const kv_iov *iov = (const kv_iov *)(uintptr_t)iov_addr;
    const uint64_t *dst = (const uint64_t *)(uintptr_t)dst_addr;
    uint64_t *sums = (uint64_t *)(uintptr_t)sums_addr;
    const int32_t *cancel = (const int32_t *)(uintptr_t)cancel_addr;
    for (size_t i = 0; i < n; i++) {
        const kv_iov *pieces = iov + first[i];
        size_t count = first[i + 1] - first[i];
        uint8_t *to = (uint8_t *)(uintptr_t)dst[i];
        if (kv_is_cancelled(cancel)) return i;
        if (count == 1 && pieces->len <= KV_CHUNK) {
            const void *src = (const void *)(uintptr_t)pieces->addr;
            sums[i] = to ? kvx_copy_sum(to, src, (size_t)pieces->len) : kvx_sum(src, (size_t)pieces->len);
        } else if (!kv_gather_one(pieces, count, to, cancel, &sums[i])) {
            return i;
        }
    }
    return n;
}

static uint64_t kv_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Times `count` copies of n bytes from places all over src (working_set bytes) to places all over dst, into ns[count].
 * summed: 0 memcpy, 1 copy with sum, 2 sum only. */
static uint64_t kv_copy_times(uint64_t dst, uint64_t src, uint64_t working_set, size_t n, size_t count,
                              uint64_t ns_addr, int summed)
{
    uint64_t *ns = (uint64_t *)(uintptr_t)ns_addr;
    uint64_t places = working_set / n, state = 88172645463325252u, folded = 0;
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        const uint8_t *from = (const uint8_t *)(uintptr_t)src + (state % places) * n;
        uint8_t *to = (uint8_t *)(uintptr_t)dst + ((state >> 20) % places) * n;
        uint64_t start = kv_now_ns();
        if (summed == 0) memcpy(to, from, n);
        else folded ^= summed == 1 ? kvx_copy_sum(to, from, n) : kvx_sum(from, n);
        __asm__ volatile("" ::"r"(to) : "memory");
        ns[i] = kv_now_ns() - start;
    }
    return folded;
}
