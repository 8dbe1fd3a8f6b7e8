/* service_check.c: the data service and its client on the real UCX, under sanitizers: `service_check SEED ROUNDS`.
 *
 * One process: the service's own thread, the client in the main thread, and a third thread that grants and revokes extents,
 * the client's own among them, all the time. Rounds of look-ups, reads (every way, pieces, misses, abandoned ones), writes
 * (granted and not, and into extents that are being taken away), malformed messages, and sessions that end in the middle;
 * first over TCP (fragments, PEER mode), then over shared memory (rendezvous, received in place, NONE mode). Bytes are
 * compared; an extent whose revocation was confirmed must keep what is put there.
 */
#include "service_calls.h"

enum { BLOCKS = 64, SLOT = 1 << 16, KEYS = 16, EXTENTS = 32, EPOCH = 5 };
static uint8_t *segment;
static uint64_t lengths[BLOCKS], sums[BLOCKS];
static kv_service *service;
static _Atomic int is_over;
static _Atomic uint64_t own_token; /* of the client's session, for the meddler */
static int is_tcp;
static size_t resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch) {
    (void)ctx;
    *epoch = EPOCH;
    for (size_t i = 0; i < n; i++) {
        uint64_t number;
        memcpy(&number, keys + 16 * i, 8);
        memset(&out[i], 0, sizeof out[i]);
        out[i].status = KV_MISS;
        if (number >= BLOCKS) continue;
        out[i].addr = (uint64_t)(uintptr_t)segment + number * SLOT;
        out[i].length = lengths[number];
        out[i].sum = sums[number];
        out[i].generation = number + 1;
        out[i].status = KV_HIT;
    }
    return n;
}

/* Grants and revokes extents above those of write_round: to the client's session, to sessions that do not exist. An extent
 * that came back is this thread's to write until it is granted again; nobody else does. */
static void *meddler(void *arg) {
    uint64_t seed = 99, confirmed = 0;
    (void)arg;
    while (!is_over) {
        uint16_t region[4] = {0};
        uint64_t offset[4], capacity[4], counters[16];
        uint8_t out[4], granted[4];
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t token = seed >> 40 & 1 ? own_token : 5;
        for (int i = 0; i < 4; i++) {
            offset[i] = (BLOCKS + EXTENTS + ((seed >> 33) + i * 7) % 32) * (uint64_t)SLOT;
            capacity[i] = SLOT;
        }
        kv_service_grant(service, token, 4, region, offset, capacity, granted);
        usleep(seed >> 50 & 1 ? 100 : 2000);
        kv_service_revoke(service, token, 4, region, offset, out);
        for (int i = 0; i < 4; i++)
            if (granted[i] == KV_GRANT_OK && out[i] == KV_GRANT_OK) memset(segment + offset[i], 0x77, SLOT);
        usleep(200);
        for (int i = 0; i < 4; i++) {
            if (granted[i] != KV_GRANT_OK || out[i] != KV_GRANT_OK) continue;
            for (uint32_t k = 0; k < SLOT; k += 61) CHECK(segment[offset[i] + k] == 0x77);
            confirmed++;
        }
        kv_service_counters(service, counters);
    }
    return (void *)(uintptr_t)confirmed;
}

static void progress_until(kv_worker *w, kv_fetcher *f, int (*is_done)(kv_worker *, kv_fetcher *, uint64_t), uint64_t arg) {
    uint64_t until = kv_now_ns() + 60000000000ull;
    int has_moved;
    while (!is_done(w, f, arg)) {
        kv_progress(w, 100000, 100000, &has_moved);
        kv_ring_release(w, w->head - w->tail);
        CHECK(kv_now_ns() < until);
    }
}

static int is_answered(kv_worker *w, kv_fetcher *f, uint64_t ticket) {
    (void)w, (void)f;
    uint64_t tickets[8], tokens[8];
    int32_t statuses[8];
    size_t n = kv_service_results(service, 8, tickets, tokens, statuses);
    for (size_t i = 0; i < n; i++)
        if (tickets[i] == ticket) {
            CHECK(statuses[i] == 0);
            return 1;
        }
    return 0;
}

static int is_recorded(kv_worker *w, kv_fetcher *f, uint64_t id) {
    (void)w;
    for (kv_fetch *r = f->buckets[id % KV_FETCH_BUCKETS]; r != NULL; r = r->next)
        if (r->id == id) return r->is_recorded;
    return 1;
}

static int is_let_go(kv_worker *w, kv_fetcher *f, uint64_t id) {
    (void)w;
    return kv_fetch_find(f, id) == NULL;
}

static int is_empty(kv_worker *w, kv_fetcher *f, uint64_t arg) {
    (void)w, (void)arg;
    return f->live == 0;
}

static int is_closed(kv_worker *w, kv_fetcher *f, uint64_t endpoint) {
    (void)w, (void)f;
    return kv_endpoint_is_closed((kv_endpoint *)(uintptr_t)endpoint);
}

typedef struct {
    kv_worker *worker;
    kv_fetcher *fetcher;
    kv_endpoint *endpoint;
    uint64_t token, id, tickets;
    uint8_t *buffer;
} side;

static void session_open(side *c) {
    static uint8_t address[16384];
    c->token = next() | 1;
    int64_t n = kv_worker_address(c->worker, address, sizeof address);
    CHECK(n > 0 && kv_service_command(service, KV_OPEN_SESSION, ++c->tickets, c->token, address, (size_t)n, is_tcp, is_tcp,
                                      is_tcp ? 1 + (int)(c->token % 3) : 1) ==
          0);
    progress_until(c->worker, c->fetcher, is_answered, c->tickets);
    kv_service_address(service, address, sizeof address);
    CHECK(kv_endpoint_from_address(c->worker, address, is_tcp, &c->endpoint) == 0);
    own_token = c->token;
}

static void session_close(side *c) {
    kv_fetch_endpoint_gone(c->fetcher, c->endpoint);
    CHECK(kv_service_command(service, KV_CLOSE_SESSION, ++c->tickets, c->token, NULL, 0, 0, 0, 1) == 0);
    progress_until(c->worker, c->fetcher, is_answered, c->tickets);
    CHECK(kv_endpoint_close(c->endpoint, is_tcp) >= 0);
    progress_until(c->worker, c->fetcher, is_closed, (uint64_t)(uintptr_t)c->endpoint);
    kv_endpoint_free(c->endpoint);
    progress_until(c->worker, c->fetcher, is_empty, 0);
}

static void read_round(side *c) {
    uint8_t keys[KEYS * 16] = {0};
    uint64_t numbers[KEYS], addr[2 * KEYS], len[2 * KEYS], stored[KEYS], generation[KEYS];
    uint32_t first[KEYS + 1] = {0}, pieces = 0, receives;
    uint8_t status[KEYS], *at = c->buffer;
    uint32_t n = 1 + (uint32_t)(next() % KEYS);
    for (uint32_t i = 0; i < n; i++) {
        numbers[i] = next() % (BLOCKS + 8);
        memcpy(keys + 16 * i, &numbers[i], 8);
        uint64_t length = numbers[i] < BLOCKS ? lengths[numbers[i]] : 100;
        if (next() % 16 == 0) length++;
        uint64_t cut = next() % 3 ? length : next() % (length + 1);
        addr[pieces] = (uint64_t)(uintptr_t)at, len[pieces++] = cut;
        if (cut < length) addr[pieces] = (uint64_t)(uintptr_t)at + cut, len[pieces++] = length - cut;
        at += length;
        first[i + 1] = pieces;
    }
    static const uint32_t fragments[] = {4096, 10000, 30000, 65536};
    uint64_t id = ++c->id;
    uint32_t epoch = next() % 8 ? EPOCH : EPOCH + 1;
    int32_t code = kv_fetch_read(c->fetcher, c->endpoint, c->token, epoch, id, n, keys, first, addr, len,
                                 is_tcp ? fragments[next() % 4] : 0, 1, NULL, next() % 2 * 30000);
    CHECK(code >= 0);
    int is_abandoned = next() % 8 == 0;
    if (code == 1 && !is_abandoned) progress_until(c->worker, c->fetcher, is_recorded, id);
    kv_fetch_take(c->fetcher, id, status, stored, generation, NULL, &receives);
    if (receives) progress_until(c->worker, c->fetcher, is_let_go, id); /* the buffer is used again */
    for (uint32_t i = 0; i < n; i++) {
        uint64_t length = 0;
        for (uint32_t k = first[i]; k < first[i + 1]; k++) length += len[k];
        if (status[i] == KV_HIT) {
            CHECK(numbers[i] < BLOCKS && stored[i] == length && generation[i] == numbers[i] + 1);
            CHECK(memcmp((void *)(uintptr_t)addr[first[i]], segment + numbers[i] * SLOT, length) == 0);
        } else if (!is_abandoned) {
            CHECK(status[i] == (numbers[i] < BLOCKS ? KV_SIZE : epoch == EPOCH ? KV_MISS : KV_OTHER_EPOCH));
        }
    }
}

static void write_round(side *c) {
    uint32_t first[5] = {0}, n = 1 + (uint32_t)(next() % 4), receives;
    uint64_t addr[4], len[4], offset[4], capacity[4];
    uint16_t region[4] = {0};
    uint8_t out[4], status[4], *at = c->buffer;
    for (uint32_t i = 0; i < n; i++) {
        len[i] = 1 + next() % SLOT;
        addr[i] = (uint64_t)(uintptr_t)at;
        fill(at, len[i], c->id + i);
        at += len[i];
        offset[i] = (BLOCKS + next() % 8 * 4 + i) * (uint64_t)SLOT;
        capacity[i] = SLOT;
        first[i + 1] = i + 1;
    }
    uint32_t granted = (uint32_t)(next() % (n + 1));
    kv_service_grant(service, c->token, granted, region, offset, capacity, out);
    uint64_t id = ++c->id;
    int32_t code = kv_fetch_write(c->fetcher, c->endpoint, c->token, id, n, first, addr, len, region, offset,
                                  !is_tcp ? 0 : next() % 2 ? 4096 : 30000, NULL, 30000);
    CHECK(code >= 0);
    if (code == 1) progress_until(c->worker, c->fetcher, is_recorded, id);
    CHECK(kv_fetch_take(c->fetcher, id, status, NULL, NULL, NULL, &receives) >= 0);
    kv_service_revoke(service, c->token, n, region, offset, out);
    for (uint32_t i = 0; i < n; i++) {
        CHECK(status[i] == (i < granted ? KV_WRITTEN : KV_REFUSED));
        CHECK(out[i] == (i < granted ? KV_GRANT_OK : KV_GRANT_UNKNOWN));
        if (i < granted) CHECK(memcmp(segment + offset[i], (void *)(uintptr_t)addr[i], len[i]) == 0);
    }
}

/* Writes into extents that the meddler takes away meanwhile. */
static void race_round(side *c) {
    uint32_t first[5] = {0, 1, 2, 3, 4}, receives;
    uint64_t addr[4], len[4], offset[4];
    uint16_t region[4] = {0};
    uint8_t status[4];
    for (uint32_t i = 0; i < 4; i++) {
        len[i] = 1 + next() % SLOT;
        addr[i] = (uint64_t)(uintptr_t)c->buffer;
        offset[i] = (BLOCKS + EXTENTS + next() % 32) * (uint64_t)SLOT;
    }
    uint64_t id = ++c->id;
    int32_t code = kv_fetch_write(c->fetcher, c->endpoint, c->token, id, 4, first, addr, len, region, offset,
                                  is_tcp ? 4096 : 0, NULL, 30000);
    CHECK(code >= 0);
    if (code == 1) progress_until(c->worker, c->fetcher, is_recorded, id);
    CHECK(kv_fetch_take(c->fetcher, id, status, NULL, NULL, NULL, &receives) >= 0);
    for (uint32_t i = 0; i < 4; i++) CHECK(status[i] == KV_WRITTEN || status[i] == KV_REFUSED);
    progress_until(c->worker, c->fetcher, is_let_go, id);
}

static void lookup_round(side *c) {
    static uint8_t keys[2000 * 16];
    static kv_found found[2000];
    static uint8_t status[2000];
    uint32_t n = 1 + (uint32_t)(next() % 2000), receives;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t number = i % (BLOCKS + 3);
        memcpy(keys + 16 * i, &number, 8);
    }
    uint64_t id = ++c->id;
    int is_asked = next() % 4 != 0; /* else in another epoch */
    int32_t code = kv_fetch_lookup(c->fetcher, c->endpoint, c->token, EPOCH + !is_asked, id, n, keys, 30000);
    CHECK(code >= 0);
    if (code == 1) progress_until(c->worker, c->fetcher, is_recorded, id);
    memset(found, 0xee, sizeof found);
    kv_fetch_take(c->fetcher, id, status, NULL, NULL, found, &receives);
    for (uint32_t i = 0; i < n; i++) {
        CHECK(status[i] == (is_asked ? KV_HIT : KV_OTHER_EPOCH));
        if (!is_asked) CHECK(found[i].status == 0xee);
        if (!is_asked) continue;
        CHECK(found[i].status == (i % (BLOCKS + 3) < BLOCKS ? KV_HIT : KV_MISS));
        CHECK((found[i].addr == UINT64_MAX) == (found[i].status == KV_MISS)); /* the place within the region */
    }
}

static void garbage_round(side *c) {
    uint8_t header[KV_MAX_HEADER], payload[5000];
    for (size_t i = 0; i < sizeof header; i++) header[i] = next() % 2 ? 0 : (uint8_t)next();
    if (next() % 2) memcpy(header, &c->token, 8);
    memset(payload, (int)next(), sizeof payload);
    kv_iov piece = {(uint64_t)(uintptr_t)payload, next() % sizeof payload};
    int32_t code = kv_message_send(c->endpoint, 16 + next() % 8, header, next() % sizeof header, 1, &piece,
                                   UCP_AM_SEND_FLAG_EAGER, NULL, ++c->id, 0);
    CHECK(code >= 0 || code == UCS_ERR_INVALID_PARAM);
    uint64_t until = kv_now_ns() + 60000000000ull;
    int has_moved;
    while (c->worker->inflight && kv_now_ns() < until) { /* the payload is on this stack */
        kv_progress(c->worker, 10000, 10000, &has_moved);
        kv_ring_release(c->worker, c->worker->head - c->worker->tail);
    }
}

/* Everything over one kind of transport. */
static void check(long rounds) {
    const char *names[] = {"TLS", "TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"};
    const char *values[] = {is_tcp ? "tcp,self" : "posix,cma,self", "256k", "256k"};
    ucp_context_h context;
    uint32_t unknown;
    CHECK(kv_context_open(names, values, 3, 1, &context, &unknown) == 0 && unknown == 0);
    size_t size = (size_t)(BLOCKS + EXTENTS + 32) * SLOT;
    segment = calloc(1, size);
    for (int i = 0; i < BLOCKS; i++) {
        lengths[i] = i % 4 ? next() % SLOT : next() % 200;
        fill(segment + i * (size_t)SLOT, lengths[i], (uint64_t)i);
        sums[i] = kvx_sum(segment + i * (size_t)SLOT, lengths[i]);
    }
    ucp_mem_h memh;
    uint64_t base;
    CHECK(kv_memory_map(context, (uint64_t)(uintptr_t)segment, size, &memh, &base) == 0);
    CHECK(kv_service_open(context, (uint64_t)(uintptr_t)resolve, 0, 50000, &service) == 0);
    CHECK(kv_service_lend(service, 0, base, size, memh) == 0);
    side c = {0};
    CHECK(kv_worker_open(context, 1024, 1, &c.worker) == 0 && kv_fetcher_open(c.worker, &c.fetcher) == 0);
    c.buffer = calloc(KEYS, SLOT + 1);
    pthread_t thread;
    void *confirmed;
    is_over = 0;
    session_open(&c);
    CHECK(pthread_create(&thread, NULL, meddler, NULL) == 0);
    static void (*const kinds[])(side *) = {read_round,  read_round,   read_round, write_round, write_round,
                                            race_round, race_round, lookup_round, garbage_round};
    for (long i = 0; i < rounds; i++) {
        kinds[next() % (sizeof kinds / sizeof *kinds)](&c);
        if (next() % 32 == 0) {
            session_close(&c);
            session_open(&c);
        }
    }
    session_close(&c);
    is_over = 1;
    pthread_join(thread, &confirmed);
    uint64_t counters[16];
    kv_service_counters(service, counters);
    CHECK(counters[2] > 0 && counters[12] <= 1 && confirmed != NULL);
    kv_worker_close(c.worker);
    kv_fetcher_close(c.fetcher);
    kv_service_close(service);
    kv_memory_unmap(context, memh);
    kv_context_close(context);
    free(segment);
    free(c.buffer);
    printf("service_check: %s: %ld rounds, %llu reads, %llu writes, %llu malformed, %llu extents taken back\n", values[0],
           rounds, (unsigned long long)counters[2], (unsigned long long)counters[6], (unsigned long long)counters[10],
           (unsigned long long)(uintptr_t)confirmed);
}

int main(int argc, char **argv) {
    state = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    long rounds = argc > 2 ? atol(argv[2]) : 100;
    is_tcp = 1;
    check(rounds);
    is_tcp = 0;
    check(rounds);
    return 0;
}
