/* fetch_fuzz.c: fuzzes the client's side of the data service and the binding's own messages: fetch.c, receive.c, ops.c, ucx.c
 * as they are, on ucp_double.h.
 *
 * An input is a sequence of what the caller does (start reads, look-ups, writes, transfers and messages, poll, drain records,
 * take and abandon, close endpoints) and of what comes from outside: DATA, FOUND, OUTCOMES and WRITTEN messages, true and
 * false ones, for requests that live, were taken or never were; application messages; ends and errors of operations; endpoint
 * errors; connect requests. Every destination and source has its own allocation, which is freed at the first moment the rules
 * of fetch.h allow: touching one later is a crash. What must hold beside that:
 *   - a request has at most one DONE record, none when it was answered in the call, and one QUIET record when it is due;
 *   - a value's status never changes once it is there; HIT means bytes of the announced sum, and as many as were asked for;
 *   - counts of what is in flight, records kept free, and the ring's bound are right after every call;
 *   - when all is over nothing is held, reserved or leaked.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include "ucp_double.h"

#define malloc fuzz_malloc
#define calloc fuzz_calloc
#define clock_gettime fuzz_clock
#define sched_yield() ((void)0)

#include "fetch.c"
#include "ops.c"
#include "receive.c"
#include "ucx.c"

#undef malloc
#undef calloc

#include "fetch_model.h"

/* ---- from outside ---- */

static a_request *some_request(void) {
    a_request *r = &m.requests[fuzz_u8() % REQUESTS];
    return r->state == UNUSED ? NULL : r;
}

static void send_in(unsigned id, const void *header, size_t header_length, uint8_t *payload, size_t length, unsigned flags) {
    uint8_t *copy = malloc(header_length);
    memcpy(copy, header, header_length);
    if (flags & 128 && header_length) {
        copy[fuzz_below(header_length)] ^= (uint8_t)(1 + fuzz_u8());
        if (fuzz_u8() < 64) header_length -= 1 + fuzz_below(header_length);
    }
    kv_data d;
    if (id == KV_AM_DATA && kv_parse_data(copy, header_length, length, &d)) {
        a_request *r = request_of(d.request);
        if (r != NULL && d.index < r->n) r->delivered[d.index] += length;
    }
    learn_told(id, copy, header_length);
    double_deliver(id, copy, header_length, payload, length, flags & 1, 0);
}

/* flags: 1 by rendezvous, 2 a false sum, 4 another length, 8 another generation, 16 whole, 32 anywhere, 64 other bytes,
 * 128 header spoilt */
static void event_data(void) {
    a_request *r = some_request();
    unsigned flags = fuzz_u8(), index = fuzz_u8() % (VALUES + 1);
    uint64_t id = r == NULL ? fuzz_u8() : r->id, expected = r != NULL && index < r->n ? r->expected[index] : 40;
    uint64_t *next = r != NULL && index < VALUES ? &r->next[index] : NULL;
    kv_data d = {.request = id, .index = index, .status = KV_HIT, .tier = 1, .length = expected, .generation = 5};
    if (flags & 4) d.length += (uint64_t)fuzz_u8() - 128;
    if (flags & 8) d.generation = fuzz_u8();
    d.at = flags & 16 ? 0 : flags & 32 ? fuzz_u8() : next != NULL ? *next : 0;
    uint64_t left = d.at < expected ? expected - d.at : 0, length = flags & 16 ? expected : fuzz_u8();
    if (!(flags & 32) && length > left) length = left;
    uint8_t *whole = malloc(expected + 1), *payload = malloc(length);
    for (uint64_t i = 0; i < expected; i++) whole[i] = byte_of(id, index, i);
    d.sum = kvx_sum(whole, expected) + (flags & 2 ? 1 : 0);
    for (uint64_t i = 0; i < length; i++) payload[i] = byte_of(id, index, d.at + i) ^ (uint8_t)(flags >> 6 & 1);
    free(whole);
    if (next != NULL && d.at == *next) *next = *next + length >= expected ? 0 : *next + length;
    send_in(KV_AM_DATA, &d, sizeof d, payload, length, flags);
}

/* OUTCOMES, FOUND: flags 1 by rendezvous, 2 another count, 4 payload of another length, 24 another epoch, 128 header spoilt */
static void event_many(unsigned id, size_t item) {
    a_request *r = some_request();
    unsigned flags = fuzz_u8();
    uint32_t count = id == KV_AM_OUTCOMES ? 1u + fuzz_u8() % 8 : r == NULL ? 1 : r->n;
    if (flags & 2) count = fuzz_u8();
    kv_many many = {.request = r == NULL ? fuzz_u8() : r->id, .count = count, .epoch = (flags & 24) == 24 ? EPOCH + 1 : EPOCH};
    size_t length = count * item;
    uint8_t *payload = calloc(1, length + 8);
    for (uint32_t i = 0; i < count && id == KV_AM_OUTCOMES; i++) {
        kv_outcome o = {.index = fuzz_u8() % 8, .status = fuzz_u8() % 9, .length = i, .generation = 2};
        memcpy(payload + i * item, &o, sizeof o);
    }
    if (id == KV_AM_FOUND) memset(payload, fuzz_u8(), length);
    if (flags & 4) length += 8;
    uint8_t *exact = malloc(length);
    memcpy(exact, payload, length);
    free(payload);
    send_in(id, &many, sizeof many, exact, length, flags);
}

static void event_written(void) {
    a_request *r = some_request();
    unsigned flags = fuzz_u8();
    kv_written w = {.request = r == NULL ? fuzz_u8() : r->id, .index = fuzz_u8() % (VALUES + 1),
                    .status = flags & 2 ? fuzz_u8() : KV_WRITTEN};
    send_in(KV_AM_WRITTEN, &w, sizeof w, calloc(1, flags & 4 ? 3 : 1), flags & 4 ? 3 : 0, flags & 128);
}

static void event_bytes(void) {
    unsigned id = fuzz_u8() & 31, flags = fuzz_u8();
    size_t header_length = fuzz_u8() % 110, length = fuzz_below(400);
    uint8_t *header = fuzz_bytes(header_length);
    send_in(id, header, header_length, fuzz_bytes(length), length, flags);
    free(header);
}

static void event_from_outside(unsigned what) {
    static const ucs_status_t ends[] = {UCS_OK, UCS_OK, UCS_ERR_CONNECTION_RESET, UCS_ERR_CANCELED};
    unsigned how;
    switch (what) {
    case 0: case 1: case 2: event_data(); break;
    case 3: event_many(KV_AM_OUTCOMES, sizeof(kv_outcome)); break;
    case 4: event_many(KV_AM_FOUND, sizeof(kv_found)); break;
    case 5: event_written(); break;
    case 6: event_bytes(); break;
    case 7: how = fuzz_u8(), double_finish_one(fuzz_u8(), ends[how & 3]); break;
    case 8: double_finish_all(ends[fuzz_u8() & 3]); break;
    case 9: double_fail(double_ep(fuzz_u8()), UCS_ERR_ENDPOINT_TIMEOUT); break;
    case 10: double_connect(1, 1); break;
    case 11: fuzz_now_ns += fuzz_u8() * 1000u; break;
    }
}

enum { OUTSIDE = 12, KINDS = 28 };

static unsigned double_progress(void) {
    if (fuzz_is_over() || *fuzz_at % KINDS >= OUTSIDE) return 0; /* the caller's turn */
    total_events++;
    event_from_outside(fuzz_u8() % KINDS);
    return 1;
}

static unsigned double_is_idle(void) { return fuzz_u8() & 1; }

/* ---- the caller ---- */

static an_endpoint *some_endpoint(void) {
    an_endpoint *e = &m.endpoints[fuzz_u8() % ENDPOINTS];
    return e->endpoint == NULL || e->is_closing ? NULL : e;
}

static void progress(uint64_t idle_ns) {
    int has_moved;
    kv_progress(m.worker, idle_ns, 200000, &has_moved);
}

static void call_connect(void) {
    unsigned how = fuzz_u8();
    for (unsigned i = 0; i < ENDPOINTS; i++) {
        an_endpoint *e = &m.endpoints[i];
        if (e->endpoint != NULL) continue;
        *e = (an_endpoint){.is_peer_mode = how & 1};
        dbl.connect_fail_in = (how & 2) && (how & 4);
        int32_t code = how & 8 ? kv_endpoint_from_socket(m.worker, how & 16 ? "::1" : how & 32 ? "x" : "127.0.0.1", 9,
                                                         e->is_peer_mode, &e->endpoint)
                               : kv_endpoint_from_address(m.worker, "address", e->is_peer_mode, &e->endpoint);
        dbl.connect_fail_in = 0;
        CHECK((code == 0) == (e->endpoint != NULL));
        return;
    }
}

static void close_one(an_endpoint *e, int is_forced) {
    if (e->is_closing) return;
    int32_t code = kv_endpoint_close(e->endpoint, is_forced);
    CHECK(code == 0 || code == 1 || (code == UCS_ERR_INVALID_PARAM && is_forced && !e->is_peer_mode));
    if (code == UCS_ERR_INVALID_PARAM) CHECK(kv_endpoint_close(e->endpoint, 0) >= 0);
    e->is_closing = 1;
}

/* As the Python side does: nothing new on it and on those that go with it, their requests are answered, then they are closed,
 * the first of them last. */
static void call_close(an_endpoint *e, int is_forced) {
    kv_endpoint *first = e->first != NULL ? e->first : e->endpoint;
    for (int is_first = 0; is_first < 2; is_first++)
        for (unsigned i = 0; i < ENDPOINTS; i++) {
            an_endpoint *other = &m.endpoints[i];
            if (other->endpoint == NULL || other->is_closing) continue;
            if (is_first ? other->endpoint != first : other->first != first) continue;
            kv_fetch_endpoint_gone(m.fetcher, other->endpoint);
            close_one(other, is_forced);
        }
    close_one(e, is_forced); /* one that is in no table */
}

static void call_join(void) {
    an_endpoint *first = some_endpoint(), *other = some_endpoint();
    if (first == NULL || other == NULL || first == other || first->first != NULL || other->first != NULL) return;
    if (other->endpoint->others_count != 0 || first->is_peer_mode != other->is_peer_mode) return;
    uint32_t before = first->endpoint->others_count;
    int32_t code = kv_endpoint_join(first->endpoint, other->endpoint);
    CHECK(code == (before == KV_MAX_CONNECTIONS - 1 ? KV_ERR_FULL : 0));
    if (code == 0) other->first = first->endpoint;
}

static void call_forget(an_endpoint *e) {
    if (!e->is_closing || !kv_endpoint_is_closed(e->endpoint)) return;
    for (unsigned i = 0; i < ENDPOINTS; i++) /* they were closed before it; nobody names it any more */
        if (m.endpoints[i].first == e->endpoint) m.endpoints[i].first = NULL;
    kv_endpoint_free(e->endpoint);
    *e = (an_endpoint){0};
}

static a_request *new_request(unsigned kind, unsigned n) {
    for (unsigned i = 0; i < REQUESTS; i++) {
        a_request *r = &m.requests[i];
        if (r->state != UNUSED && r->state != OVER) continue;
        *r = (a_request){.kind = kind, .n = n, .id = ++m.ids};
        memset(r->seen, KV_PENDING, sizeof r->seen);
        return r;
    }
    return NULL;
}

static void call_start(void) {
    static const uint32_t fragments[] = {0, 1000, 64, 100};
    unsigned how = fuzz_u8(), kind = how % 3 + 1, n = 1 + fuzz_u8() % VALUES;
    an_endpoint *e = some_endpoint();
    if (e == NULL) return;
    a_request *r = new_request(kind, n);
    if (r == NULL) return;
    uint64_t addr[PIECES], offset[VALUES] = {0};
    uint16_t region[VALUES] = {0};
    uint8_t keys[VALUES * 16] = {0};
    uint32_t pieces = 0;
    for (unsigned v = 0; v < n && kind != KV_FETCH_LOOKUP; v++) {
        unsigned shape = fuzz_u8(), count = shape % 8 < 5 ? 1 : shape % 8 - 5 + (shape % 8 > 5);
        for (unsigned i = 0; i < count; i++, pieces++) {
            r->length[pieces] = shape & 128 && i ? 0 : shape & 64 ? 300u + fuzz_u8() : fuzz_u8();
            r->piece[pieces] = malloc(r->length[pieces]);
            memset(r->piece[pieces], 0xa5, r->length[pieces]);
            addr[pieces] = (uint64_t)(uintptr_t)r->piece[pieces];
            r->expected[v] += r->length[pieces];
        }
        r->first[v + 1] = pieces;
    }
    CHECK(kv_pieces_fit(n, r->first, pieces));
    r->is_checked = !(how & 32);
    r->ep = e->endpoint->ep;
    uint64_t spin_ns = how & 64 ? 20000 : 0, failed = fuzz_failed;
    uint32_t fragment = fragments[how >> 3 & 3];
    ucp_mem_h memh = how & 128 ? (ucp_mem_h)keys : NULL;
    r->state = STARTED;
    if (kind == KV_FETCH_READ && n == 1 && pieces == 1 && fragment == 1000) { /* the call that takes its own results */
        uint8_t status = KV_PENDING;
        r->code = kv_fetch_read_one(m.fetcher, e->endpoint, 1, EPOCH, r->id, keys, r->piece[0], r->length[0],
                                    fragment, r->is_checked, spin_ns, &status, &addr[1]);
        CHECK((r->code == 0) == (status != KV_PENDING));
        if (r->code == 1) return;
        free_pieces(r);
        r->is_quiet_due = kv_fetch_find(m.fetcher, r->id) != NULL; /* answered before UCX was done with the question */
        r->state = r->is_quiet_due ? TAKEN : OVER;
        return;
    }
    int32_t code =
        kind == KV_FETCH_READ
            ? kv_fetch_read(m.fetcher, e->endpoint, 1, EPOCH, r->id, n, keys, r->first, addr, r->length, fragment,
                            r->is_checked, memh, spin_ns)
        : kind == KV_FETCH_LOOKUP
            ? kv_fetch_lookup(m.fetcher, e->endpoint, 1, EPOCH, r->id, n, keys, spin_ns)
            : kv_fetch_write(m.fetcher, e->endpoint, 1, r->id, n, r->first, addr, r->length, region, offset, fragment, memh,
                             spin_ns);
    r->code = code;
    if (code >= 0) {
        CHECK(code <= 1);
        return;
    }
    CHECK(code == KV_ERR_FULL && (fuzz_failed != failed || !kv_ring_room(m.worker) ||
                                  m.worker->head - m.worker->tail + m.worker->reserved + 1 >= CAPACITY));
    free_pieces(r);
    r->state = OVER;
}

static void call_refused(void) { /* what the caller must not ask for */
    an_endpoint *e = some_endpoint();
    if (e == NULL) return;
    uint32_t count = fuzz_u8() & 1 ? 0 : KV_MAX_KEYS + 1, receives, first[3] = {0, 2, 1};
    CHECK(kv_fetch_read(m.fetcher, e->endpoint, 1, 1, 0, count, NULL, NULL, NULL, NULL, 0, 0, NULL, 0) == UCS_ERR_INVALID_PARAM);
    CHECK(kv_fetch_lookup(m.fetcher, e->endpoint, 1, EPOCH, 0, count, NULL, 0) == UCS_ERR_INVALID_PARAM);
    CHECK(kv_fetch_write(m.fetcher, e->endpoint, 1, 0, count, NULL, NULL, NULL, NULL, NULL, 0, NULL, 0) ==
          UCS_ERR_INVALID_PARAM);
    CHECK(kv_fetch_take(m.fetcher, UINT64_MAX, NULL, NULL, NULL, NULL, &receives) == -1);
    CHECK(kv_message_send(e->endpoint, 40, NULL, 0, 0, NULL, 0, NULL, 0, 0) == UCS_ERR_INVALID_PARAM);
    CHECK(kv_message_handle(m.worker, KV_MAX_AM_IDS) == UCS_ERR_INVALID_PARAM);
    CHECK(!kv_pieces_fit(2, first, 2));
}

/* HIT: the destination holds bytes of the announced sum. */
FUZZ_QUIET static void check_hit(const a_request *q, const kv_fetch *r, unsigned index) {
    uint64_t n = 0;
    uint8_t *bytes = malloc(q->expected[index] + 1);
    for (uint32_t i = q->first[index]; i < q->first[index + 1]; i++) {
        memcpy(bytes + n, q->piece[i], q->length[i]);
        n += q->length[i];
    }
    CHECK(n == q->expected[index] && r->values[index].length == n && q->delivered[index] >= n);
    if (q->is_checked) CHECK(kvx_sum(bytes, n) == r->values[index].sum);
    free(bytes);
    total_hits++;
}

static void take(a_request *q) {
    kv_fetch *r = kv_fetch_find(m.fetcher, q->id);
    uint32_t receives, n = q->n;
    uint8_t *status = malloc(n), in_place[VALUES] = {0};
    uint64_t *length = malloc(8 * n), *generation = malloc(8 * n);
    kv_found *found = malloc(n * sizeof *found);
    CHECK(r != NULL && !r->is_taken);
    int is_recorded = r->is_recorded;
    CHECK(is_recorded == (r->left == 0 && r->receives == 0));
    for (unsigned i = 0; i < n; i++) {
        const kv_value *v = &r->values[i];
        in_place[i] = v->is_receiving && v->bounce == NULL;
        if (q->kind == KV_FETCH_READ && v->status == KV_HIT) check_hit(q, r, i);
    }
    int64_t in_flight = kv_fetch_take(m.fetcher, q->id, status, length, generation, found, &receives);
    CHECK(in_flight >= receives);
    for (unsigned i = 0; i < n; i++) CHECK(status[i] != KV_PENDING && (!is_recorded || status[i] == q->seen[i]));
    for (unsigned i = 0; i < n; i++) { /* these are the caller's again */
        int is_kept = q->kind == KV_FETCH_READ ? in_place[i] : in_flight != 0;
        for (uint32_t k = q->first[i]; k < q->first[i + 1] && !is_kept; k++) {
            free(q->piece[k]);
            q->piece[k] = NULL;
        }
    }
    q->is_quiet_due = in_flight != 0;
    q->state = in_flight != 0 ? TAKEN : OVER;
    if (in_flight == 0) CHECK(kv_fetch_find(m.fetcher, q->id) == NULL);
    CHECK(kv_fetch_take(m.fetcher, q->id, NULL, NULL, NULL, NULL, &receives) == -1);
    free(status), free(length), free(generation), free(found);
}

static void record_done(const kv_record *record) {
    a_request *r = request_of(record->id);
    an_operation *o = operation_of(record->id);
    if (r != NULL) {
        CHECK(r->code == 1 && ++r->dones == 1 && !r->quiets);
    } else if (o != NULL) {
        operation_over(o);
    } else {
        CHECK(record->id <= m.ids); /* of a request that was taken before its record was read */
    }
}

static void call_records(unsigned most) {
    kv_worker *w = m.worker;
    for (; most-- && kv_ring_count(w); kv_ring_release(w, 1)) {
        kv_record record = kv_ring(w)[kv_ring_tail(w) & (kv_ring_capacity(w) - 1)];
        if (record.kind == KV_DONE) {
            record_done(&record);
        } else if (record.kind == KV_QUIET) {
            a_request *r = request_of(record.id);
            CHECK(r != NULL && r->state == TAKEN && r->is_quiet_due && ++r->quiets == 1);
            CHECK(kv_fetch_find(m.fetcher, record.id) == NULL);
            free_pieces(r);
            r->state = OVER;
            total_quiets++;
        } else if (record.kind == KV_MESSAGE) {
            CHECK(record.header_length <= KV_MAX_HEADER && record.id < KV_MAX_AM_IDS);
            CHECK((record.length != 0) == (record.aux != 0));
            if (record.aux == 0) continue;
            if (m.tokens_count == TOKENS) {
                kv_message_drop(w, record.aux);
                continue;
            }
            m.token_lengths[m.tokens_count] = record.length;
            m.tokens[m.tokens_count++] = record.aux;
        } else if (record.kind == KV_CONNECT) {
            kv_endpoint *e = NULL;
            if (fuzz_u8() & 1) {
                if (m.listener != NULL) kv_connect_reject(m.listener, record.aux);
                continue;
            }
            kv_ring_release(w, 1); /* its record's room is what the endpoint needs */
            int32_t code = kv_endpoint_from_request(w, record.aux, 1, &e);
            w->tail--;
            for (unsigned i = 0; code == 0 && i <= ENDPOINTS; i++) {
                CHECK(i < ENDPOINTS || dbl.ep_count > ENDPOINTS);
                if (i == ENDPOINTS) call_close(&(an_endpoint){.endpoint = e, .is_peer_mode = 1}, 1);
                else if (m.endpoints[i].endpoint == NULL) {
                    m.endpoints[i] = (an_endpoint){.endpoint = e, .is_peer_mode = 1};
                    break;
                }
            }
        } else {
            CHECK(record.kind == KV_EP_ERROR && record.status < 0);
            for (unsigned i = 0; i < ENDPOINTS; i++)
                if ((uint64_t)(uintptr_t)m.endpoints[i].endpoint == record.ep && !m.endpoints[i].is_closing) {
                    CHECK(m.endpoints[i].endpoint->is_failed);
                    call_close(&m.endpoints[i], 1);
                }
        }
    }
}

static an_operation *new_operation(void) {
    for (unsigned i = 0; i < OPERATIONS; i++)
        if (!m.operations[i].is_pending) {
            m.operations[i] = (an_operation){.id = ++m.ids};
            return &m.operations[i];
        }
    return NULL;
}

static void submitted(an_operation *o, int32_t code) {
    o->is_pending = code == 1;
    if (code != 1) operation_over(o);
}

static void call_operation(void) {
    unsigned how = fuzz_u8(), n = how >> 2 & 3;
    uint64_t spin_ns = how & 16 ? 20000 : 0, local[4], length[4], remote[4] = {0};
    kv_iov pieces[4];
    an_endpoint *e = some_endpoint();
    an_operation *o = e == NULL ? NULL : new_operation();
    if (o == NULL) return;
    o->is_pending = 1; /* its record may come before the call is over */
    for (unsigned i = 0; i < 4; i++) {
        length[i] = i < n ? fuzz_u8() : 0;
        o->buffer[i] = calloc(1, length[i] ? length[i] : 1);
        local[i] = (uint64_t)(uintptr_t)o->buffer[i];
        pieces[i] = (kv_iov){local[i], length[i]};
    }
    switch (how & 3) {
    case 0: submitted(o, kv_transfer(e->endpoint, how >> 5 & 1, n, local, length, remote, NULL, NULL, o->id, spin_ns)); break;
    case 1: submitted(o, kv_flush(e->endpoint, o->id, spin_ns)); break;
    default:
        submitted(o, kv_message_send(e->endpoint, 1, "header", fuzz_u8() % 100 ? 6 : 0, n, pieces, 0,
                                     how & 64 ? (ucp_mem_h)pieces : NULL, o->id, spin_ns));
    }
}

static void call_receive(void) {
    unsigned how = fuzz_u8();
    if (m.tokens_count == 0 || how == 255) {
        CHECK(kv_message_receive(m.worker, 1u << 30, 0, 0, NULL, 0, 0) == UCS_ERR_NO_ELEM);
        kv_message_drop(m.worker, 1u << 30);
        return;
    }
    unsigned which = fuzz_u8() % m.tokens_count;
    uint64_t token = m.tokens[which], length = m.token_lengths[which], capacity = how & 2 ? length / 2 : length;
    if (how & 1) {
        kv_message_drop(m.worker, token);
    } else {
        an_operation *o = new_operation();
        if (o == NULL) return;
        o->is_pending = 1;
        o->buffer[0] = malloc(capacity);
        int32_t code = kv_message_receive(m.worker, token, (uint64_t)(uintptr_t)o->buffer[0], capacity, NULL, o->id,
                                          how & 4 ? 20000 : 0);
        CHECK(capacity >= length || code == UCS_ERR_BUFFER_TOO_SMALL);
        submitted(o, code);
        if (code == UCS_ERR_BUFFER_TOO_SMALL || code == KV_ERR_FULL) return; /* still held */
    }
    m.tokens[which] = m.tokens[--m.tokens_count];
    m.token_lengths[which] = m.token_lengths[m.tokens_count];
}

static void call_listen(void) {
    uint16_t bound;
    unsigned how = fuzz_u8();
    dbl.is_listen_refused = how & 1;
    if (m.listener != NULL) {
        if (!(how & 2)) return;
        kv_listener_close(m.listener);
        m.listener = NULL;
    } else if (kv_listen(m.worker, how & 4 ? "?" : "127.0.0.1", 0, &m.listener, &bound) != 0) {
        m.listener = NULL;
    }
}

static void one_call(unsigned what) {
    unsigned which;
    switch (what) {
    case 12: case 13: case 14: call_start(); break;
    case 15: case 16:
        which = fuzz_u8() % REQUESTS;
        if (m.requests[which].state == STARTED) take(&m.requests[which]);
        break;
    case 17: case 18: call_records(1 + fuzz_u8() % 16); break;
    case 19: call_connect(); break;
    case 20: call_operation(); break;
    case 21: call_receive(); break;
    case 22: dbl.fate = fuzz_u8(); break;
    case 23:
        which = fuzz_u8();
        if (m.endpoints[which % ENDPOINTS].endpoint == NULL) break;
        if (m.endpoints[which % ENDPOINTS].is_closing) call_forget(&m.endpoints[which % ENDPOINTS]);
        else call_close(&m.endpoints[which % ENDPOINTS], which >> 7);
        break;
    case 24: fuzz_fail_in = 1 + fuzz_u8() % 8; break;
    case 25: call_listen(); break;
    case 26:
        call_refused();
        call_join();
        break;
    case 27: progress(fuzz_u8() * 1000u); break;
    }
}

/* ---- the end ---- */

/* Everything is let go, ended, closed: nothing may be left. */
static void end_well(void) {
    kv_worker *w = m.worker;
    for (unsigned i = 0; i < REQUESTS; i++)
        if (m.requests[i].state == STARTED) take(&m.requests[i]);
    check_all();
    double_finish_all(UCS_OK);
    call_records(CAPACITY);
    while (m.tokens_count) kv_message_drop(w, m.tokens[--m.tokens_count]);
    CHECK(w->held == NULL && w->held_bytes == 0 && m.fetcher->live == 0);
    for (unsigned i = 0; i < ENDPOINTS; i++) {
        an_endpoint *e = &m.endpoints[i];
        if (e->endpoint == NULL) continue;
        if (!e->is_closing) call_close(e, e->is_peer_mode);
        double_finish_all(UCS_ERR_CANCELED);
        CHECK(kv_endpoint_is_closed(e->endpoint));
        call_forget(e);
    }
    double_finish_all(UCS_ERR_CANCELED);
    call_records(CAPACITY);
    CHECK(w->inflight == 0 && w->head == w->tail);
    for (unsigned i = 0; i < REQUESTS; i++) CHECK(m.requests[i].state == UNUSED || m.requests[i].state == OVER);
    for (unsigned i = 0; i < OPERATIONS; i++) CHECK(!m.operations[i].is_pending);
    if (w->endpoints == NULL) CHECK(w->reserved == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    fuzz_begin(bytes, n);
    memset(&m, 0, sizeof m);
    uint64_t counters[4], base;
    uint32_t unknown, version[3];
    const char *names[] = {"TLS", "?"}, *values[] = {"tcp", "x"};
    ucp_context_h context;
    ucp_mem_h memh;
    unsigned start = fuzz_u8();
    CHECK(kv_context_open(names, values, 2, 0, &context, &unknown) == 0 && unknown == 1);
    CHECK(kv_memory_map(context, (uint64_t)(uintptr_t)names, 8, &memh, &base) == 0 && base == (uint64_t)(uintptr_t)names);
    CHECK(kv_memory_unmap(context, memh) == 0);
    kv_version(version);
    if (start >= 250) fuzz_fail_in = start - 249;
    if (kv_worker_open(context, CAPACITY, 1, &m.worker) != 0) {
        CHECK(start >= 250);
        return 0;
    }
    if (kv_fetcher_open(m.worker, &m.fetcher) != 0) {
        CHECK(start >= 250);
        kv_worker_close(m.worker);
        double_reset();
        return 0;
    }
    for (uint32_t id = 0; id < 4; id++) CHECK(kv_message_handle(m.worker, id) == 0);
    for (unsigned i = 0; i <= start % 2; i++) kv_endpoint_from_address(m.worker, "address", 1, &m.endpoints[i].endpoint);
    for (unsigned i = 0; i <= start % 2; i++) m.endpoints[i].is_peer_mode = 1;
    while (!fuzz_is_over()) {
        unsigned what = *fuzz_at % KINDS;
        if (what < OUTSIDE) {
            progress(0);
        } else {
            fuzz_at++;
            total_events++;
            one_call(what);
        }
        check_all();
    }
    dbl.fate = 0;
    fuzz_fail_in = 0;
    if (start & 4) end_well(); /* else: the worker is destroyed with everything in flight */
    kv_fetcher_counters(m.fetcher, counters);
    if (m.listener != NULL) kv_listener_close(m.listener);
    kv_worker_close(m.worker);
    kv_fetcher_close(m.fetcher);
    kv_context_close(context);
    for (unsigned i = 0; i < REQUESTS; i++) free_pieces(&m.requests[i]);
    for (unsigned i = 0; i < OPERATIONS; i++) operation_over(&m.operations[i]);
    double_reset();
    return 0;
}

void fuzz_summary(void) {
    fprintf(stderr, "fetch: %llu events, %llu values read, %llu late ends\n", (unsigned long long)total_events,
            (unsigned long long)total_hits, (unsigned long long)total_quiets);
}
