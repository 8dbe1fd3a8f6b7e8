/* resolver.c: a kv_resolve_fn over a plain array, and the sum, for tests of the data service without a directory.
 *
 * Key: u64 index, u64 KEY_MARK. Context: u64 count, u64 delay_ns, u64 epoch, kv_found[count].
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "wire.h"
#include "xxh3.h"

#define KEY_MARK 0x79656b747365746bull

typedef struct {
    uint64_t count, delay_ns, epoch;
    kv_found items[];
} test_table;

size_t test_resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch) {
    const test_table *table = ctx;
    size_t hits = 0;
    *epoch = (uint32_t)table->epoch;
    if (table->delay_ns) {
        struct timespec pause = {0, (long)table->delay_ns};
        nanosleep(&pause, NULL);
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t key[2];
        memcpy(key, keys + 16 * i, 16);
        if (key[1] != KEY_MARK || key[0] >= table->count) {
            memset(&out[i], 0, sizeof out[i]);
            out[i].status = KV_MISS;
            continue;
        }
        out[i] = table->items[key[0]];
        hits += out[i].status == KV_HIT;
    }
    return hits;
}

uint64_t test_sum(const void *bytes, size_t n) { return kvx_sum(bytes, n); }
