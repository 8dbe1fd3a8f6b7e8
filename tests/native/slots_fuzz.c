/* slots_fuzz.c: fuzzes the readers of a slot table that somebody else writes: a client maps the node's table and segments.
 *
 * An input is a seed table (formatted and filled by the real writer), bytes put anywhere over it, header included, and calls
 * of every reader. Bytes go on changing while a reader runs: each load of the table may be preceded by a change, as the input
 * says. What must hold beside memory safety (the table, segments, destinations, and key arrays have exactly their size):
 *   - a header is attached only if all it names lies in the mapping;
 *   - what a look-up reports has the key asked for, an odd version never, and its check holds;
 *   - a value is copied out only from a region, and HIT means that the sum of the bytes read is the slot's;
 *   - a cancelled read says so; the count of hits is the number of HITs; every call ends;
 *   - while the lease in the header is over, or its epoch another, nothing is answered.
 * The clock stands still at NOW, so that an input says the same on any day.
 */
#include <stdatomic.h>
#include <time.h>

#include "fuzz_input.h"

static void meddle(void);
static uint64_t load_64(const _Atomic uint64_t *at);
static uint32_t load_32(const _Atomic uint32_t *at);
static uint64_t plain_64(const _Atomic uint64_t *at) { return atomic_load_explicit(at, memory_order_acquire); }
static uint32_t plain_32(const _Atomic uint32_t *at) { return atomic_load_explicit(at, memory_order_acquire); }

#undef atomic_load_explicit
#define atomic_load_explicit(at, order) \
    _Generic(*(at), uint64_t: load_64((const _Atomic uint64_t *)(at)), uint32_t: load_32((const _Atomic uint32_t *)(at)))

#define NOW_S 1000
static int still_clock(struct timespec *at) { return *at = (struct timespec){.tv_sec = NOW_S}, 0; }
#define clock_gettime(which, at) still_clock(at)

#include "slots.c"
#include "slots_reader.c"

enum { CAPACITY = 24, LINES = 5, KEYS = 40, REGIONS = 3, REGION = 2048, RESERVE = 64, BOUND = 8000000 };

static uint8_t *table, *region[REGIONS];
static uint64_t table_size, loads;
static struct {
    uint64_t every, left; /* a change before each so many loads; how many more */
    uint32_t word;
} meddling;
static uint64_t total_hits, total_changes, total_calls;

static uint8_t keys[16 * KEYS];

static void make_key(uint64_t number, uint8_t *key) {
    uint64_t words[2] = {number * 0x9e3779b97f4a7c15ull + 1, (number + 7) * 0xbf58476d1ce4e5b9ull};
    memcpy(key, words, 16);
}

/* One change of the table by the process that owns it: an aligned word, or a slot's version to even or odd. */
static void meddle(void) {
    loads++;
    CHECK(loads < BOUND); /* no call goes on for ever */
    if (meddling.left == 0 || loads % meddling.every) return;
    meddling.left--;
    total_changes++;
    meddling.word = meddling.word * 1664525u + 1013904223u;
    uint64_t value = meddling.word >> 16;
    uint8_t *slots = table + SLOTS_HEADER + 64 * LINES;
    switch (meddling.word >> 12 & 3) {
    case 0:
        if (value % 64 == 63) value <<= 30 + value % 7, memcpy(table + SLOTS_LEASE_OFF, &value, 8); /* before or after NOW */
        else memcpy(table + SLOTS_HEADER + value * 8 % (table_size - SLOTS_HEADER), &value, 8);
        break;
    case 1: slots[64 * (value % CAPACITY) + 60] += 2; break;
    case 2: slots[64 * (value % CAPACITY) + value / 32 % 64] ^= (uint8_t)(1u << (value & 7)); break;
    case 3: slots[64 * (value % CAPACITY) + 60] |= 1; break;
    }
}

static uint64_t load_64(const _Atomic uint64_t *at) {
    meddle();
    return plain_64(at);
}

static uint32_t load_32(const _Atomic uint32_t *at) {
    meddle();
    return plain_32(at);
}

/* A table as the writer leaves it: some keys over their whole chain of lines, some hidden again. */
static void fill(uint64_t size) {
    uint32_t next[CAPACITY];
    kv_writer w;
    memset(table, 0, size);
    CHECK(slots_format(table, size, CAPACITY, LINES, 3, fuzz_u8()) == 0);
    CHECK(slots_writer_open(&w, table, size, next) == 0);
    uint8_t count = fuzz_u8() % (CAPACITY + 1);
    for (uint64_t k = 0; k < count; k++) {
        uint8_t root[16] = {0}, status = 0;
        uint16_t where = (uint16_t)(k % REGIONS);
        uint64_t offset = k * 64;
        uint32_t length = (uint32_t)(k % 5 ? k * 8 : 0);
        uint64_t sum = kvx_sum(region[where] + offset, length);
        int32_t slot, up;
        slots_put(&w, 1, keys + 16 * k, root, &where, &offset, &length, &sum, 1, 0, k + 1, &status, &slot, &up);
        CHECK(status == PUT_STORED || status == PUT_NO_SPACE);
        if (k % 7 == 3 && status == PUT_STORED) CHECK(slots_hide(&w, 1, &slot) == 1);
    }
}

/* Bytes of the input over the table: runs of single words, whole slots with a right check, or raw bytes. */
static void spoil(void) {
    uint8_t *slots = table + SLOTS_HEADER + 64 * LINES;
    for (unsigned n = fuzz_u8() % 32; n--;) {
        unsigned how = fuzz_u8();
        if (how < 96) { /* a slot whose check holds: any field may be anything */
            kv_slot s;
            uint8_t *at = slots + 64 * (how % CAPACITY);
            memcpy(&s, at, 64);
            unsigned field = fuzz_u8();
            if (field & 1) s.offset = fuzz_number();
            if (field & 2) s.length = (uint32_t)fuzz_number();
            if (field & 4) s.region = (uint16_t)fuzz_number();
            if (field & 8) s.version = (uint32_t)fuzz_number();
            if (field & 16) s.state = fuzz_u8();
            if (field & 32) s.flags[0] = fuzz_u8();
            if (field & 64) s.sum = fuzz_number();
            if (field & 128) memcpy(s.key, keys + 16 * (fuzz_u8() % KEYS), 16);
            s.check = slot_check(&s);
            memcpy(at, &s, 64);
        } else if (how < 160) { /* an entry that names some slot for some key's tag */
            kv_table t;
            uint64_t size = table_size, entry;
            if (slots_attach(&t, table, size) != 0) return;
            entry = entry_of(hash_key(&t, keys + 16 * (fuzz_u8() % KEYS)), (uint32_t)fuzz_number());
            memcpy(table + SLOTS_HEADER + 8 * (fuzz_u8() % (8 * LINES)), &entry, 8);
        } else {
            uint64_t at = how < 192 ? fuzz_u8() % 72 : how < 224 ? SLOTS_HEADER + fuzz_take(2) % (table_size - SLOTS_HEADER)
                                                                 : SLOTS_HEADER + 64 * LINES + fuzz_u8() * 4u;
            uint64_t value = fuzz_number();
            if (at + 8 <= table_size) memcpy(table + at, &value, how & 1 ? 8 : 1);
        }
    }
}

static kv_region regions[REGIONS + 1];

/* Whether a call answered must be what the header says, unless that changed meanwhile. */
static void check_served(const kv_table *t, int is_answered) {
    uint64_t end;
    uint32_t epoch;
    memcpy(&end, table + SLOTS_LEASE_OFF, 8);
    memcpy(&epoch, table + SLOTS_EPOCH_OFF, 4);
    if (meddling.every == BOUND) CHECK(is_answered == (epoch == t->epoch && end > NOW_S * 1000000000ull));
}

/* A read into pieces that are exactly the caller's. */
static void read_values(const kv_table *t, unsigned n, const uint8_t *wanted, const unsigned *numbers, unsigned how) {
    uint32_t *first = calloc(n + 1, 4);
    kv_iov *iov = calloc(2 * n + 1, sizeof *iov);
    uint8_t *status = malloc(n), *buffers[2 * KEYS];
    uint64_t *length = malloc(8 * n), *generation = malloc(8 * n), hits = 0;
    unsigned pieces = 0;
    volatile int32_t cancel = how >> 6 == 3;
    for (unsigned i = 0; i < n; i++) {
        uint64_t want = numbers[i] % 5 ? numbers[i] * 8 : 0, cut = how & 1 ? want / 3 : want;
        if ((how & 14) == 14) want += 1;
        uint64_t parts[2] = {cut, want - cut};
        for (unsigned p = 0; p < 1 + (how & 1) + (unsigned)((how & 14) == 14 && !(how & 1)); p++) {
            buffers[pieces] = malloc(parts[p]);
            iov[pieces] = (kv_iov){(uint64_t)(uintptr_t)buffers[pieces], parts[p]};
            pieces++;
        }
        first[i + 1] = pieces;
    }
    uint64_t said = slots_read(t, regions, REGIONS, n, wanted, first, iov, status, length, generation,
                               how & 32 ? &cancel : NULL);
    if (!(how & 32 && cancel)) check_served(t, status[0] != KV_UNAVAILABLE);
    for (unsigned i = 0; i < n; i++) {
        hits += status[i] == KV_HIT;
        CHECK(status[i] <= KV_CANCELLED);
        CHECK(status[i] != KV_CANCELLED || (how & 32 && cancel));
        if (how & 32 && cancel) CHECK(status[i] == KV_CANCELLED);
        uint64_t want = 0;
        for (uint32_t p = first[i]; p < first[i + 1]; p++) want += iov[p].len;
        CHECK(status[i] != KV_HIT || length[i] == want);
    }
    CHECK(hits == said);
    total_hits += hits;
    for (unsigned p = 0; p < pieces; p++) free(buffers[p]);
    free(first), free(iov), free(status), free(length), free(generation);
}

static void check_copy(const kv_table *t, const kv_slot *s, const uint8_t *key) {
    CHECK(memcmp(s->key, key, 16) == 0 && s->state == SLOT_VISIBLE && s->epoch == t->epoch && s->check == slot_check(s));
    CHECK(s->version % 2 == 0);
}

static void check_found(const kv_found *f) {
    CHECK(f->status == KV_HIT || f->status == KV_MISS || f->status == KV_UNMAPPED || f->status == KV_UNAVAILABLE);
    if (f->status != KV_HIT) return;
    CHECK(f->region < REGIONS && f->addr >= regions[f->region].base);
    CHECK(f->addr - regions[f->region].base + f->length <= regions[f->region].size);
}

static void call(const kv_table *t) {
    unsigned what = fuzz_u8(), n = 1 + fuzz_u8() % KEYS, numbers[KEYS], from = fuzz_u8();
    uint8_t *wanted = malloc(16 * n), *seen = malloc(n);
    kv_slot *copies = malloc(n * sizeof *copies);
    kv_found *found = malloc(n * sizeof *found), one;
    kv_resolver resolver = {t, regions, REGIONS};
    uint64_t hits = 0, count;
    uint32_t epoch;
    for (unsigned i = 0; i < n; i++) {
        numbers[i] = (from + i) % KEYS;
        memcpy(wanted + 16 * i, keys + 16 * numbers[i], 16);
    }
    loads = 0;
    total_calls++;
    switch (what % 10) {
    case 0:
        count = slots_lookup(t, n, wanted, copies, seen);
        for (unsigned i = 0; i < n; i++) {
            hits += seen[i];
            if (seen[i]) check_copy(t, &copies[i], wanted + 16 * i);
        }
        CHECK(hits == count || count == SLOTS_UNSERVED);
        check_served(t, count != SLOTS_UNSERVED);
        break;
    case 1:
        count = slots_match(t, n, wanted);
        CHECK(count <= n || count == SLOTS_UNSERVED);
        check_served(t, count <= n);
        break;
    case 2:
        count = slots_exists(t, n, wanted, seen);
        for (unsigned i = 0; i < n; i++) hits += seen[i];
        CHECK(hits == count || count == SLOTS_UNSERVED);
        check_served(t, count != SLOTS_UNSERVED);
        break;
    case 3: case 4: case 5: read_values(t, n, wanted, numbers, fuzz_u8()); break;
    case 6:
        hits = slots_resolve(&resolver, n, wanted, found, &epoch);
        CHECK(epoch == t->epoch);
        for (unsigned i = 0; i < n; i++) check_found(&found[i]), hits -= found[i].status == KV_HIT;
        CHECK(hits == 0);
        break;
    case 7:
        slots_view(t, regions, REGIONS, wanted, &one);
        check_found(&one);
        check_served(t, one.status != KV_UNAVAILABLE);
        CHECK(slots_recheck(t, (uint32_t)fuzz_number(), fuzz_u8()) <= 1);
        break;
    case 8: {
        uint64_t want = numbers[0] % 5 ? numbers[0] * 8 : 0;
        uint8_t *into = malloc(want);
        int status = slots_read_into(t, regions, REGIONS, wanted, into, want);
        check_served(t, status != KV_UNAVAILABLE);
        if (status == KV_HIT && meddling.left == 0 && meddling.every == BOUND) {
            CHECK(slots_view(t, regions, REGIONS, wanted, &one) == KV_HIT && kvx_sum(into, want) == one.sum);
        }
        total_hits += status == KV_HIT;
        free(into);
        break;
    }
    case 9: {
        uint64_t cursor = fuzz_number();
        uint64_t at = slots_scan(t, cursor, n, copies, &count);
        CHECK(count <= n && (at <= t->capacity || at == cursor || at == SLOTS_UNSERVED));
        for (uint64_t i = 0; i < count; i++) CHECK(copies[i].state == SLOT_VISIBLE && !(copies[i].flags[0] & SLOTS_PART));
        break;
    }
    }
    free(wanted), free(seen), free(copies), free(found);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    fuzz_begin(bytes, n);
    if (region[0] == NULL) {
        for (unsigned k = 0; k < KEYS; k++) make_key(k, keys + 16 * k);
        for (unsigned i = 0; i < REGIONS; i++) {
            region[i] = malloc(REGION);
            for (unsigned k = 0; k < REGION; k++) region[i][k] = (uint8_t)(k * 31 + i);
        }
    }
    meddling.left = 0;
    meddling.every = BOUND;
    loads = 0;
    uint64_t real = slots_bytes(CAPACITY, LINES);
    CHECK(posix_memalign((void **)&table, 64, real) == 0); /* sanitizers see its exact end */
    table_size = real;
    fill(real);
    spoil();
    for (unsigned i = 0; i < REGIONS; i++) slots_region_set(regions, i, (uint64_t)(uintptr_t)region[i], REGION);
    uint8_t mapped = fuzz_u8();
    if (mapped & 1) slots_region_set(regions, mapped >> 1 & 1, 0, 0); /* not mapped here */
    kv_table t;
    uint64_t size = mapped & 4 ? fuzz_take(2) : real; /* how much of it there is */
    if (size > real) size = real;
    loads = 0;
    if (slots_attach(&t, table, size) == 0) {
        CHECK(t.lines_off + 64 * t.lines <= t.slots_off && t.slots_off + 64 * t.capacity <= size);
        uint8_t how = fuzz_u8();
        if (how & 1) {
            meddling.every = 1 + (how >> 1) % 16;
            meddling.left = fuzz_take(2) % 4096;
            meddling.word = (uint32_t)fuzz_take(4);
        }
        for (unsigned calls = 0; calls < 24 && !fuzz_is_over(); calls++) call(&t);
        slots_detach(&t);
        loads = 0;
        CHECK(slots_match(&t, 1, keys) == 0);
    }
    free(table);
    return 0;
}

void fuzz_summary(void) {
    fprintf(stderr, "slots: %llu calls, %llu hits, %llu changes under a reader\n", (unsigned long long)total_calls,
            (unsigned long long)total_hits, (unsigned long long)total_changes);
}
