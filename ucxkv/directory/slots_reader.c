/* The slot table's reader side: look-ups, and values copied out of mapped segments; the promises are in slots.h.
 *
 * Why no answer is stale. A node may be deposed, or frozen by its machine, while its memory can still be read, and another
 * node may by then have decided otherwise. So each call here ends with serving(): what was read is answered only if, after
 * the last load of the table and of the values, the lease still runs and the epoch is the reader's. In this order:
 *
 *   1. slots and values are loaded;
 *   2. an acquire fence, then lease_end_ns, then the header's epoch (each an acquire load);
 *   3. the clock, which the kernel's vDSO reads in program order (lfence or rdtscp, isb on Arm): not before the loads.
 *
 * If the clock in (3) is before the end in (2), then so was the moment of every load in (1): the node was the leader at that
 * moment, which lies within the call, and what the answer says was true then (I7). A clock read first would prove nothing: a
 * reader that sleeps between clock and loads would answer from whatever it finds when it wakes. That a caller sleeps after
 * (3) does no harm. Where the lease is set again under one epoch, nobody else has led in between, so the table was right all
 * along; where somebody may have, the writer goes over to a new epoch, and (2) sees it if it sees the new lease.
 * Readers and writer share CLOCK_MONOTONIC: one machine, one time namespace. It stands still while a machine is suspended.
 */
#include "slots_atomic.h"

#define READ_TRIES 8u               /* how often one key's value is read again because its slot changed under the copy */
#define CANCEL_STEP (256u * 1024u) /* bytes copied between two looks at *cancel */

/* Whole copies of the slots of the keys found: out[i], found[i] = 1, else found[i] = 0 and out[i] zeroed. Returns the hits, or
 * SLOTS_UNSERVED; then out and found mean nothing. */
uint64_t slots_lookup(const kv_table *t, uint64_t n, const void *keys, void *out, void *found) {
    const uint8_t *k = keys;
    kv_slot *o = out;
    uint8_t *f = found;
    uint64_t hits = 0;
    stream s;
    stream_open(&s, t, n, k);
    for (uint64_t at = 0; at < n; at += BATCH) {
        unsigned m = stream_count(&s, at);
        const batch *b = stream_next(&s, at);
        for (unsigned i = 0; i < m; i++) {
            kv_slot copy;
            int hit = batch_search(t, k + 16 * (at + i), b, i, &copy) != SLOTS_NONE;
            f[at + i] = (uint8_t)hit;
            hits += (unsigned)hit;
            if (hit) o[at + i] = copy;
            else memset(&o[at + i], 0, sizeof copy);
        }
    }
    return serving(t) == SERVED ? hits : SLOTS_UNSERVED;
}

static uint64_t match(const kv_table *t, uint64_t n, const uint8_t *k) {
    stream s;
    kv_slot copy;
    stream_open(&s, t, n, k);
    for (uint64_t at = 0; at < n; at += BATCH) {
        unsigned m = stream_count(&s, at);
        const batch *b = stream_next(&s, at);
        for (unsigned i = 0; i < m; i++)
            if (batch_search(t, k + 16 * (at + i), b, i, &copy) == SLOTS_NONE) return at + i;
    }
    return n;
}

/* How many keys from the first on are visible, up to the first that is not, or SLOTS_UNSERVED. Looks at one batch at a time. */
uint64_t slots_match(const kv_table *t, uint64_t n, const void *keys) {
    uint64_t run = match(t, n, keys);
    return serving(t) == SERVED ? run : SLOTS_UNSERVED;
}

/* out[i] = 1 where keys[i] is visible. Returns how many are, or SLOTS_UNSERVED. */
uint64_t slots_exists(const kv_table *t, uint64_t n, const void *keys, void *out) {
    const uint8_t *k = keys;
    uint8_t *o = out;
    uint64_t hits = 0;
    stream s;
    kv_slot copy;
    stream_open(&s, t, n, k);
    for (uint64_t at = 0; at < n; at += BATCH) {
        unsigned m = stream_count(&s, at);
        const batch *b = stream_next(&s, at);
        for (unsigned i = 0; i < m; i++) {
            o[at + i] = batch_search(t, k + 16 * (at + i), b, i, &copy) != SLOTS_NONE;
            hits += o[at + i];
        }
    }
    return serving(t) == SERVED ? hits : SLOTS_UNSERVED;
}

/* Where a slot's value lies here, or NULL when its region is not mapped or the extent does not lie within it. */
static const uint8_t *value_at(const kv_region *regions, uint64_t n_regions, const kv_slot *s) {
    if (s->region >= n_regions) return NULL;
    uint64_t base = get64(&regions[s->region].base), size = get64(&regions[s->region].size);
    if (!base || s->offset > size || s->length > size - s->offset) return NULL;
    return (const uint8_t *)(uintptr_t)(base + s->offset);
}

static int is_cancelled(volatile int32_t *cancel) { return cancel && *cancel; }

/* Copies `src` over the pieces, summing what was read; 0 when it was cancelled on the way. */
static int copy_pieces(const kv_iov *iov, uint64_t pieces, const uint8_t *src, volatile int32_t *cancel, uint64_t *sum) {
    if (pieces == 1 && iov->len <= CANCEL_STEP) {
        *sum = kvx_copy_sum((void *)(uintptr_t)iov->addr, src, iov->len);
        return 1;
    }
    kvx_state state;
    kvx_begin(&state);
    for (uint64_t p = 0; p < pieces; p++) {
        uint64_t left = iov[p].len;
        uint8_t *dst = (uint8_t *)(uintptr_t)iov[p].addr;
        while (left) {
            uint64_t step = left < CANCEL_STEP ? left : CANCEL_STEP;
            if (is_cancelled(cancel)) return 0;
            kvx_copy(&state, dst, src, step);
            dst += step;
            src += step;
            left -= step;
        }
    }
    *sum = kvx_end(&state);
    return 1;
}

/* Reads one key into its pieces of `want` bytes in all; the status, and the last slot seen in *slot. */
static uint8_t read_key(const kv_table *t, const kv_region *regions, uint64_t n_regions, const uint8_t *key, uint64_t hash,
                        const kv_iov *iov, uint64_t pieces, uint64_t want, volatile int32_t *cancel, kv_slot *slot,
                        uint32_t *number) {
    for (unsigned i = 0; i < READ_TRIES; i++) {
        uint64_t sum;
        uint32_t at = search(t, key, hash, slot);
        *number = at;
        if (at == SLOTS_NONE) {
            memset(slot, 0, sizeof *slot);
            return KV_MISS;
        }
        const uint8_t *src = value_at(regions, n_regions, slot);
        if (!src) return KV_UNMAPPED;
        if (slot->length != want) return KV_SIZE;
        if (!copy_pieces(iov, pieces, src, cancel, &sum)) return KV_CANCELLED;
        value_fence(); /* the value's loads come before the version's */
        if (version_is(t, at, slot->version)) return sum == slot->sum ? KV_HIT : KV_CORRUPT;
    }
    kv_slot now;
    return search(t, key, hash, &now) == SLOTS_NONE ? KV_MISS : KV_STALE;
}

/* Reads n values into the caller's memory. Key i's value goes over the pieces iov[first[i]] .. iov[first[i + 1] - 1], in
 * order; their lengths must sum up to the stored length. Only a piece whose status is HIT holds a value; the others' bytes
 * are undefined. Out: status[i], length[i] = the stored length and generation[i], 0 on a miss. Returns the hits. *cancel (may
 * be NULL) is looked at between keys and every 256 KiB; once it is not 0 the rest is CANCELLED and nothing is written. When the
 * table is not served in the end, all that is not CANCELLED is UNAVAILABLE. */
uint64_t slots_read(const kv_table *t, const void *regions, uint64_t n_regions, uint64_t n, const void *keys, const void *first,
                    const void *iov, void *status, void *length, void *generation, volatile int32_t *cancel) {
    const uint8_t *k = keys;
    const uint32_t *f = first;
    const kv_iov *v = iov;
    uint8_t *st = status;
    uint64_t *len = length, *gen = generation, hits = 0;
    batch b;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t want = 0;
        uint32_t number;
        kv_slot slot = {0};
        if (i % BATCH == 0) batch_open(t, k + 16 * i, n - i < BATCH ? (unsigned)(n - i) : BATCH, &b);
        for (uint32_t p = f[i]; p < f[i + 1]; p++) want += v[p].len;
        st[i] = is_cancelled(cancel) ? KV_CANCELLED
                                     : read_key(t, regions, n_regions, k + 16 * i, b.hash[i % BATCH], v + f[i],
                                                f[i + 1] - f[i], want, cancel, &slot, &number);
        len[i] = slot.length;
        gen[i] = slot.generation;
        hits += st[i] == KV_HIT;
    }
    if (serving(t) == SERVED) return hits;
    for (uint64_t i = 0; i < n; i++) {
        if (st[i] != KV_CANCELLED) st[i] = KV_UNAVAILABLE;
        len[i] = gen[i] = 0;
    }
    return 0;
}

static void found_fill(kv_found *out, const kv_slot *s, uint32_t number, uint8_t status, const uint8_t *addr) {
    *out = (kv_found){.addr = (uint64_t)(uintptr_t)addr, .length = s->length, .sum = s->sum, .generation = s->generation,
                      .slot = number, .region = s->region, .status = status, .tier = s->tier};
}

static uint8_t unserved(kv_found *out) {
    *out = (kv_found){.slot = SLOTS_NONE, .status = KV_UNAVAILABLE};
    return KV_UNAVAILABLE;
}

/* slots_read for one key with one piece, without arrays; the status, and in *out what is known of the slot (addr = 0). */
int slots_read_one(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, uint64_t addr, uint64_t len,
                   kv_found *out) {
    kv_iov iov = {addr, len};
    kv_slot slot;
    uint32_t number;
    uint8_t status = read_key(t, regions, n_regions, key, hash_key(t, key), &iov, 1, len, NULL, &slot, &number);
    if (serving(t) != SERVED) return unserved(out);
    found_fill(out, &slot, number, status, NULL);
    return status;
}

/* slots_read_one without the report: the status alone, for the hot path. */
int slots_read_into(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, void *dst, uint64_t len) {
    kv_found found;
    return slots_read_one(t, regions, n_regions, key, (uint64_t)(uintptr_t)dst, len, &found);
}

/* What a search answered, as a kv_found with the value's address here. */
static uint8_t locate(const kv_region *regions, uint64_t n_regions, uint32_t number, const kv_slot *slot, kv_found *out) {
    if (number == SLOTS_NONE) {
        *out = (kv_found){.slot = SLOTS_NONE, .status = KV_MISS};
        return KV_MISS;
    }
    const uint8_t *at = value_at(regions, n_regions, slot);
    found_fill(out, slot, number, at ? KV_HIT : KV_UNMAPPED, at);
    return out->status;
}

/* Where one key's value lies in this process's mapping. The bytes stay put only while the caller holds a lease on it. */
int slots_view(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, kv_found *out) {
    kv_slot slot;
    uint8_t status = locate(regions, n_regions, search(t, key, hash_key(t, key), &slot), &slot, out);
    return serving(t) == SERVED ? status : unserved(out);
}

/* Locates n keys; a kv_resolve_fn with a kv_resolver as context. Returns the hits; all are UNAVAILABLE when the table is not
 * served. *epoch: the one that this was answered in.
 *
 * Why it is exactly that one, though another thread may have this reader follow the table meanwhile. The epoch is taken once,
 * into t, before the first load of the table; slots_follow had read it from the header, so the table was in that epoch by
 * then. serving(&t) finds it in the header again after the last load, and epochs only grow: the table was in that epoch at
 * every load between. What the node changes on its way to the next epoch, it changes after it ended the lease: whoever saw
 * such a change sees that end too, or a later lease, and with that the later header (slots_set_epoch); either is no answer. */
size_t slots_resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch) {
    const kv_resolver *r = ctx;
    kv_table t = table_now(r->table);
    size_t hits = 0;
    *epoch = t.epoch;
    stream s;
    stream_open(&s, &t, n, keys);
    for (uint64_t at = 0; at < n; at += BATCH) {
        unsigned m = stream_count(&s, at);
        const batch *b = stream_next(&s, at);
        for (unsigned i = 0; i < m; i++) {
            kv_slot slot;
            uint32_t number = batch_search(&t, keys + 16 * (at + i), b, i, &slot);
            hits += locate(r->regions, r->n_regions, number, &slot, out + at + i) == KV_HIT;
        }
    }
    if (serving(&t) == SERVED) return hits;
    for (size_t i = 0; i < n; i++) unserved(out + i);
    return 0;
}

/* 1 when that slot is visible with that generation at this moment, and the table served. */
int slots_recheck(const kv_table *t, uint32_t slot, uint64_t generation) {
    kv_slot copy;
    if (slot >= t->capacity || !slot_copy(t, slot, &copy)) return 0;
    return copy.state == SLOT_VISIBLE && copy.epoch == t->epoch && copy.generation == generation && serving(t) == SERVED;
}

/* Sets one entry of a region table that other threads may be reading: unmapped first, then the size, then the base. */
void slots_region_set(void *regions, uint64_t index, uint64_t base, uint64_t size) {
    kv_region *r = (kv_region *)regions + index;
    put64(&r->base, 0);
    put64(&r->size, size);
    put64(&r->base, base);
}

uintptr_t slots_resolve_address(void) { return (uintptr_t)&slots_resolve; }
