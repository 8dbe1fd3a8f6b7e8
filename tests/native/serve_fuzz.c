/* serve_fuzz.c: fuzzes the node's side of the data service: service.c, serve.c, accept.c as they are, on ucp_double.h.
 *
 * An input is a sequence of events that the data thread meets in its own loop: LOOKUP, READ and WRITE messages and ones of
 * any id and bytes, ends and errors of what it started, sessions that open, connect, fail and close, grants, revocations,
 * regions lent and withdrawn, time, and allocations that fail. What must hold, beside memory safety and no leak:
 *   - nothing but a live grant of the sender's session is ever written (the regions are compared with a model's);
 *   - an extent whose revocation or whose session's close was confirmed is written no more;
 *   - every answer goes to the session that asked, parses, and answers each key once, whole and in order, from lent memory;
 *   - every read accepted is answered in the end, unless its session ended or memory ran out;
 *   - counts of sessions, grants and messages are those of the model, each command has one result, all bounds are kept.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ucp_double.h"

static int start_here(void *(*main)(void *), void *arg);
static int wait_a_while(struct pollfd *fds, int timeout_ms);

#define malloc fuzz_malloc
#define calloc fuzz_calloc
#define clock_gettime fuzz_clock
#define sched_yield() ((void)0)
#define pthread_create(thread, attr, main, arg) start_here(main, arg)
#define pthread_join(thread, result) ((void)0)
#define poll(fds, n, timeout_ms) wait_a_while(fds, timeout_ms)
#define eventfd(value, flags) 1001
#define write(fd, bytes, n) ((ssize_t)(n) + 0 * (fd))
#define read(fd, bytes, n) ((ssize_t)(n) + 0 * (fd))
#define close(fd) ((void)0)

/* Small tables are quick to make, small bounds are reached by short inputs. */
#define KV_BUCKETS 32
#define KV_MAX_REGIONS 8
#include "service.h"
#undef KV_MAX_SESSIONS
#undef KV_MAX_PARKED
#undef KV_MAX_SENDS
#undef KV_SESSION_WINDOW
#define KV_MAX_SESSIONS 6
#define KV_MAX_PARKED 4
#define KV_MAX_SENDS 64
#define KV_SESSION_WINDOW (64u << 10)

#include "accept.c"
#include "serve.c"
#include "service.c"
#include "ucx.c"

#undef malloc
#undef calloc

#include "serve_model.h"

static uint64_t total_events;

/* ---- messages ---- */

/* Would this WRITE be let in? */
static int is_covered(const kv_write *w, size_t length, int is_rendezvous) {
    const a_session *s = session_of(w->session);
    if (s == NULL || s->state != OPEN || s->session->ep == NULL || (is_rendezvous && s->is_eager_only)) return 0;
    const a_grant *g = grant_at(w->region, w->offset);
    return g != NULL && g->token == w->session && !g->is_revoked && kv_write_fits(w, length, g->capacity);
}

static void deliver(unsigned id, uint8_t *header, size_t header_length, uint8_t *payload, size_t length,
                    int is_rendezvous) {
    kv_counters *c = &m.service->counters;
    uint64_t before = c->lookups + c->reads + c->refused + c->unknown_session + c->malformed, writes = c->writes;
    uint64_t dropped = c->dropped, received = dbl.received, failed = fuzz_failed;
    kv_write w;
    int is_write = id == KV_AM_WRITE && kv_parse_write(header, header_length, length, &w), is_let_in = 0;
    if (is_write && is_covered(&w, length, is_rendezvous)) {
        is_let_in = 1;
        CHECK(w.region < 2 && w.offset + w.at + length <= SMALL);
        if (!is_rendezvous) memcpy(m.shadow[w.region] + w.offset + w.at, payload, length);
    }
    double_deliver(id, header, header_length, payload, length, is_rendezvous, 0);
    uint64_t counted = c->lookups + c->reads + c->refused + c->unknown_session + c->malformed - before;
    uint64_t ended = c->writes - writes;
    CHECK(counted <= 1 && ended <= (uint64_t)is_let_in);
    if (fuzz_failed != failed) return; /* an allocation was refused: dropped or unanswered */
    if (is_let_in)
        CHECK(counted == 0 && (is_rendezvous ? dbl.received == received + 1 : ended == 1));
    else
        CHECK(counted + c->dropped - dropped >= 1 && ended == 0);
}

static uint64_t some_token(void) {
    uint8_t which = fuzz_u8();
    if (which >= 0xf8 || m.sessions_count == 0) return fuzz_take(8);
    return m.sessions[which % m.sessions_count].token;
}

/* A request that the model follows; NULL when there are enough, or its session is not open. */
static a_request *follow(unsigned kind, uint64_t token, uint32_t count, uint32_t fragment) {
    a_session *s = session_of(token);
    if (m.requests_count == TRACKED || s == NULL || s->state != OPEN) return NULL;
    a_request *r = &m.requests[m.requests_count++];
    *r = (a_request){.id = m.requests_count, .kind = kind, .session = (unsigned)(s - m.sessions), .count = count,
                     .left = count, .fragment = fragment, .is_accepted = 1};
    r->answered = calloc(count ? count : 1, 1);
    r->at = calloc(count ? count : 1, sizeof *r->at);
    return r;
}

static uint8_t *spoilt(uint8_t *header, size_t *length, unsigned flags) {
    if (flags & 4) header[fuzz_below(*length)] ^= (uint8_t)(1 + fuzz_u8());
    if (flags & 8) *length -= 1 + fuzz_below(*length);
    return header;
}

/* flags: 1 by rendezvous, 4 a header byte changed, 8 header cut, 16 payload of a wrong length */
static void event_ask(unsigned id) {
    static const uint32_t fragments[] = {0, 1, 4096, 5000, 65536, 0, 4096, UINT32_MAX};
    unsigned flags = fuzz_u8(), size = fuzz_u8();
    kv_ask ask = {.session = some_token()};
    ask.count = size < 224 ? 1 + size % 40 : size == 255 ? 0 : size == 254 ? 4097 : size == 253 ? 4096 : size;
    ask.fragment = fragments[fuzz_u8() % 8];
    size_t length = (size_t)ask.count * KV_KEY_BYTES, header_length = sizeof ask;
    uint8_t *payload = malloc(length + (flags & 16));
    memset(payload, 0, length + (flags & 16));
    for (uint32_t i = 0; i < ask.count; i++) payload[i * 16] = i < 40 ? fuzz_u8() : (uint8_t)(i % 16);
    a_request *r = flags & ~1u & 28 ? NULL : follow(id, ask.session, ask.count, ask.fragment);
    ask.request = r != NULL ? r->id : UNTRACKED | m.tickets;
    uint8_t *header = malloc(sizeof ask);
    memcpy(header, &ask, sizeof ask);
    spoilt(header, &header_length, flags);
    if (header_length > 15) header[15] |= (uint8_t)(r == NULL) << 7;
    uint64_t reads = m.service->counters.reads + m.service->counters.lookups;
    deliver(id, header, header_length, payload, length + (flags & 16), flags & 1);
    if (r != NULL) r->is_accepted = m.service->counters.reads + m.service->counters.lookups != reads;
}

static void event_write(void) {
    unsigned flags = fuzz_u8(), which = fuzz_u8();
    kv_write w = {.session = some_token(), .index = fuzz_u8() % 4};
    const a_grant *g = &m.grants[which % GRANTS];
    size_t length = fuzz_u8();
    w.at = flags & 2 ? fuzz_number() : 0;
    if (g->is_used && which < 240) {
        w.region = g->region, w.offset = g->offset;
        if (flags & 32) w.session = g->token;
        if (flags & 64) length = g->capacity - (w.at < g->capacity ? w.at : 0);
    } else {
        w.region = (uint16_t)fuzz_u8(), w.offset = fuzz_number();
    }
    uint8_t *payload = malloc(length), fill = fuzz_u8();
    for (size_t i = 0; i < length; i++) payload[i] = (uint8_t)(fill + i);
    a_request *r = flags & (4 | 8) || length == 0 || length > 1 << 16 ? NULL : follow(KV_AM_WRITE, w.session, 4, 0);
    w.request = r != NULL ? r->id : UNTRACKED | m.tickets;
    uint8_t *header = malloc(sizeof w);
    size_t header_length = sizeof w;
    memcpy(header, &w, sizeof w);
    spoilt(header, &header_length, flags);
    if (header_length > 15) header[15] |= (uint8_t)(r == NULL) << 7;
    deliver(KV_AM_WRITE, header, header_length, payload, length, flags & 1);
}

static void event_bytes(void) {
    unsigned id = fuzz_u8() & 31, flags = fuzz_u8();
    if (flags & 2) id = (unsigned[]){KV_AM_LOOKUP, KV_AM_READ, KV_AM_WRITE}[id % 3];
    size_t header_length = fuzz_u8() % 100, length = fuzz_below(600);
    uint8_t *header = fuzz_bytes(header_length), *payload = fuzz_bytes(length);
    uint64_t token = some_token();
    if (flags & 4 && header_length >= 8) memcpy(header, &token, 8);
    if (header_length > 15) header[15] |= 0x80;
    deliver(id, header, header_length, payload, length, flags & 1);
}

/* ---- the node's side ---- */

static uint64_t ticket(void) {
    if (++m.tickets >= TICKETS) {
        fuzz_at = fuzz_end;
        return 0;
    }
    m.ticket_answers[m.tickets] = 1;
    return m.tickets;
}

static void command(int kind, uint64_t token, const void *address, size_t length, int is_peer_mode, int is_eager_only,
                    int connections) {
    uint64_t number = ticket();
    if (number != 0 && kv_service_command(m.service, kind, number, token, address, length, is_peer_mode, is_eager_only,
                                           connections))
        m.ticket_answers[number] = 2; /* no memory: nothing was posted */
}

static void event_open(void) {
    unsigned flags = fuzz_u8();
    if (m.sessions_count == SESSIONS) return;
    a_session *s = &m.sessions[m.sessions_count++];
    uint8_t address[24] = {0};
    *s = (a_session){.state = ASKED, .token = m.sessions_count * 0x0101010101010101ull, .is_await = flags & 1,
                     .is_eager_only = (flags & 2) != 0, .client_id = flags >> 5 & 3};
    unsigned connections = fuzz_u8();
    dbl.connect_fail_in = flags & 8 ? 1 + (connections >> 4) % 4 : 0;
    memcpy(address, &s->client_id, 8);
    command(s->is_await ? KV_AWAIT_SESSION : KV_OPEN_SESSION, s->token, address, s->is_await ? (flags & 16 ? 7 : 8) : 24,
            (flags & 4) != 0, s->is_eager_only, (int)(connections & 15) - 1);
    m.idle = 16;
}

static void event_close(void) {
    a_session *s = session_of(some_token());
    uint64_t token = s == NULL ? 77 : s->token;
    command(KV_CLOSE_SESSION, token, NULL, 0, 0, 0, 1);
    if (s != NULL && !s->is_close_asked) s->is_close_asked = 1, s->close_ticket = m.tickets;
}

static void event_grant(void) {
    uint64_t token = some_token(), offsets[3], capacities[3];
    uint16_t regions[3];
    uint8_t out[3];
    size_t n = 1 + fuzz_u8() % 3;
    const a_session *s = session_of(token);
    if (s == NULL || s->state != OPEN || grants_used() + n > GRANTS) return; /* the node grants to live sessions */
    for (size_t i = 0; i < n; i++) {
        unsigned at = fuzz_u8();
        regions[i] = at < 250 ? at % 2 : (uint16_t)(at * 257);
        offsets[i] = at < 240 ? (at / 2 % 16) * 256 : fuzz_number();
        capacities[i] = at < 240 ? 1u + fuzz_u8() : fuzz_number();
    }
    uint64_t failed = fuzz_failed;
    kv_service_grant(m.service, token, n, regions, offsets, capacities, out);
    for (size_t i = 0; i < n; i++) {
        int is_inside = regions[i] < REGIONS && capacities[i] != 0 &&
                        kv_in_region(offsets[i], capacities[i], m.lent[regions[i]]);
        int is_taken = is_inside && grant_at(regions[i], offsets[i]) != NULL;
        if (fuzz_failed == failed) CHECK(out[i] == (!is_inside ? KV_GRANT_UNKNOWN : is_taken ? KV_GRANT_TAKEN : KV_GRANT_OK));
        if (out[i] != KV_GRANT_OK) continue;
        CHECK(is_inside && !is_taken);
        a_grant *g = m.grants;
        while (g->is_used) g++;
        *g = (a_grant){.is_used = 1, .token = token, .offset = offsets[i], .capacity = capacities[i], .region = regions[i]};
    }
}

static void event_revoke(void) {
    const a_grant *some = &m.grants[fuzz_u8() % GRANTS];
    uint64_t token = some->is_used && fuzz_u8() < 200 ? some->token : some_token(), offset = some->offset;
    uint16_t region = some->region;
    uint8_t out;
    a_grant *g = grant_at(region, offset);
    kv_service_revoke(m.service, token, 1, &region, &offset, &out);
    if (g == NULL || g->token != token) {
        CHECK(out == KV_GRANT_UNKNOWN);
    } else if (g->busy != 0) {
        CHECK(out == KV_GRANT_BUSY);
        g->is_revoked = 1;
    } else {
        CHECK(out == KV_GRANT_OK);
        g->is_used = 0;
    }
}

static void event_lend(void) {
    unsigned which = fuzz_u8(), region = which % REGIONS;
    uint64_t size = which & 128 ? 0 : which & 64 ? sizes[region] / 2 : sizes[region];
    int32_t status = kv_service_lend(m.service, which == 255 ? KV_MAX_REGIONS : region,
                                     (uint64_t)(uintptr_t)m.memory[region], size, (ucp_mem_h)m.memory[region]);
    if (which == 255) CHECK(status == UCS_ERR_OUT_OF_RANGE);
    else if (size != 0 && m.lent[region] != 0) CHECK(status == UCS_ERR_ALREADY_EXISTS);
    else m.lent[region] = size;
}

/* A slot of the directory says something else now; also what no directory should say. */
static void event_item(void) {
    kv_found *f = &m.items[fuzz_u8() % ITEMS];
    unsigned how = fuzz_u8(), region = how % REGIONS;
    f->status = how & 4 ? (uint8_t)(fuzz_u8() % 7) : KV_HIT;
    f->region = how & 8 ? (uint16_t)fuzz_take(2) : (uint16_t)region;
    f->addr = (uint64_t)(uintptr_t)m.memory[region] + (how & 16 ? fuzz_number() : fuzz_u8());
    f->length = how & 32 ? fuzz_number() : how & 64 ? sizes[region] / 2 : fuzz_u8();
}

static size_t resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch) {
    static const uint8_t rest[15];
    (void)ctx;
    size_t hits = 0;
    *epoch = ++m.epoch;
    for (size_t i = 0; i < n; i++) {
        if (memcmp(keys + 16 * i + 1, rest, 15) == 0) {
            out[i] = m.items[keys[16 * i] % ITEMS];
        } else {
            memset(&out[i], 0, sizeof out[i]);
            out[i].status = KV_MISS;
        }
        hits += out[i].status == KV_HIT;
    }
    return hits;
}

static void event_results(size_t max) {
    uint64_t tickets[8], tokens[8];
    int32_t statuses[8];
    size_t n = kv_service_results(m.service, max, tickets, tokens, statuses);
    for (size_t i = 0; i < n; i++) {
        if (tickets[i] == 0) continue; /* news of a lost endpoint */
        CHECK(tickets[i] < TICKETS && m.ticket_answers[tickets[i]] == 1);
        m.ticket_answers[tickets[i]] = 2;
        a_session *s = session_of(tokens[i]);
        if (s == NULL) continue;
        if (s->state == ASKED && statuses[i] != 0) s->state = ABSENT; /* it was not opened */
        if (s->close_ticket != tickets[i] || s->state != LEAVING) continue;
        CHECK(statuses[i] == KV_CLOSED_CLEAN || statuses[i] == KV_STILL_WRITING);
        if (statuses[i] != KV_CLOSED_CLEAN) continue;
        s->state = GONE;
        for (unsigned g = 0; g < GRANTS; g++) CHECK(!m.grants[g].is_used || m.grants[g].token != s->token);
    }
}

static void event_connect(void) {
    unsigned how = fuzz_u8();
    uint64_t client_id = how & 8 ? fuzz_take(8) : how & 3;
    dbl.connect_fail_in = (how & 16) != 0;
    struct ucp_conn_request *c = double_connect(client_id, !(how & 4));
    if (c != NULL) CHECK(c->is_answered);
    dbl.connect_fail_in = 0;
}

static void one_event(void) {
    static const ucs_status_t ends[] = {UCS_OK, UCS_OK, UCS_ERR_CONNECTION_RESET, UCS_ERR_CANCELED};
    static const char hosts[4][10] = {"127.0.0.1", "::1", "nowhere", ""};
    unsigned what = fuzz_u8(), how;
    uint64_t counters[16];
    switch (what % 24) {
    case 0: event_ask(KV_AM_LOOKUP); break;
    case 1: case 2: case 3: event_ask(KV_AM_READ); break;
    case 4: case 5: case 6: event_write(); break;
    case 7: event_bytes(); break;
    case 8: case 9: how = fuzz_u8(), double_finish_one(fuzz_u8(), ends[how & 3]); break;
    case 10: double_finish_all(ends[fuzz_u8() & 3]); break;
    case 11: case 12: event_open(); break;
    case 13: event_close(); break;
    case 14: case 15: event_grant(); break;
    case 16: event_revoke(); break;
    case 17: event_results(1 + fuzz_u8() % 8); break;
    case 18: dbl.fate = fuzz_u8(); break;
    case 19: /* the thread goes round: some turns, or until it looks at its commands while messages come */
        how = fuzz_u8();
        m.idle = how & 128 ? 64 - m.turns % 64 : how % 24;
        break;
    case 20:
        how = fuzz_u8();
        if (how & 1) command(KV_LISTEN, how & 2 ? 1 : 0, hosts[how >> 2 & 3], sizeof hosts[0], 0, 0, 1);
        else event_connect();
        break;
    case 21: double_fail(double_ep(fuzz_u8()), UCS_ERR_ENDPOINT_TIMEOUT); break;
    case 22:
        how = fuzz_u8();
        if (how < 128) fuzz_now_ns += (uint64_t)how * 100000000u;
        else fuzz_fail_in = 1 + how % 8;
        break;
    case 23:
        if ((how = fuzz_u8()) & 1) event_lend();
        else event_item();
        kv_service_counters(m.service, counters);
        CHECK(counters[14] == grants_used());
        break;
    }
}

/* ---- the thread's loop meets the input here ---- */

/* Everything ends well; then each read that was taken on must have been answered. Or the service ends in the middle of it. */
FUZZ_QUIET static unsigned drain(void) {
    if (m.is_cut_off) {
        atomic_store(&m.service->is_stopping, 1);
        return 0;
    }
    if (!m.is_draining) {
        m.is_draining = 1;
        m.idle = 0;
        fuzz_fail_in = 0;
        dbl.fate = 1;
    }
    if (dbl.pending != NULL && m.drained < 4096) {
        double_finish_all(UCS_OK);
        m.drained++;
        return 1;
    }
    if (++m.idle < 40) return 0; /* the loop runs its commands and answers what waits */
    for (unsigned i = 0; i < m.requests_count && fuzz_failed == 0; i++) {
        const a_request *r = &m.requests[i];
        const a_session *s = &m.sessions[r->session];
        if (r->kind == KV_AM_WRITE || !r->is_accepted || s->state != OPEN || s->session->is_lost) continue;
        CHECK(r->left == 0);
    }
    atomic_store(&m.service->is_stopping, 1);
    return 0;
}

static unsigned double_progress(void) {
    learn();
    if (m.service->is_stopping) { /* the service ends: what is in flight ends too, or only with the worker */
        fuzz_now_ns += 50000000u;
        if (m.sessions_count % 2) double_finish_all(UCS_ERR_CANCELED);
        return 0;
    }
    if (fuzz_is_over()) return drain();
    if (m.idle != 0) {
        m.idle--;
        m.turns++;
        return 0;
    }
    total_events++;
    one_event();
    check_all();
    return 1;
}

static unsigned double_is_idle(void) { return m.idle % 8 != 1; }

static int wait_a_while(struct pollfd *fds, int timeout_ms) {
    fuzz_now_ns += (uint64_t)timeout_ms * 1000000u;
    fds[0].revents = fds[1].revents = POLLIN;
    return 0;
}

static int start_here(void *(*main)(void *), void *arg) {
    m.service = arg;
    for (uint32_t i = 0; i < REGIONS && !m.is_poor; i++) {
        CHECK(kv_service_lend(m.service, i, (uint64_t)(uintptr_t)m.memory[i], sizes[i], (ucp_mem_h)m.memory[i]) == 0);
        m.lent[i] = sizes[i];
    }
    main(arg);
    return 0;
}

/* ---- one input ---- */

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    if (big == NULL) {
        big = mmap(NULL, BIG, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); /* a write to it is a crash */
        CHECK(big != MAP_FAILED);
    }
    fuzz_begin(bytes, n);
    memset(&m, 0, sizeof m);
    for (int i = 0; i < 2; i++) {
        m.memory[i] = malloc(SMALL);
        m.shadow[i] = malloc(SMALL);
        memset(m.memory[i], 0x40 + i, SMALL);
        memset(m.shadow[i], 0x40 + i, SMALL);
    }
    m.memory[2] = big;
    for (unsigned i = 0; i < ITEMS; i++) {
        unsigned region = i % 16 == 15 ? 2 : i % 2;
        m.items[i] = (kv_found){.addr = (uint64_t)(uintptr_t)m.memory[region] + i * 16, .length = i % 8 == 7 ? 0 : i * 8,
                                .region = (uint16_t)region, .generation = i, .slot = i, .tier = 1,
                                .status = i % 8 == 6 ? KV_MISS : KV_HIT};
        if (region == 2) m.items[i].length = i % 32 == 31 ? BIG - 4096 : 40000;
    }
    kv_service *service;
    uint8_t start = fuzz_u8();
    m.is_poor = start & 1;
    m.is_cut_off = (start & 6) == 6;
    if (start >= 250) fuzz_fail_in = start - 249;
    if (kv_service_open(NULL, (uint64_t)(uintptr_t)resolve, 0, start * 1000u, &service) == 0) {
        CHECK(service == m.service);
        kv_service_close(service);
    }
    double_reset();
    for (int i = 0; i < 2; i++) {
        CHECK(memcmp(m.memory[i], m.shadow[i], SMALL) == 0);
        free(m.memory[i]);
        free(m.shadow[i]);
    }
    for (unsigned i = 0; i < m.requests_count; i++) {
        free(m.requests[i].answered);
        free(m.requests[i].at);
    }
    return 0;
}

void fuzz_summary(void) { fprintf(stderr, "serve: %llu events\n", (unsigned long long)total_events); }
