/* Drives the slot table under sanitizers: against a plain model, over garbage, with a writer and three reading threads,
 * and with a node that is deposed again and again under its readers.
 *
 *   slots_check SEED ROUNDS
 *
 * Exit code 0: everything held. Built by scripts/sanitize.sh.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "slots.c"
#include "slots_reader.c"

#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what);      \
            abort();                                                                  \
        }                                                                             \
    } while (0)

static uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

static void make_key(uint64_t number, uint8_t *key) {
    uint64_t seed = number * 7919 + 1, words[2] = {next_random(&seed), next_random(&seed)};
    memcpy(key, words, 16);
}

typedef struct {
    uint8_t *mem;
    uint64_t size, capacity, lines;
    uint32_t *next;
    kv_writer w;
    kv_table r;
} fixture;

static fixture open_table(uint64_t capacity, uint64_t lines, uint64_t seed) {
    fixture f = {.size = slots_bytes(capacity, lines), .capacity = capacity, .lines = lines};
    CHECK(!posix_memalign((void **)&f.mem, 64, f.size));
    memset(f.mem, 0, f.size);
    f.next = calloc(capacity, 4);
    CHECK(!slots_format(f.mem, f.size, capacity, lines, 9, seed));
    CHECK(!slots_writer_open(&f.w, f.mem, f.size, f.next));
    CHECK(!slots_attach(&f.r, f.mem, f.size));
    return f;
}

static void close_table(fixture *f) {
    free(f->mem);
    free(f->next);
}

static int32_t put_one(fixture *f, uint64_t number, uint64_t generation, uint64_t offset, uint32_t length, uint64_t sum) {
    uint8_t key[16], root[16] = {0}, status = 0;
    uint16_t region = 0;
    int32_t idx, up;
    make_key(number, key);
    slots_put(&f->w, 1, key, root, &region, &offset, &length, &sum, 1, 0, generation, &status, &idx, &up);
    CHECK(status == PUT_STORED || status == PUT_ALREADY || status == PUT_NO_SPACE);
    return status == PUT_STORED ? idx : -1;
}

/* Random puts and hides at 0.95 of all index entries, against an array; the index is empty at the end. */
static void check_model(uint64_t seed, unsigned rounds) {
    enum { LINES = 60, CAPACITY = LINES * 7 * 95 / 100, KEYS = CAPACITY + 40 };
    fixture f = open_table(CAPACITY, LINES, seed);
    int32_t where[KEYS];
    uint8_t keys[16 * KEYS], found[KEYS];
    kv_slot copies[KEYS];
    memset(where, 0xff, sizeof where);
    for (uint64_t k = 0; k < KEYS; k++) make_key(k, keys + 16 * k);
    unsigned used = 0;
    for (unsigned step = 0; step < rounds * 40; step++) {
        uint64_t k = next_random(&seed) % KEYS;
        if (where[k] >= 0 && next_random(&seed) % 4 == 0) {
            CHECK(slots_hide(&f.w, 1, &where[k]) == 1);
            where[k] = -1;
            used--;
        } else if (where[k] < 0) {
            where[k] = put_one(&f, k, step + 1, 64 * k, 64, k);
            CHECK(where[k] >= 0 || used == CAPACITY);
            used += where[k] >= 0;
        } else {
            CHECK(put_one(&f, k, step + 1, 0, 64, k) < 0);
        }
        CHECK(f.w.used == used);
        if (step % 64) continue;
        CHECK(slots_lookup(&f.r, KEYS, keys, copies, found) == used);
        for (uint64_t i = 0; i < KEYS; i++) {
            CHECK(found[i] == (where[i] >= 0));
            if (found[i]) CHECK(copies[i].sum == i && copies[i].offset == 64 * i && copies[i].version % 2 == 0);
        }
    }
    for (uint64_t k = 0; k < KEYS; k++)
        if (where[k] >= 0) CHECK(slots_hide(&f.w, 1, &where[k]) == 1);
    for (uint64_t at = 0; at < LINES * 64; at++) CHECK(f.mem[SLOTS_HEADER + at] == 0);
    close_table(&f);
}

/* Readers over damaged tables: any answer, no access outside (the sanitizer's part), no endless loop. */
static void check_garbage(uint64_t seed, unsigned rounds) {
    enum { CAPACITY = 200, KEYS = 64 };
    uint8_t keys[16 * KEYS], found[KEYS], status[KEYS], *segment = malloc(1 << 16), *out = malloc(1 << 16);
    uint64_t lengths[KEYS], generations[KEYS], n;
    uint32_t first[KEYS + 1];
    kv_iov iov[KEYS];
    kv_slot copies[KEYS];
    kv_found where[KEYS];
    kv_region regions[2] = {{(uint64_t)(uintptr_t)segment, 1 << 16}, {0, 0}};
    memset(segment, 7, 1 << 16);
    for (unsigned i = 0; i <= KEYS; i++) first[i] = i;
    for (unsigned i = 0; i < KEYS; i++) {
        iov[i] = (kv_iov){(uint64_t)(uintptr_t)out + 1024 * i, 1024};
        make_key(i, keys + 16 * i);
    }
    for (unsigned round = 0; round < rounds; round++) {
        fixture f = open_table(CAPACITY, 40, seed);
        for (uint64_t k = 0; k < KEYS; k++) put_one(&f, k, k + 1, 1024 * k, 1024, kvx_sum(segment + 1024 * k, 1024));
        unsigned damage = 1 + next_random(&seed) % 4000;
        for (unsigned i = 0; i < damage; i++) {
            uint64_t at = SLOTS_HEADER + next_random(&seed) % (f.size - SLOTS_HEADER);
            f.mem[at] = (uint8_t)next_random(&seed);
        }
        if (round % 3 == 0) memset(f.mem + SLOTS_HEADER, (int)next_random(&seed), f.size - SLOTS_HEADER);
        kv_resolver resolver = {&f.r, regions, 2};
        slots_lookup(&f.r, KEYS, keys, copies, found);
        slots_match(&f.r, KEYS, keys);
        slots_exists(&f.r, KEYS, keys, found);
        slots_read(&f.r, regions, 2, KEYS, keys, first, iov, status, lengths, generations, NULL);
        uint32_t epoch;
        slots_resolve(&resolver, KEYS, keys, where, &epoch);
        slots_scan(&f.r, next_random(&seed) % 300, KEYS, copies, &n);
        CHECK(n <= KEYS);
        slots_recheck(&f.r, (uint32_t)next_random(&seed), 1);
        kv_table attached;
        for (unsigned i = 0; i < 64; i++) {
            uint8_t kept = f.mem[i];
            f.mem[i] ^= (uint8_t)(1u << next_random(&seed) % 8);
            if (!slots_attach(&attached, f.mem, f.size)) slots_lookup(&attached, KEYS, keys, copies, found);
            f.mem[i] = kept;
            CHECK(slots_attach(&attached, f.mem, next_random(&seed) % f.size));
        }
        close_table(&f);
    }
    free(segment);
    free(out);
}

/* One writer that hides, overwrites values and publishes; three readers that check all they are told. */
enum { SHARED_KEYS = 24, PLACES = 12, VALUE = 2048 };
typedef struct {
    fixture f;
    kv_region region;
    kv_table followed; /* the node's own reader, which its writer has follow the table while others read through it */
    uint64_t seed;
    unsigned rounds;
    a32 stop;
} shared;
typedef struct {
    shared *s;
    uint64_t seed, hits, stale, corrupt, calls;
} reader_state;

static uint64_t pattern(uint64_t key, uint64_t generation) { return key * 1000003 + generation; }

static void fill_value(uint8_t *place, uint64_t word) {
    for (unsigned i = 0; i < VALUE / 8; i++) memcpy(place + 8 * i, &word, 8);
}

static void *reader_thread(void *arg) {
    reader_state *me = arg;
    shared *s = me->s;
    uint8_t keys[16 * SHARED_KEYS], found[SHARED_KEYS], status[SHARED_KEYS];
    uint64_t lengths[SHARED_KEYS], generations[SHARED_KEYS], *values = malloc(SHARED_KEYS * VALUE);
    uint32_t first[SHARED_KEYS + 1];
    kv_slot copies[SHARED_KEYS];
    kv_iov iov[2 * SHARED_KEYS];
    for (unsigned i = 0; i < SHARED_KEYS; i++) make_key(i, keys + 16 * i);
    while (!get32(&s->stop)) {
        uint64_t cut = next_random(&me->seed) % VALUE;
        for (unsigned i = 0; i < SHARED_KEYS; i++) {
            uint64_t base = (uint64_t)(uintptr_t)values + VALUE * i;
            iov[2 * i] = (kv_iov){base, cut};
            iov[2 * i + 1] = (kv_iov){base + cut, VALUE - cut};
            first[i] = 2 * i;
        }
        first[SHARED_KEYS] = 2 * SHARED_KEYS;
        me->calls++;
        slots_lookup(&s->f.r, SHARED_KEYS, keys, copies, found);
        for (unsigned i = 0; i < SHARED_KEYS; i++) {
            if (!found[i]) continue;
            CHECK(!memcmp(copies[i].key, keys + 16 * i, 16) && copies[i].length == VALUE && copies[i].version % 2 == 0);
            if (copies[i].region) CHECK(copies[i].region == 0xFFFF && copies[i].offset == 7 && copies[i].tier == 2);
            else CHECK(copies[i].offset % VALUE == 0 && copies[i].offset < 2 * PLACES * VALUE && copies[i].tier == 1);
        }
        slots_match(&s->f.r, SHARED_KEYS, keys);
        slots_exists(&s->f.r, SHARED_KEYS, keys, found);
        slots_read(&s->f.r, &s->region, 1, SHARED_KEYS, keys, first, iov, status, lengths, generations, NULL);
        for (unsigned i = 0; i < SHARED_KEYS; i++) {
            CHECK(status[i] == KV_HIT || status[i] == KV_MISS || status[i] == KV_STALE || status[i] == KV_CORRUPT ||
                  status[i] == KV_UNMAPPED);
            me->stale += status[i] == KV_STALE;
            me->corrupt += status[i] == KV_CORRUPT;
            if (status[i] != KV_HIT) continue;
            me->hits++;
            for (unsigned w = 0; w < VALUE / 8; w++) CHECK(values[VALUE / 8 * i + w] == pattern(i, generations[i]));
        }
    }
    free(values);
    return NULL;
}

/* A value goes to its other home, perhaps by way of a region that nobody maps; the home it leaves is written over at once. */
static void move_value(kv_writer *w, int32_t slot, uint8_t *from, uint8_t *to, uint64_t offset, int is_far) {
    uint64_t sum = kvx_sum(from, VALUE);
    memcpy(to, from, VALUE);
    if (is_far) CHECK(!slots_move(w, (uint32_t)slot, 0xFFFF, 7, 2, sum));
    else CHECK(!slots_move(w, (uint32_t)slot, 0, offset, 1, sum));
    memset(from, 0xEE, VALUE);
    if (is_far) CHECK(!slots_move(w, (uint32_t)slot, 0, offset, 1, sum));
}

static void check_threads(uint64_t seed, unsigned rounds) {
    shared s = {.f = open_table(PLACES, 3, seed), .seed = seed, .rounds = rounds};
    uint8_t *segment = calloc(2 * PLACES, VALUE);
    unsigned home[PLACES] = {0};
    s.region = (kv_region){(uint64_t)(uintptr_t)segment, 2 * PLACES * VALUE};
    pthread_t threads[3];
    reader_state readers[3];
    for (unsigned i = 0; i < 3; i++) {
        readers[i] = (reader_state){.s = &s, .seed = seed + i};
        CHECK(!pthread_create(&threads[i], NULL, reader_thread, &readers[i]));
    }
    int32_t slot_of[PLACES];
    uint64_t key_of[PLACES], generation = 0;
    uint8_t in_use[SHARED_KEYS] = {0};
    memset(slot_of, 0xff, sizeof slot_of);
    for (unsigned step = 0; step < rounds * 1000; step++) {
        unsigned place = (unsigned)(next_random(&seed) % PLACES);
        unsigned at = home[place] * PLACES + place, other = (1 - home[place]) * PLACES + place;
        if (slot_of[place] >= 0 && next_random(&seed) % 3 == 0) {
            move_value(&s.f.w, slot_of[place], segment + VALUE * at, segment + VALUE * other, VALUE * other, step & 1);
            home[place] = 1 - home[place];
            continue;
        }
        if (slot_of[place] >= 0) {
            CHECK(slots_hide(&s.f.w, 1, &slot_of[place]) == 1);
            in_use[key_of[place]] = 0;
        }
        uint64_t key = next_random(&seed) % SHARED_KEYS;
        while (in_use[key]) key = (key + 1) % SHARED_KEYS;
        generation++;
        uint8_t *value = segment + VALUE * at;
        fill_value(value, pattern(key, generation));
        slot_of[place] = put_one(&s.f, key, generation, VALUE * at, VALUE, kvx_sum(value, VALUE));
        CHECK(slot_of[place] >= 0);
        key_of[place] = key;
        in_use[key] = 1;
    }
    put32(&s.stop, 1);
    uint64_t hits = 0, stale = 0, corrupt = 0, calls = 0;
    for (unsigned i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        hits += readers[i].hits;
        stale += readers[i].stale;
        corrupt += readers[i].corrupt;
        calls += readers[i].calls;
    }
    printf("%u replacements, %llu reads of %u keys: %llu hits, %llu stale, %llu corrupt\n", rounds * 1000,
           (unsigned long long)calls, SHARED_KEYS, (unsigned long long)hits, (unsigned long long)stale,
           (unsigned long long)corrupt);
    CHECK(calls && corrupt == 0);
    free(segment);
    close_table(&s.f);
}

/* One slot whose content is replaced as fast as it can be, under readers that do nothing but copy it. */
static void *copier_thread(void *arg) {
    reader_state *me = arg;
    uint8_t keys[16 * 16], found[16];
    kv_slot copies[16];
    for (unsigned i = 0; i < 16; i++) make_key(0, keys + 16 * i);
    while (!get32(&me->s->stop)) {
        me->calls++;
        me->hits += slots_lookup(&me->s->f.r, 16, keys, copies, found);
        for (unsigned i = 0; i < 16; i++) {
            uint64_t g = copies[i].generation;
            if (found[i]) CHECK(copies[i].offset == 64 * g && copies[i].length == (uint32_t)g && copies[i].sum == ~g);
        }
    }
    return NULL;
}

static void check_torn(uint64_t seed, unsigned rounds) {
    shared s = {.f = open_table(1, 1, seed), .seed = seed, .rounds = rounds};
    pthread_t threads[3];
    reader_state readers[3];
    uint64_t hits = 0, calls = 0;
    for (unsigned i = 0; i < 3; i++) {
        readers[i] = (reader_state){.s = &s, .seed = seed + i};
        CHECK(!pthread_create(&threads[i], NULL, copier_thread, &readers[i]));
    }
    for (uint64_t g = 1; g < rounds * 2000; g++) {
        int32_t slot = put_one(&s.f, 0, g, 64 * g, (uint32_t)g, ~g);
        CHECK(slot == 0 && slots_hide(&s.f.w, 1, &slot) == 1);
    }
    put32(&s.stop, 1);
    for (unsigned i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        hits += readers[i].hits;
        calls += readers[i].calls;
    }
    printf("%u replacements of one slot, %llu copies asked for: %llu whole\n", rounds * 2000,
           (unsigned long long)calls * 16, (unsigned long long)hits);
    CHECK(calls && hits);
    close_table(&s.f);
}

/* A node whose lease ends, whose table then says what is no longer true, and which leads again under another epoch. Readers
 * that attached under any epoch read on meanwhile: what they are told was true, or they are told nothing.
 *
 * True is that key 0 is there with an even generation. Twice in each round it is not: while the lease is over. Every epoch has
 * a generation of its own, so that a resolver's answer shows whether it was given in the epoch that it names. */
static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

enum { FIRST_EPOCH = 9 }; /* open_table's */
static uint64_t generation_in(uint32_t epoch) { return 2 * (uint64_t)(epoch - FIRST_EPOCH) + 2; }

static void *lease_thread(void *arg) {
    reader_state *me = arg;
    uint8_t keys[16 * 4], found[4];
    kv_slot copies[4];
    kv_found one[4];
    uint64_t value, size = me->s->f.size;
    uint8_t *mem = me->s->f.mem;
    kv_table t;
    CHECK(!slots_attach(&t, mem, size));
    for (unsigned i = 0; i < 4; i++) make_key(0, keys + 16 * i);
    kv_resolver own = {&t, &me->s->region, 1}, followed = {&me->s->followed, &me->s->region, 1};
    while (!get32(&me->s->stop)) {
        me->calls++;
        uint64_t hits = slots_lookup(&t, 4, keys, copies, found);
        CHECK(hits == SLOTS_UNSERVED || hits == 4);
        for (unsigned i = 0; hits == 4 && i < 4; i++) CHECK(found[i] && copies[i].generation % 2 == 0);
        uint64_t run = slots_match(&t, 4, keys), there = slots_exists(&t, 4, keys, found);
        CHECK((run == SLOTS_UNSERVED || run == 4) && (there == SLOTS_UNSERVED || there == 4));
        uint32_t epoch;
        hits = slots_resolve(me->calls % 2 ? &own : &followed, 4, keys, one, &epoch);
        for (unsigned i = 0; i < 4; i++)
            CHECK(hits == 4 ? one[i].status == KV_HIT && one[i].generation == generation_in(epoch)
                            : one[i].status == KV_UNAVAILABLE);
        int status = slots_read_one(&t, &me->s->region, 1, keys, (uint64_t)(uintptr_t)&value, 8, one);
        CHECK(status == KV_UNAVAILABLE || (status == KV_HIT && one->generation % 2 == 0 && value == 7));
        status = slots_view(&t, &me->s->region, 1, keys, one);
        CHECK(status == KV_UNAVAILABLE || (status == KV_HIT && one->generation % 2 == 0));
        me->hits += hits == 4;
        if (slots_serving(&t) != OTHER_EPOCH) continue;
        me->stale++;
        if (me->stale % 2) slots_follow(&t);
        else CHECK(!slots_attach(&t, mem, size));
    }
    return NULL;
}

static void check_lease(uint64_t seed, unsigned rounds) {
    shared s = {.f = open_table(4, 1, seed), .seed = seed, .rounds = rounds};
    uint64_t value = 7, hits = 0, calls = 0, epochs = 0;
    s.region = (kv_region){(uint64_t)(uintptr_t)&value, 8};
    pthread_t threads[3];
    reader_state readers[3];
    int32_t slot = put_one(&s.f, 0, generation_in(FIRST_EPOCH), 0, 8, kvx_sum(&value, 8));
    CHECK(!slots_attach(&s.followed, s.f.mem, s.f.size));
    for (unsigned i = 0; i < 3; i++) {
        readers[i] = (reader_state){.s = &s, .seed = seed + i};
        CHECK(!pthread_create(&threads[i], NULL, lease_thread, &readers[i]));
    }
    for (unsigned round = 0; round < rounds * 200; round++) {
        if (round % 2) { /* the lease ends by the clock, nobody stores anything */
            uint64_t end = monotonic_ns() + next_random(&seed) % 20000;
            slots_set_lease(&s.f.w, end);
            while (monotonic_ns() < end) pause_cpu();
        } else {
            slots_set_lease(&s.f.w, next_random(&seed) % 2);
        }
        CHECK(slots_hide(&s.f.w, 1, &slot) == 1); /* not true: another node leads, and has it */
        slot = put_one(&s.f, 0, 2 * round + 1, 0, 8, kvx_sum(&value, 8)); /* nor is this */
        CHECK(slots_hide(&s.f.w, 1, &slot) == 1);
        uint32_t epoch = FIRST_EPOCH + 1 + round;
        slot = put_one(&s.f, 0, generation_in(epoch), 0, 8, kvx_sum(&value, 8)); /* this node leads again */
        CHECK(slots_set_epoch(&s.f.w, epoch) == 1);
        slots_follow(&s.followed);
        slots_set_lease(&s.f.w, round % 3 ? SLOTS_FOREVER : monotonic_ns() + 1000000000u);
        for (unsigned i = 0; i < next_random(&seed) % 2000; i++) pause_cpu();
    }
    slots_set_lease(&s.f.w, SLOTS_FOREVER);
    for (unsigned i = 0; i < 1000000 && get32(&s.stop) == 0; i++) pause_cpu();
    put32(&s.stop, 1);
    for (unsigned i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        hits += readers[i].hits;
        calls += readers[i].calls;
        epochs += readers[i].stale;
    }
    printf("%u terms, %llu reads, %llu of them served, %llu epochs seen to change\n", rounds * 200, (unsigned long long)calls,
           (unsigned long long)hits, (unsigned long long)epochs);
    CHECK(calls && hits && epochs);
    close_table(&s.f);
}

int main(int argc, char **argv) {
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned rounds = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 100;
    check_model(seed, rounds);
    check_garbage(seed, rounds);
    check_threads(seed, rounds);
    check_torn(seed, rounds);
    check_lease(seed, rounds);
    return 0;
}
