/* The slot table's writer side and its format; the promises are in slots.h. */
#include "slots_atomic.h"

uint64_t slots_default_lines(uint64_t capacity) {
    return (capacity * 10 + 55) / 56; /* 7 entries a line, filled to 0.8: 11.4 bytes a slot */
}

uint64_t slots_bytes(uint64_t capacity, uint64_t lines) {
    return SLOTS_HEADER + 64 * ((lines ? lines : slots_default_lines(capacity)) + capacity);
}

/* Writes an empty table. mem is zeroed, 64-byte aligned and slots_bytes() long; 0, or -1 when an argument is out of range. */
int slots_format(void *mem, uint64_t size, uint64_t capacity, uint64_t lines, uint32_t epoch, uint64_t seed) {
    if (!capacity || capacity >= 0x7fffffff || lines >= 0x7fffffff) return -1;
    if (!lines) lines = slots_default_lines(capacity);
    if ((uintptr_t)mem % 64 || size < slots_bytes(capacity, lines)) return -1;
    uint64_t head[9] = {SLOTS_MAGIC, SLOTS_FORMAT | (uint64_t)epoch << 32, capacity, lines, SLOTS_HEADER,
                        SLOTS_HEADER + 64 * lines, size, seed, SLOTS_FOREVER};
    for (unsigned i = 9; i-- > 0;) put64((uint8_t *)mem + 8 * i, head[i]); /* the magic comes last */
    return 0;
}

/* Fills *t from a table's header after checking it against the real size of the mapping; -1 when it is not a table. */
int slots_attach(kv_table *t, void *mem, uint64_t size) {
    uint64_t head[8];
    memset(t, 0, sizeof *t);
    if ((uintptr_t)mem % 64 || size < SLOTS_HEADER) return -1;
    for (unsigned i = 0; i < 8; i++) head[i] = get64((uint8_t *)mem + 8 * i);
    uint64_t capacity = head[2], lines = head[3];
    if (head[0] != SLOTS_MAGIC || (uint32_t)head[1] != SLOTS_FORMAT) return -1;
    if (!capacity || capacity >= 0x7fffffff || !lines || lines >= 0x7fffffff) return -1;
    if (head[4] != SLOTS_HEADER || head[5] != SLOTS_HEADER + 64 * lines || size < slots_bytes(capacity, lines)) return -1;
    *t = (kv_table){.mem = mem, .size = size, .capacity = capacity, .lines = lines, .lines_off = head[4],
                    .slots_off = head[5], .seed = head[7], .epoch = (uint32_t)(head[1] >> 32)};
    return 0;
}

/* Makes *t a table with nothing in it, so that a search through it after its mapping is gone is a miss. */
void slots_detach(kv_table *t) {
    static _Alignas(64) const uint64_t empty[32] = {[SLOTS_LEASE_OFF / 8] = SLOTS_FOREVER}; /* two lines of header */
    *t = (kv_table){.mem = (uint8_t *)(uintptr_t)empty, .size = sizeof empty, .capacity = 1, .lines = 1, .lines_off = 128,
                    .slots_off = 192};
}

/* SERVED, LEASE_OVER or OTHER_EPOCH at this moment. */
int slots_serving(const kv_table *t) { return serving(t); }

/* From now on this reader trusts the table's present epoch. Other threads may be reading through *t. */
void slots_follow(kv_table *t) { put32(&t->epoch, get32(t->mem + SLOTS_EPOCH_OFF)); }

/* Lets readers answer until this moment of CLOCK_MONOTONIC; SLOTS_FOREVER: without end, 0: not at all. */
void slots_set_lease(kv_writer *w, uint64_t until_ns) { put64(w->t.mem + SLOTS_LEASE_OFF, until_ns); }

/* Takes the writer's seat on a freshly formatted table. */
int slots_writer_open(kv_writer *w, void *mem, uint64_t size, void *next) {
    memset(w, 0, sizeof *w);
    w->next = next;
    w->free_head = SLOTS_NONE;
    return slots_attach(&w->t, mem, size);
}

/* idx[i] = slot number of keys[i], or -1. */
void slots_find(const kv_table *t, uint64_t n, const void *keys, void *idx) {
    const uint8_t *k = keys;
    int32_t *out = idx;
    batch b;
    kv_slot copy;
    for (uint64_t at = 0; at < n; at += BATCH) {
        unsigned m = n - at < BATCH ? (unsigned)(n - at) : BATCH;
        batch_open(t, k + 16 * at, m, &b);
        for (unsigned i = 0; i < m; i++) out[at + i] = (int32_t)batch_search(t, k + 16 * (at + i), &b, i, &copy);
    }
}

static void slot_write(kv_table *t, uint32_t slot, const kv_slot *rec) {
    uint8_t *p = slot_at(t, slot);
    uint64_t words[8];
    memcpy(words, rec, 64);
    uint32_t version = get32(p + 60);
    put32(p + 60, version | 1);
    for (unsigned i = 0; i < SLOT_WORDS; i++) put64(p + 8 * i, words[i]);
    put32(p + 56, (uint32_t)words[7]);
    put32(p + 60, (version | 1) + 1);
}

/* Where an entry for this hash can go: the address of an empty entry, or NULL. */
static uint8_t *entry_place(const kv_table *t, uint64_t hash, uint64_t *line_out) {
    uint64_t line = home_line(t, hash), limit = probe_limit(t);
    for (uint64_t p = 0; p < limit; p++, line = next_line(t, line)) {
        uint8_t *l = line_at(t, line);
        for (unsigned e = 0; e < LINE_ENTRIES; e++) {
            if (!get64(l + 8 * e)) {
                *line_out = line;
                return l + 8 * e;
            }
        }
    }
    return NULL;
}

/* Counts one entry more (or less) on every line between the hash's home and `line`. */
static void count_passed(kv_table *t, uint64_t hash, uint64_t line, uint64_t delta) {
    for (uint64_t at = home_line(t, hash); at != line; at = next_line(t, at)) {
        uint8_t *control = line_at(t, at) + 56;
        put64(control, get64(control) + delta);
    }
}

/* Publishes one record under a key that is not in the table; the slot number, or SLOTS_NONE when the table is full. */
static uint32_t publish_one(kv_writer *w, kv_slot *rec, uint64_t hash) {
    kv_table *t = &w->t;
    uint64_t line;
    uint8_t *entry = entry_place(t, hash, &line);
    uint32_t slot = w->free_head;
    if (!entry || (slot == SLOTS_NONE && w->fresh >= t->capacity)) return SLOTS_NONE;
    if (slot == SLOTS_NONE) slot = w->fresh++;
    else w->free_head = w->next[slot];
    w->used++;
    rec->epoch = t->epoch;
    rec->state = SLOT_VISIBLE;
    rec->check = slot_check(rec);
    slot_write(t, slot, rec);
    count_passed(t, hash, line, 1);
    put64(entry, entry_of(hash, slot));
    return slot;
}

/* Publishes whole records (epoch, state, check and version are filled in here). The caller has made sure that no key is in
 * the table yet. idx[i] = slot number, or -1 when the table is full. Returns how many were published. */
uint64_t slots_publish(kv_writer *w, uint64_t n, const void *recs, void *idx) {
    const kv_slot *r = recs;
    int32_t *out = idx;
    uint64_t done = 0;
    for (uint64_t i = 0; i < n; i++) {
        kv_slot rec = r[i];
        uint32_t slot = publish_one(w, &rec, hash_key(&w->t, rec.key));
        out[i] = (int32_t)slot;
        done += slot != SLOTS_NONE;
    }
    return done;
}

static const uint8_t zero_key[16];

/* The slot of a parent that may have children: visible and not a derived slot. */
static uint32_t parent_slot(const kv_table *t, const uint8_t *key) {
    kv_slot copy;
    uint32_t slot = search(t, key, hash_key(t, key), &copy);
    return slot != SLOTS_NONE && !(copy.flags[0] & SLOTS_PART) ? slot : SLOTS_NONE;
}

/* Publishes single-part blocks in the order given, each only if its key is absent and its parent (all zero = root) visible;
 * a parent may come earlier in the same call. Generations are generation + i. status[i] != 0 on entry: left alone.
 * Out: status[i]; idx[i] = the block's slot, stored now or before, else -1; parent_idx[i] = the parent's slot or -1, valid
 * where stored. Returns how many bytes of values were stored. */
uint64_t slots_put(kv_writer *w, uint64_t n, const void *keys, const void *parents, const void *regions, const void *offsets,
                   const void *lengths, const void *sums, uint8_t tier, uint8_t flag, uint64_t generation, void *status,
                   void *idx, void *parent_idx) {
    const kv_table *t = &w->t;
    const uint8_t *key = keys, *parent = parents;
    uint8_t *st = status;
    int32_t *slots = idx, *ups = parent_idx;
    uint64_t stored = 0;
    batch b;
    for (uint64_t i = 0; i < n; i++) {
        kv_slot copy;
        const uint8_t *k = key + 16 * i, *up = parent + 16 * i;
        if (i % BATCH == 0) batch_open(t, k, n - i < BATCH ? (unsigned)(n - i) : BATCH, &b);
        slots[i] = ups[i] = -1;
        if (st[i]) continue;
        uint64_t hash = b.hash[i % BATCH];
        uint32_t slot = search(t, k, hash, &copy), above = SLOTS_NONE;
        if (!memcmp(k, zero_key, 16) || (slot != SLOTS_NONE && copy.flags[0] & SLOTS_PART)) {
            st[i] = PUT_REFUSED;
            continue;
        }
        if (slot != SLOTS_NONE) {
            st[i] = PUT_ALREADY;
            slots[i] = (int32_t)slot;
            continue;
        }
        int is_root = !memcmp(up, zero_key, 16);
        if (!is_root && i && slots[i - 1] >= 0 && !memcmp(up, k - 16, 16)) above = (uint32_t)slots[i - 1];
        else if (!is_root) above = parent_slot(t, up);
        if (!is_root && above == SLOTS_NONE) {
            st[i] = PUT_ORDER;
            continue;
        }
        kv_slot rec = {.generation = generation + i, .parts = 1, .region = ((const uint16_t *)regions)[i],
                       .offset = ((const uint64_t *)offsets)[i], .length = ((const uint32_t *)lengths)[i], .tier = tier,
                       .flags = {0, flag, 0}, .sum = ((const uint64_t *)sums)[i]};
        memcpy(rec.key, k, 16);
        slot = publish_one(w, &rec, hash);
        st[i] = slot == SLOTS_NONE ? PUT_NO_SPACE : PUT_STORED;
        slots[i] = (int32_t)slot;
        ups[i] = (int32_t)above;
        if (slot != SLOTS_NONE) stored += rec.length;
    }
    return stored;
}

/* Takes the entry of a slot out of the index; 0 when it is not there. */
static int entry_remove(kv_table *t, uint32_t slot, uint64_t hash) {
    uint64_t line = home_line(t, hash), limit = probe_limit(t), wanted = entry_of(hash, slot);
    for (uint64_t p = 0; p < limit; p++, line = next_line(t, line)) {
        uint8_t *l = line_at(t, line);
        for (unsigned e = 0; e < LINE_ENTRIES; e++) {
            if (get64(l + 8 * e) != wanted) continue;
            put64(l + 8 * e, 0);
            count_passed(t, hash, line, (uint64_t)-1);
            return 1;
        }
        if (!get64(l + 56)) return 0;
    }
    return 0;
}

/* Hides slots in the order given: index entry first, then the slot becomes free with new version. Numbers that are not
 * visible slots are skipped. Returns how many were hidden. */
uint64_t slots_hide(kv_writer *w, uint64_t n, const void *idx) {
    const int32_t *slots = idx;
    uint64_t done = 0;
    for (uint64_t i = 0; i < n; i++) {
        kv_slot copy;
        uint32_t slot = (uint32_t)slots[i];
        if (slot >= w->t.capacity || !slot_copy(&w->t, slot, &copy) || copy.state != SLOT_VISIBLE) continue;
        if (!entry_remove(&w->t, slot, hash_key(&w->t, copy.key))) continue;
        copy.state = SLOT_FREE;
        copy.check = slot_check(&copy);
        slot_write(&w->t, slot, &copy);
        w->next[slot] = w->free_head;
        w->free_head = slot;
        w->used--;
        done++;
    }
    value_fence(); /* the new versions come before whatever is written over the values next */
    return done;
}

/* Says that the value of a visible slot lies elsewhere now, bytes of this sum: readers find it in the old place or in the new
 * one, each with its own sum, and what they copied from the old one while it changed is read again. 0: done; 1: no visible
 * slot. */
int slots_move(kv_writer *w, uint32_t slot, uint16_t region, uint64_t offset, uint8_t tier, uint64_t sum) {
    kv_slot copy;
    if (slot >= w->t.capacity || !slot_copy(&w->t, slot, &copy) || copy.state != SLOT_VISIBLE) return 1;
    copy.region = region;
    copy.offset = offset;
    copy.tier = tier;
    copy.sum = sum;
    copy.check = slot_check(&copy);
    slot_write(&w->t, slot, &copy);
    value_fence(); /* the new version comes before whatever is written over the old place next */
    return 0;
}

/* Goes over to another epoch: what is visible stays so under it, slots of any other epoch are never trusted again. Ends the
 * lease, since readers of either epoch would miss blocks while it runs; readers of the old one are not served from then on.
 * The lease goes first and the header's epoch last, so whoever sees a later lease sees that epoch, and whoever attaches or
 * follows under it finds every block. Returns how many slots went over. */
uint64_t slots_set_epoch(kv_writer *w, uint32_t epoch) {
    uint64_t moved = 0;
    slots_set_lease(w, 0);
    for (uint32_t slot = 0; slot < w->fresh; slot++) {
        kv_slot copy;
        if (!slot_copy(&w->t, slot, &copy) || copy.state != SLOT_VISIBLE || copy.epoch != w->t.epoch) continue;
        if (copy.check != slot_check(&copy)) continue;
        copy.epoch = epoch;
        copy.check = slot_check(&copy);
        slot_write(&w->t, slot, &copy);
        moved++;
    }
    w->t.epoch = epoch;
    put32(w->t.mem + SLOTS_EPOCH_OFF, epoch);
    return moved;
}

/* Copies up to n visible slots from slot number `cursor` on to out, *found of them; derived slots are left out. Returns the
 * next cursor, or the table's capacity at its end; SLOTS_UNSERVED when the table is not served. Looks at 64 n + 1024 slots at most, so a call's work is bounded. */
uint64_t slots_scan(const kv_table *t, uint64_t cursor, uint64_t n, void *out, uint64_t *found) {
    kv_slot *o = out;
    uint64_t at = cursor, m = 0, stop = cursor + 64 * n + 1024;
    for (; at < t->capacity && at < stop && m < n; at++) {
        kv_slot copy;
        if (!slot_copy(t, (uint32_t)at, &copy) || copy.state != SLOT_VISIBLE || copy.epoch != t->epoch) continue;
        if (copy.flags[0] & SLOTS_PART || copy.check != slot_check(&copy)) continue;
        o[m++] = copy;
    }
    *found = m;
    if (serving(t) != SERVED) return SLOTS_UNSERVED;
    return at < t->capacity ? at : t->capacity;
}
