/* Inside of the slot table shared by slots.c and slots_reader.c: hashing, the seqlock copy of a slot, the search. */
#ifndef UCXKV_SLOTS_ATOMIC_H
#define UCXKV_SLOTS_ATOMIC_H

#include <stdatomic.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

#include "slots.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the slot table's layout is little endian"
#endif
_Static_assert(sizeof(kv_slot) == 64, "a slot is one cache line");
_Static_assert(offsetof(kv_slot, sum) == 48 && offsetof(kv_slot, check) == 56 && offsetof(kv_slot, version) == 60, "slot layout");
_Static_assert(sizeof(kv_found) == 40, "kv_found layout");

#define LINE_ENTRIES 7u
#define SLOT_WORDS 7u     /* words of a slot before check and version */
#define CHANGED_TRIES 64u /* how often a search starts again because a slot changed under it */
#define BATCH 16u         /* keys whose memory is requested ahead */

typedef _Atomic uint64_t a64;
typedef _Atomic uint32_t a32;

static inline uint64_t get64(const void *p) { return atomic_load_explicit((const a64 *)p, memory_order_acquire); }
static inline uint32_t get32(const void *p) { return atomic_load_explicit((const a32 *)p, memory_order_acquire); }
static inline void put64(void *p, uint64_t v) { atomic_store_explicit((a64 *)p, v, memory_order_release); }
static inline void put32(void *p, uint32_t v) { atomic_store_explicit((a32 *)p, v, memory_order_release); }

/* Orders plain accesses to values against the slots' versions. ThreadSanitizer knows no fences and needs none: the copies of
 * values are exempt from it, and it runs where the hardware keeps this order anyway. */
static inline void value_fence(void) {
#ifndef __SANITIZE_THREAD__
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

/* Whether what was read of the table before this call may be answered; see the top of slots_reader.c for the order. */
static inline int serving(const kv_table *t) {
#ifndef __SANITIZE_THREAD__
    atomic_thread_fence(memory_order_acquire);
#endif
    uint64_t end = get64(t->mem + SLOTS_LEASE_OFF);
    if (get32(t->mem + SLOTS_EPOCH_OFF) != t->epoch) return OTHER_EPOCH;
    if (end == SLOTS_FOREVER) return SERVED;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec < end ? SERVED : LEASE_OVER;
}

/* A copy of *t whose epoch stays as it is when slots_follow runs in another thread. */
static inline kv_table table_now(const kv_table *t) {
    return (kv_table){.mem = t->mem, .size = t->size, .capacity = t->capacity, .lines = t->lines, .lines_off = t->lines_off,
                      .slots_off = t->slots_off, .seed = t->seed, .epoch = get32(&t->epoch)};
}

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint8_t *line_at(const kv_table *t, uint64_t line) { return t->mem + t->lines_off + line * 64; }
static inline uint8_t *slot_at(const kv_table *t, uint64_t slot) { return t->mem + t->slots_off + slot * 64; }

/* Seeded, so that a client that chooses its keys cannot aim them all at one line. The low half, which is the tag of an entry,
 * is never 0, so no tag equals that of an empty entry. */
static inline uint64_t hash_key(const kv_table *t, const uint8_t *key) {
    uint64_t lo, hi;
    memcpy(&lo, key, 8);
    memcpy(&hi, key + 8, 8);
    unsigned __int128 m = (unsigned __int128)(lo ^ t->seed ^ 0x9e3779b97f4a7c15ULL) * (hi ^ t->seed ^ 0xd6e8feb86659fd93ULL);
    uint64_t h = (uint64_t)m ^ (uint64_t)(m >> 64) ^ lo ^ (hi << 32 | hi >> 32);
    h = (h ^ h >> 32) * 0xff51afd7ed558ccdULL;
    h ^= h >> 29;
    return (uint32_t)h ? h : h | 1;
}
static inline uint64_t home_line(const kv_table *t, uint64_t hash) { return ((hash >> 32) * t->lines) >> 32; }
static inline uint64_t next_line(const kv_table *t, uint64_t line) { return line + 1 == t->lines ? 0 : line + 1; }
static inline uint64_t probe_limit(const kv_table *t) { return t->lines < SLOTS_PROBES ? t->lines : SLOTS_PROBES; }
static inline uint64_t entry_of(uint64_t hash, uint32_t slot) { return hash << 32 | (slot + 1u); }

static inline uint32_t slot_check(const kv_slot *s) { return (uint32_t)kvx_sum(s, 56); }

/* Copies slot number `slot`; 1 = whole, 0 = it is being written or changed meanwhile. */
static inline int slot_copy(const kv_table *t, uint32_t slot, kv_slot *out) {
    const uint8_t *p = slot_at(t, slot);
    uint64_t words[8];
    uint32_t version = get32(p + 60);
    if (version & 1) return 0;
    for (unsigned i = 0; i < SLOT_WORDS; i++) words[i] = get64(p + 8 * i);
    words[7] = get32(p + 56) | (uint64_t)version << 32;
    if (get32(p + 60) != version) return 0;
    memcpy(out, words, 64);
    return 1;
}

static inline int slot_is(const kv_table *t, const kv_slot *s, const uint8_t *key) {
    return !memcmp(s->key, key, 16) && s->state == SLOT_VISIBLE && s->epoch == t->epoch && s->check == slot_check(s);
}

static inline int version_is(const kv_table *t, uint32_t slot, uint32_t version) {
    return get32(slot_at(t, slot) + 60) == version;
}

/* One pass over the key's lines. The slot number, or SLOTS_NONE; *changed when a candidate could not be copied whole. */
static inline uint32_t search_once(const kv_table *t, const uint8_t *key, uint64_t hash, kv_slot *out, int *changed) {
    uint64_t line = home_line(t, hash), limit = probe_limit(t);
    for (uint64_t p = 0; p < limit; p++, line = next_line(t, line)) {
        const uint8_t *l = line_at(t, line);
        for (unsigned e = 0; e < LINE_ENTRIES; e++) {
            uint64_t entry = get64(l + 8 * e);
            if (entry >> 32 != (hash & 0xffffffffu) || !(uint32_t)entry) continue;
            uint32_t slot = (uint32_t)entry - 1;
            if (slot >= t->capacity) continue;
            if (!slot_copy(t, slot, out)) *changed = 1;
            else if (slot_is(t, out, key)) return slot;
        }
        if (!get64(l + 56)) break;
    }
    return SLOTS_NONE;
}

/* The visible slot of a key with a whole copy of it, or SLOTS_NONE. A slot that changes under the search left or came during
 * it, so giving up as a miss after CHANGED_TRIES is an answer that was true at some moment of the call. */
static inline uint32_t search(const kv_table *t, const uint8_t *key, uint64_t hash, kv_slot *out) {
    for (unsigned i = 0; i < CHANGED_TRIES; i++) {
        int changed = 0;
        uint32_t slot = search_once(t, key, hash, out, &changed);
        if (slot != SLOTS_NONE || !changed) return slot;
        pause_cpu();
    }
    return SLOTS_NONE;
}

/* Whether an entry of this line carries the tag; the slot number of the first that does in *slot, or SLOTS_NONE. The vector
 * loads only say where to look: the entry is loaded again as the others are. */
static inline int line_candidate(const uint8_t *l, uint32_t tag, uint32_t *slot) {
    *slot = SLOTS_NONE;
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
    __m128i want = _mm_set1_epi32((int)tag);
    const float *f = (const float *)l; /* the odd 32-bit words are the tags */
    __m128 low = _mm_shuffle_ps(_mm_load_ps(f), _mm_load_ps(f + 4), _MM_SHUFFLE(3, 1, 3, 1));
    __m128 high = _mm_shuffle_ps(_mm_load_ps(f + 8), _mm_load_ps(f + 12), _MM_SHUFFLE(3, 1, 3, 1));
    __m128i equal = _mm_packs_epi32(_mm_cmpeq_epi32(_mm_castps_si128(low), want),
                                    _mm_cmpeq_epi32(_mm_castps_si128(high), want));
    unsigned mask = (unsigned)_mm_movemask_epi8(_mm_packs_epi16(equal, equal)) & 0x7f;
    if (!mask) return 0;
    uint64_t entry = get64(l + 8 * (unsigned)__builtin_ctz(mask));
    if (entry >> 32 == tag) *slot = (uint32_t)entry - 1;
    return 1;
#else
    for (unsigned e = 0; e < LINE_ENTRIES; e++) {
        uint64_t entry = get64(l + 8 * e);
        if (entry >> 32 == tag) *slot = (uint32_t)entry - 1;
    }
    return *slot != SLOTS_NONE;
#endif
}

/* What a batch knows of each key before the cache lines it asked for have come. */
typedef struct {
    uint64_t hash[BATCH];
    uint32_t slot[BATCH]; /* the slot that the home line names for the hash, or SLOTS_NONE */
    uint8_t gone[BATCH];  /* the home line has no such tag and nothing was pushed past it */
} batch;

/* Hashes up to BATCH keys and requests their lines. */
static inline void batch_hash(const kv_table *t, const uint8_t *keys, unsigned n, batch *b) {
    for (unsigned i = 0; i < n; i++) {
        b->hash[i] = hash_key(t, keys + 16 * i);
        __builtin_prefetch(line_at(t, home_line(t, b->hash[i])));
    }
}

/* Looks into the lines that have come and requests the slots they name. */
static inline void batch_aim(const kv_table *t, unsigned n, batch *b) {
    for (unsigned i = 0; i < n; i++) {
        const uint8_t *l = line_at(t, home_line(t, b->hash[i]));
        uint32_t slot;
        int seen = line_candidate(l, (uint32_t)b->hash[i], &slot);
        if (slot >= t->capacity) slot = SLOTS_NONE;
        else __builtin_prefetch(slot_at(t, slot));
        b->slot[i] = slot;
        b->gone[i] = !seen && !get64(l + 56);
    }
}

/* Both for one batch: two rounds of overlapping cache misses. */
static inline void batch_open(const kv_table *t, const uint8_t *keys, unsigned n, batch *b) {
    batch_hash(t, keys, n, b);
    batch_aim(t, n, b);
}

/* n keys on their way, a batch at a time: while one is searched, the slots of the next and the lines of the one after it are
 * being fetched, so that a call waits for the first of them only. */
typedef struct {
    const kv_table *t;
    const uint8_t *keys;
    uint64_t n;
    batch ring[3];
} stream;

static inline unsigned stream_count(const stream *s, uint64_t at) {
    return at >= s->n ? 0 : s->n - at < BATCH ? (unsigned)(s->n - at) : BATCH;
}

static inline batch *stream_batch(stream *s, uint64_t at) { return &s->ring[at / BATCH % 3]; }

static inline void stream_hash(stream *s, uint64_t at) {
    unsigned n = stream_count(s, at);
    if (n) batch_hash(s->t, s->keys + 16 * at, n, stream_batch(s, at));
}

static inline void stream_open(stream *s, const kv_table *t, uint64_t n, const uint8_t *keys) {
    s->t = t, s->keys = keys, s->n = n;
    stream_hash(s, 0);
    stream_hash(s, BATCH);
    batch_aim(t, stream_count(s, 0), stream_batch(s, 0));
}

/* The batch that begins at key `at`, a multiple of BATCH; to be asked for in order, each once. */
static inline const batch *stream_next(stream *s, uint64_t at) {
    stream_hash(s, at + 2 * BATCH);
    batch_aim(s->t, stream_count(s, at + BATCH), stream_batch(s, at + BATCH));
    return stream_batch(s, at);
}

/* search() of key i of a batch: mostly one slot to look at, or none. */
static inline uint32_t batch_search(const kv_table *t, const uint8_t *key, const batch *b, unsigned i, kv_slot *out) {
    if (b->gone[i]) return SLOTS_NONE;
    if (b->slot[i] != SLOTS_NONE && slot_copy(t, b->slot[i], out) && slot_is(t, out, key)) return b->slot[i];
    return search(t, key, b->hash[i], out);
}

#endif
