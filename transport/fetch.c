/* fetch.c: the client's requests to the data service. See fetch.h for the rules, wire.h for the messages. */
#include "fetch.h"

/* ---- the table ---- */

kv_fetch *kv_fetch_find(kv_fetcher *f, uint64_t id) {
    kv_fetch *r = f->buckets[id % KV_FETCH_BUCKETS];
    while (r != NULL && r->id != id) r = r->next;
    return r;
}

static void kv_fetch_free(kv_fetch *r) {
    for (uint32_t i = 0; r->values != NULL && i < r->count; i++) {
        free(r->values[i].bounce);
        free(r->values[i].state);
    }
    free(r->values);
    free(r->pieces);
    free(r->found);
    free(r->keys);
    free(r);
}

static void kv_fetch_unlink(kv_fetch *r) {
    kv_fetch **at = &r->fetcher->buckets[r->id % KV_FETCH_BUCKETS];
    while (*at != r) at = &(*at)->next;
    *at = r->next;
    r->fetcher->live--;
    r->fetcher->worker->reserved -= 2;
    kv_fetch_free(r);
}

/* After any change: records the end once, says quiet once, frees when nobody needs the request any more. */
void kv_fetch_settle(kv_fetch *r) {
    kv_worker *w = r->fetcher->worker;
    if (r->left == 0 && r->receives == 0 && !r->is_recorded && !r->is_abandoned) {
        r->is_recorded = 1;
        w->inflight--;
        w->last_status = 0;
        if (r->waited != NULL)
            *r->waited = 1;
        else
            kv_push(w, KV_DONE, r->id, 0, 0);
    }
    if (r->is_quiet_wanted && r->receives == 0 && r->sends == 0) {
        r->is_quiet_wanted = 0;
        kv_push(w, KV_QUIET, r->id, 0, 0);
    }
    if (r->is_taken && r->receives == 0 && r->sends == 0 && !r->is_quiet_wanted) kv_fetch_unlink(r);
}

/* One value has its answer. */
void kv_value_end(kv_fetch *r, kv_value *v, uint8_t status) {
    if (v->status != KV_PENDING) return;
    v->status = status;
    r->left--;
}

/* Every value without an answer gets this one; receives in flight end on their own. */
static void kv_fetch_give_up(kv_fetch *r, uint8_t status) {
    for (uint32_t i = 0; i < r->count; i++)
        if (!r->values[i].is_receiving) kv_value_end(r, &r->values[i], status);
}

/* Copies n bytes to position `at` of the value's destination, or from it. */
void kv_scatter(const kv_fetch *r, const kv_value *v, uint64_t at, uint8_t *bytes, uint64_t n, int is_gather) {
    for (uint32_t i = 0; i < v->pieces && n != 0; i++) {
        uint64_t room = r->pieces[v->first_piece + i].len;
        if (at >= room) {
            at -= room;
            continue;
        }
        uint64_t step = room - at < n ? room - at : n;
        uint8_t *piece = kv_piece_at(r, v, i) + at;
        memcpy(is_gather ? bytes : piece, is_gather ? piece : bytes, step);
        bytes += step;
        n -= step;
        at = 0;
    }
}

/* ---- sending ---- */

static void kv_part_sent(kv_part *part, ucs_status_t status) {
    kv_fetch *r = part->fetch;
    r->sends--;
    if (status != UCS_OK) kv_fetch_give_up(r, KV_UNAVAILABLE);
    free(part);
    kv_fetch_settle(r);
}

static void kv_on_part_sent(void *request, ucs_status_t status, void *arg) {
    kv_part_sent(arg, status);
    ucp_request_free(request);
}

/* Sends one message of a request; 0 when memory ran out. May end the request, so the caller holds it (a send count). */
static int kv_part_send(kv_fetch *r, ucp_ep_h ep, unsigned am_id, const void *header, size_t header_length, const void *payload,
                        size_t length, uint32_t flags, ucp_mem_h memh) {
    kv_part *part = malloc(sizeof *part);
    if (part == NULL) return 0;
    part->fetch = r;
    memcpy(part->header, header, header_length);
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = kv_on_part_sent;
    param.user_data = part;
    param.flags = flags;
    if (memh != NULL) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memh;
    }
    r->sends++;
    ucs_status_ptr_t p = ucp_am_send_nbx(ep, am_id, part->header, header_length, payload, length, &param);
    if (!UCS_PTR_IS_PTR(p)) kv_part_sent(part, (ucs_status_t)kv_status_of(p));
    return 1;
}

/* ---- starting ---- */

/* Does first[0 .. n] describe n runs of pieces, none past `pieces`? Their bytes before each are found by kv_chunk_end. */
int kv_pieces_fit(uint32_t n, const uint32_t *first, uint32_t pieces) {
    for (uint32_t i = 0; i < n; i++)
        if (first[i] > first[i + 1]) return 0;
    return first[n] <= pieces;
}

/* The first value that is not in the chunk beginning at low: at least one value, at most max_bytes or max_values. */
uint32_t kv_chunk_end(uint32_t n, const uint32_t *first, const uint64_t *len, uint32_t low, uint64_t max_bytes,
                      uint32_t max_values) {
    uint64_t bytes = 0;
    uint32_t high = low;
    while (high < n && high - low < max_values) {
        for (uint32_t k = first[high]; k < first[high + 1] && bytes <= max_bytes; k++)
            bytes = len[k] > max_bytes - bytes ? max_bytes + 1 : bytes + len[k];
        if (bytes > max_bytes && high > low) break;
        high++;
    }
    return high;
}

/* A request over n values, whose pieces are iov[first[i] .. first[i + 1]) (none for a look-up). Holds one send until
 * kv_fetch_started. */
static kv_fetch *kv_fetch_new(kv_fetcher *f, kv_endpoint *e, int kind, uint64_t id, uint32_t n, const uint32_t *first,
                              const uint64_t *addr, const uint64_t *len) {
    kv_worker *w = f->worker;
    w->reserved++; /* two records: done, quiet */
    int has_room = kv_ring_room(w);
    w->reserved--;
    kv_fetch *r = has_room ? calloc(1, sizeof *r) : NULL;
    if (r == NULL) return NULL;
    r->count = r->left = n;
    r->values = calloc(n, sizeof *r->values);
    uint32_t pieces = first != NULL ? first[n] - first[0] : 0;
    r->pieces = malloc((pieces + 1) * sizeof *r->pieces);
    if (kind == KV_FETCH_LOOKUP) r->found = malloc(n * sizeof *r->found);
    if (r->values == NULL || r->pieces == NULL || (kind == KV_FETCH_LOOKUP && r->found == NULL)) {
        kv_fetch_free(r);
        return NULL;
    }
    for (uint32_t i = 0; i < pieces; i++) r->pieces[i] = (kv_iov){addr[first[0] + i], len[first[0] + i]};
    for (uint32_t i = 0; i < n; i++) {
        kv_value *v = &r->values[i];
        v->status = KV_PENDING;
        if (first == NULL) continue;
        v->first_piece = first[i] - first[0];
        v->pieces = first[i + 1] - first[i];
        for (uint32_t k = 0; k < v->pieces; k++) v->expected += r->pieces[v->first_piece + k].len;
    }
    r->fetcher = f;
    r->endpoint = e;
    r->id = id;
    r->kind = (uint8_t)kind;
    r->sends = 1;
    r->next = f->buckets[id % KV_FETCH_BUCKETS];
    f->buckets[id % KV_FETCH_BUCKETS] = r;
    f->live++;
    w->reserved += 2;
    w->inflight++;
    return r;
}

/* The messages are out: 0 all answered, 1 pending; in both cases take the results (kv_fetch_take). */
static int32_t kv_fetch_started(kv_fetch *r, uint64_t spin_ns) {
    kv_worker *w = r->fetcher->worker;
    int done = 0;
    r->waited = &done;
    r->sends--;
    kv_fetch_settle(r);
    if (!done && spin_ns != 0) kv_progress_until(w, &done, spin_ns, KV_INLINE_BOUND_NS);
    if (done) return 0;
    r->waited = NULL;
    return 1;
}

static int32_t kv_fetch_ask(kv_fetch *r, unsigned am_id, uint64_t session, uint32_t epoch, const uint8_t *keys,
                            uint32_t fragment, uint64_t spin_ns) {
    size_t bytes = (size_t)r->count * KV_KEY_BYTES;
    kv_ask ask = {.session = session, .request = r->id, .count = r->count, .fragment = fragment};
    r->epoch = epoch;
    r->keys = malloc(bytes);
    if (r->keys != NULL) memcpy(r->keys, keys, bytes);
    if (r->keys == NULL ||
        !kv_part_send(r, r->endpoint->ep, am_id, &ask, sizeof ask, r->keys, bytes, UCP_AM_SEND_FLAG_EAGER, NULL))
        kv_fetch_give_up(r, KV_UNAVAILABLE);
    return kv_fetch_started(r, spin_ns);
}

/* Reads n keys into their pieces. epoch: of the node; what it answers in another is KV_OTHER_EPOCH. memh: registration all
 * contiguous destinations lie in, or NULL. */
int32_t kv_fetch_read(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, uint32_t n,
                      const uint8_t *keys, const uint32_t *first, const uint64_t *addr, const uint64_t *len,
                      uint32_t fragment, int is_checked, ucp_mem_h memh, uint64_t spin_ns) {
    if (n == 0 || n > KV_MAX_KEYS) return UCS_ERR_INVALID_PARAM;
    kv_fetch *r = kv_fetch_new(f, e, KV_FETCH_READ, id, n, first, addr, len);
    if (r == NULL) return KV_ERR_FULL;
    r->is_checked = is_checked != 0;
    r->memh = memh;
    return kv_fetch_ask(r, KV_AM_READ, session, epoch, keys, fragment, spin_ns);
}

/* Says where n keys lie: every status is HIT, and `found` the answer, or it is none, as of another epoch. */
int32_t kv_fetch_lookup(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, uint32_t n,
                        const uint8_t *keys, uint64_t spin_ns) {
    if (n == 0 || n > KV_MAX_KEYS) return UCS_ERR_INVALID_PARAM;
    kv_fetch *r = kv_fetch_new(f, e, KV_FETCH_LOOKUP, id, n, NULL, NULL, NULL);
    if (r == NULL) return KV_ERR_FULL;
    return kv_fetch_ask(r, KV_AM_LOOKUP, session, epoch, keys, 0, spin_ns);
}

/* Sends one value of a WRITE: whole, or in eager fragments. */
static void kv_write_value(kv_fetch *r, uint64_t session, uint32_t index, uint16_t region, uint64_t offset,
                           uint32_t fragment) {
    kv_value *v = &r->values[index];
    const kv_endpoint *e = r->endpoint;
    if (v->expected == 0 || v->expected > KV_MAX_VALUE) {
        kv_value_end(r, v, v->expected == 0 ? KV_WRITTEN : KV_REFUSED);
        return;
    }
    const uint8_t *bytes = kv_piece_at(r, v, 0);
    if (v->pieces != 1) {
        v->bounce = malloc(v->expected);
        if (v->bounce == NULL) {
            kv_value_end(r, v, KV_UNAVAILABLE);
            return;
        }
        kv_scatter(r, v, 0, v->bounce, v->expected, 1);
        bytes = v->bounce;
    }
    uint64_t step = fragment != 0 ? fragment : v->expected;
    v->unanswered = (uint32_t)((v->expected + step - 1) / step);
    kv_write w = {.session = session, .request = r->id, .index = index, .region = region, .offset = offset};
    for (; w.at < v->expected && v->status == KV_PENDING; w.at += step) {
        uint64_t length = v->expected - w.at < step ? v->expected - w.at : step;
        uint32_t turn = kv_turn(e->others_count + 1, r->id, r->count, index, v->expected, w.at, fragment);
        if (!kv_part_send(r, turn == 0 ? e->ep : e->others[turn - 1]->ep, KV_AM_WRITE, &w, sizeof w, bytes + w.at, length, fragment ? UCP_AM_SEND_FLAG_EAGER : 0,
                          v->bounce == NULL ? r->memh : NULL))
            kv_value_end(r, v, KV_UNAVAILABLE);
    }
}

/* Writes n values into granted extents. */
int32_t kv_fetch_write(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint64_t id, uint32_t n, const uint32_t *first,
                       const uint64_t *addr, const uint64_t *len, const uint16_t *region, const uint64_t *offset,
                       uint32_t fragment, ucp_mem_h memh, uint64_t spin_ns) {
    if (n == 0 || n > KV_MAX_KEYS) return UCS_ERR_INVALID_PARAM;
    kv_fetch *r = kv_fetch_new(f, e, KV_FETCH_WRITE, id, n, first, addr, len);
    if (r == NULL) return KV_ERR_FULL;
    r->memh = memh;
    for (uint32_t i = 0; i < n; i++) kv_write_value(r, session, i, region[i], offset[i], fragment);
    return kv_fetch_started(r, spin_ns);
}

/* ---- results ---- */

/* Copies the results out (values without an answer: UNAVAILABLE) and lets the request go: destinations are written no more
 * but by the receives in flight. Any output may be NULL. Number of receives and sends in flight, for which one KV_QUIET
 * record follows; 0: none; -1: no such request. *receives: the receives among them. */
int64_t kv_fetch_take(kv_fetcher *f, uint64_t id, uint8_t *status, uint64_t *length, uint64_t *generation,
                      kv_found *found, uint32_t *receives) {
    kv_fetch *r = kv_fetch_find(f, id);
    *receives = 0;
    if (r == NULL || r->is_taken) return -1;
    for (uint32_t i = 0; i < r->count; i++) {
        kv_value *v = &r->values[i];
        if (status != NULL) status[i] = v->status == KV_PENDING ? KV_UNAVAILABLE : v->status;
        if (length != NULL) length[i] = v->length;
        if (generation != NULL) generation[i] = v->generation;
    }
    if (found != NULL && r->found != NULL && r->left == 0 && r->values[0].status == KV_HIT)
        memcpy(found, r->found, r->count * sizeof *found);
    if (!r->is_recorded) f->worker->inflight--;
    r->is_recorded = 1;
    r->is_abandoned = 1;
    r->is_taken = 1;
    *receives = r->receives;
    uint32_t in_flight = r->receives + r->sends;
    r->is_quiet_wanted = in_flight != 0;
    kv_fetch_settle(r);
    return in_flight;
}

/* The endpoint is gone: what waits for it is answered UNAVAILABLE. */
void kv_fetch_endpoint_gone(kv_fetcher *f, kv_endpoint *e) {
    for (uint32_t b = 0; b < KV_FETCH_BUCKETS; b++)
        for (kv_fetch *r = f->buckets[b], *next; r != NULL; r = next) {
            next = r->next;
            if (r->endpoint != e || r->is_taken) continue;
            kv_fetch_give_up(r, KV_UNAVAILABLE);
            kv_fetch_settle(r);
        }
}

/* kv_fetch_read of one key into one piece, results included. 0: *status and *length are set; 1: pending, take the results
 * after its record. */
int32_t kv_fetch_read_one(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, const uint8_t *key,
                          void *into, uint64_t size, uint32_t fragment, int is_checked, uint64_t spin_ns, uint8_t *status,
                          uint64_t *length) {
    uint32_t first[2] = {0, 1}, receives;
    uint64_t addr = (uint64_t)(uintptr_t)into;
    int32_t code = kv_fetch_read(f, e, session, epoch, id, 1, key, first, &addr, &size, fragment, is_checked, NULL, spin_ns);
    if (code == 0) kv_fetch_take(f, id, status, length, NULL, NULL, &receives);
    return code;
}

/* ---- the fetcher ---- */

int32_t kv_fetcher_open(kv_worker *w, kv_fetcher **out) {
    kv_fetcher *f = calloc(1, sizeof *f);
    if (f == NULL) return KV_ERR_MEMORY;
    f->worker = w;
    int32_t status = kv_receive_install(f);
    if (status != 0) {
        free(f);
        return status;
    }
    *out = f;
    return 0;
}

/* After the worker was destroyed. */
void kv_fetcher_close(kv_fetcher *f) {
    for (uint32_t b = 0; b < KV_FETCH_BUCKETS; b++)
        while (f->buckets[b] != NULL) {
            kv_fetch *r = f->buckets[b];
            f->buckets[b] = r->next;
            kv_fetch_free(r);
        }
    free(f);
}

/* requests held, late messages, sums that differed, malformed messages */
void kv_fetcher_counters(const kv_fetcher *f, uint64_t out[4]) {
    out[0] = f->live;
    out[1] = f->late;
    out[2] = f->stale;
    out[3] = f->malformed;
}
