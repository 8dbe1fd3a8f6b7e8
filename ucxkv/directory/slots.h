/* The slot table: where every visible block of a directory shard is, in memory that other processes map.
 *
 * Promises
 *   - One writer (the shard's leader), any number of reading threads and processes; a reader never waits for the writer.
 *   - Only visible blocks are in the table, so a reader that finds a slot has found a visible block.
 *   - A slot handed to a caller is one that was published whole: its version was even and unchanged around the copy, its
 *     check and its epoch hold.
 *   - A slot number is stable as long as its block is visible.
 *   - A reader answers only while the table is served: its node's lease runs and its epoch is the one the reader knows.
 *   - A table whose bytes are garbage yields misses, never an access outside the mapping and never an endless loop.
 *
 * Bytes (little endian)
 *   page 0   off 0 magic u64 | 8 format u32 | 12 epoch u32 | 16 capacity u64 | 24 lines u64 | 32 lines_off u64
 *            | 40 slots_off u64 | 48 size u64 | 56 seed u64 | 64 lease_end_ns u64
 *   lines    64 bytes each: 7 entries u64 (tag in the high 32 bits, slot number + 1 in the low 32; 0 = empty), then a
 *            control word u64: how many entries were pushed past this line because it was full
 *   slots    64 bytes each: struct kv_slot
 *
 * Index: a key's home line is hash * lines >> 32; a full line passes the entry on to the next one and counts it. A reader
 * stops at the first line whose count is 0, so deletion needs no tombstone and the table no rehash.
 *
 * Ordering: a slot's words are stored with release and loaded with acquire, between two stores of an odd and an even version.
 * Loading a word of a later writing therefore makes that writing's odd version visible to the second version load. No
 * fences, so ThreadSanitizer sees it all; on x86-64 every one of these is a plain move.
 *
 * Lease: lease_end_ns is on CLOCK_MONOTONIC; SLOTS_FOREVER = no lease, always served (so a fresh table), 0 = not served. The
 * writer alone sets it. How readers use it stands at the top of slots_reader.c.
 * Source: Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012.
 */
#ifndef UCXKV_SLOTS_H
#define UCXKV_SLOTS_H

#include <stddef.h>
#include <stdint.h>

#define SLOTS_MAGIC 0x31544f4c53564b55ULL /* "UKVSLOT1" as bytes U K V S L O T 1 */
#define SLOTS_FORMAT 2u
#define SLOTS_HEADER 4096u
#define SLOTS_NONE 0xffffffffu
#define SLOTS_EPOCH_OFF 12u
#define SLOTS_LEASE_OFF 64u /* a cache line of its own: it is stored anew with every renewal */
#define SLOTS_FOREVER UINT64_MAX
#define SLOTS_UNSERVED UINT64_MAX /* in place of a count: the table is not served now, nothing was answered */
#define SLOTS_PROBES 256u /* lines a search visits at most; an insertion that would need more is refused */
#define SLOTS_PART 1u     /* flags[0]: a derived slot, part p >= 1 of a block; nobody's parent, never listed */

enum { SLOT_FREE = 0, SLOT_VISIBLE = 1 };
enum { SERVED, LEASE_OVER, OTHER_EPOCH };
enum { KV_HIT, KV_MISS, KV_SIZE, KV_CORRUPT, KV_UNMAPPED, KV_STALE, KV_UNAVAILABLE, KV_CANCELLED };
enum { PUT_STORED, PUT_ALREADY, PUT_ORDER, PUT_BUSY, PUT_NO_SPACE, PUT_SEALED, PUT_REFUSED };

typedef struct {
    uint8_t key[16];
    uint64_t generation;
    uint32_t epoch;
    uint8_t state, parts;
    uint16_t region;
    uint64_t offset;
    uint32_t length;
    uint8_t tier, flags[3];
    uint64_t sum;
    uint32_t check, version;
} kv_slot;

/* A checked, private copy of a table's header; everything after it is bounds-checked against these. */
typedef struct {
    uint8_t *mem;
    uint64_t size, capacity, lines, lines_off, slots_off, seed;
    uint32_t epoch; /* the one that is served; changed only by slots_follow and slots_set_epoch */
} kv_table;

/* The writer's private state. next[capacity] belongs to the caller: a free slot's entry is the free list, a used slot's is
 * the caller's to use. */
typedef struct {
    kv_table t;
    uint32_t *next;
    uint32_t free_head; /* first free slot below fresh, or SLOTS_NONE */
    uint32_t fresh;     /* slots at and above this were never used */
    uint32_t used;
} kv_writer;

typedef struct { uint64_t addr, len; } kv_iov;     /* a piece of the caller's memory */
typedef struct { uint64_t base, size; } kv_region; /* a mapped segment; base 0 = not mapped here */
typedef struct {
    uint64_t addr, length, sum, generation;
    uint32_t slot;
    uint16_t region;
    uint8_t status, tier;
} kv_found;
typedef struct {
    const kv_table *table;
    const kv_region *regions;
    uint64_t n_regions;
} kv_resolver;

/* table (slots.c) */
uint64_t slots_default_lines(uint64_t capacity);
uint64_t slots_bytes(uint64_t capacity, uint64_t lines);
int slots_format(void *mem, uint64_t size, uint64_t capacity, uint64_t lines, uint32_t epoch, uint64_t seed);
int slots_attach(kv_table *t, void *mem, uint64_t size);
void slots_detach(kv_table *t);
int slots_serving(const kv_table *t);
void slots_follow(kv_table *t);
void slots_set_lease(kv_writer *w, uint64_t until_ns);
uint64_t slots_set_epoch(kv_writer *w, uint32_t epoch);
int slots_writer_open(kv_writer *w, void *mem, uint64_t size, void *next);
void slots_find(const kv_table *t, uint64_t n, const void *keys, void *idx);
uint64_t slots_publish(kv_writer *w, uint64_t n, const void *recs, void *idx);
uint64_t slots_put(kv_writer *w, uint64_t n, const void *keys, const void *parents, const void *regions, const void *offsets,
                   const void *lengths, const void *sums, uint8_t tier, uint8_t flag, uint64_t generation, void *status,
                   void *idx, void *parent_idx);
uint64_t slots_hide(kv_writer *w, uint64_t n, const void *idx);
int slots_move(kv_writer *w, uint32_t slot, uint16_t region, uint64_t offset, uint8_t tier, uint64_t sum);
uint64_t slots_scan(const kv_table *t, uint64_t cursor, uint64_t n, void *out, uint64_t *found);

/* reader (slots_reader.c) */
uint64_t slots_lookup(const kv_table *t, uint64_t n, const void *keys, void *out, void *found);
uint64_t slots_match(const kv_table *t, uint64_t n, const void *keys);
uint64_t slots_exists(const kv_table *t, uint64_t n, const void *keys, void *out);
uint64_t slots_read(const kv_table *t, const void *regions, uint64_t n_regions, uint64_t n, const void *keys, const void *first,
                    const void *iov, void *status, void *length, void *generation, volatile int32_t *cancel);
int slots_read_one(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, uint64_t addr, uint64_t len,
                   kv_found *out);
int slots_read_into(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, void *dst, uint64_t len);
int slots_view(const kv_table *t, const void *regions, uint64_t n_regions, const void *key, kv_found *out);
size_t slots_resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch);
int slots_recheck(const kv_table *t, uint32_t slot, uint64_t generation);
void slots_region_set(void *regions, uint64_t index, uint64_t base, uint64_t size);
uintptr_t slots_resolve_address(void);

#endif
