/* fetch.c: the client's requests to the data service. See fetch.h for the rules, wire.h for the messages. */
#include "fetch.h"

/* ---- the table ---- */

static kv_fetch *kv_fetch_find(kv_fetcher *f, uint64_t id) {
    kv_fetch *r = f->buckets[id % KV_FETCH_BUCKETS];
    while (r != NULL && r->id != id) r = r->next;
    return r;
}

static void kv_fetch_free(kv_fetch *r) {
    for (uint32_t i = 0; r->values != NULL && i < r->count; i++) free(r->values[i].bounce);
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
static void kv_fetch_settle(kv_fetch *r) {
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
static void kv_value_end(kv_fetch *r, kv_value *v, uint8_t status) {
    if (v->status != KV_PENDING) return;
    v->status = status;
    r->left--;
}

/* Every value without an answer gets this one; receives in flight end on their own. */
static void kv_fetch_give_up(kv_fetch *r, uint8_t status) {
    for (uint32_t i = 0; i < r->count; i++)
        if (!r->values[i].is_receiving) kv_value_end(r, &r->values[i], status);
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
static int kv_part_send(kv_fetch *r, unsigned am_id, const void *header, size_t header_length, const void *payload,
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
    ucs_status_ptr_t p =
        ucp_am_send_nbx(r->endpoint->ep, am_id, part->header, header_length, payload, length, &param);
    if (!UCS_PTR_IS_PTR(p)) kv_part_sent(part, (ucs_status_t)kv_status_of(p));
    return 1;
}

/* ---- receiving ---- */

static uint8_t *kv_piece_at(const kv_fetch *r, const kv_value *v, uint32_t i) {
    return (uint8_t *)(uintptr_t)r->pieces[v->first_piece + i].addr;
}

/* Copies n bytes to position `at` of the value's destination, or from it. */
static void kv_scatter(const kv_fetch *r, const kv_value *v, uint64_t at, uint8_t *bytes, uint64_t n, int is_gather) {
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

/* All bytes of the value are at `bytes`: a sum that differs is STALE (the extent was reused under the read). */
static uint8_t kv_verdict(kv_fetch *r, const kv_value *v, const void *bytes) {
    if (r->sum == NULL || r->sum(bytes, v->length) == v->sum) return KV_HIT;
    r->fetcher->stale++;
    return KV_STALE;
}

static void kv_value_assembled(kv_fetch *r, kv_value *v) {
    uint8_t status = kv_verdict(r, v, v->bounce != NULL ? v->bounce : kv_piece_at(r, v, 0));
    if (status == KV_HIT && v->bounce != NULL) kv_scatter(r, v, 0, v->bounce, v->length, 0);
    kv_value_end(r, v, status);
}

static void kv_on_value_received(void *request, ucs_status_t status, size_t length, void *arg) {
    kv_part *part = arg;
    kv_fetch *r = part->fetch;
    kv_value *v = &r->values[part->index];
    (void)length;
    r->receives--;
    v->is_receiving = 0;
    if (r->is_abandoned || status != UCS_OK)
        kv_value_end(r, v, KV_UNAVAILABLE);
    else
        kv_value_assembled(r, v);
    free(part);
    kv_fetch_settle(r);
    ucp_request_free(request);
}

static ucs_status_t kv_value_rendezvous(kv_fetch *r, uint32_t index, void *descriptor, uint64_t length) {
    kv_value *v = &r->values[index];
    kv_part *part = malloc(sizeof *part);
    if (v->pieces != 1 && v->bounce == NULL) v->bounce = malloc(length);
    if (part == NULL || (v->pieces != 1 && v->bounce == NULL)) {
        free(part);
        kv_value_end(r, v, KV_UNAVAILABLE);
        kv_fetch_settle(r);
        return UCS_OK;
    }
    part->fetch = r;
    part->index = index;
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.recv_am = kv_on_value_received;
    param.user_data = part;
    if (r->memh != NULL && v->bounce == NULL) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = r->memh;
    }
    r->receives++;
    v->is_receiving = 1;
    void *into = v->bounce != NULL ? v->bounce : kv_piece_at(r, v, 0);
    ucs_status_ptr_t p = ucp_am_recv_data_nbx(r->fetcher->worker->ucp, descriptor, into, length, &param);
    if (!UCS_PTR_IS_PTR(p)) {
        r->receives--;
        v->is_receiving = 0;
        if (p == NULL)
            kv_value_assembled(r, v);
        else
            kv_value_end(r, v, KV_UNAVAILABLE);
        free(part);
        kv_fetch_settle(r);
    }
    return UCS_INPROGRESS;
}

static void kv_value_eager(kv_fetch *r, kv_value *v, const kv_data *d, uint8_t *bytes, uint64_t length) {
    if (length == v->length) { /* whole: proved before anything is written */
        uint8_t status = kv_verdict(r, v, bytes);
        if (status == KV_HIT) kv_scatter(r, v, 0, bytes, length, 0);
        kv_value_end(r, v, status);
        return;
    }
    if (v->pieces != 1 && v->bounce == NULL && (v->bounce = malloc(v->length)) == NULL) {
        kv_value_end(r, v, KV_UNAVAILABLE);
        return;
    }
    memcpy((v->bounce != NULL ? v->bounce : kv_piece_at(r, v, 0)) + d->at, bytes, length);
    v->got += length;
    if (v->got >= v->length) kv_value_assembled(r, v);
}

static ucs_status_t kv_on_data(void *arg, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *recv) {
    kv_fetcher *f = arg;
    kv_data d;
    if (!kv_parse_data(header, header_length, length, &d)) {
        f->malformed++;
        return UCS_OK;
    }
    kv_fetch *r = kv_fetch_find(f, d.request);
    if (r == NULL || r->kind != KV_FETCH_READ || r->is_abandoned || d.index >= r->count ||
        r->values[d.index].status != KV_PENDING || r->values[d.index].is_receiving) {
        f->late++;
        return UCS_OK;
    }
    kv_value *v = &r->values[d.index];
    if (v->got != 0 && (v->length != d.length || v->generation != d.generation || v->sum != d.sum)) {
        kv_value_end(r, v, KV_STALE); /* fragments of different values */
        kv_fetch_settle(r);
        return UCS_OK;
    }
    v->length = d.length;
    v->generation = d.generation;
    v->sum = d.sum;
    if (d.length != v->expected) {
        kv_value_end(r, v, KV_SIZE);
    } else if (recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
        if (length == d.length) return kv_value_rendezvous(r, d.index, data, length);
        f->malformed++; /* a fragment is eager */
        kv_value_end(r, v, KV_UNAVAILABLE);
    } else {
        kv_value_eager(r, v, &d, data, length);
    }
    kv_fetch_settle(r);
    return UCS_OK;
}

static ucs_status_t kv_on_outcomes(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                   const ucp_am_recv_param_t *recv) {
    kv_fetcher *f = arg;
    kv_many many;
    if ((recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || !kv_parse_outcomes(header, header_length, length, &many)) {
        f->malformed++;
        return UCS_OK;
    }
    kv_fetch *r = kv_fetch_find(f, many.request);
    if (r == NULL || r->kind != KV_FETCH_READ) {
        f->late++;
        return UCS_OK;
    }
    for (uint32_t i = 0; i < many.count; i++) {
        kv_outcome o;
        memcpy(&o, (const uint8_t *)data + (size_t)i * sizeof o, sizeof o);
        if (o.index >= r->count || o.status == KV_HIT || o.status > KV_CANCELLED) {
            f->malformed++;
            continue;
        }
        kv_value *v = &r->values[o.index];
        if (v->status != KV_PENDING || v->is_receiving) continue;
        v->length = o.length;
        v->generation = o.generation;
        kv_value_end(r, v, o.status);
    }
    kv_fetch_settle(r);
    return UCS_OK;
}

static ucs_status_t kv_on_found(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                const ucp_am_recv_param_t *recv) {
    kv_fetcher *f = arg;
    kv_many many;
    if ((recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || !kv_parse_found(header, header_length, length, &many)) {
        f->malformed++;
        return UCS_OK;
    }
    kv_fetch *r = kv_fetch_find(f, many.request);
    if (r == NULL || r->kind != KV_FETCH_LOOKUP || r->left == 0 || many.count != r->count) {
        f->late++;
        return UCS_OK;
    }
    memcpy(r->found, data, length);
    for (uint32_t i = 0; i < r->count; i++) kv_value_end(r, &r->values[i], KV_HIT);
    kv_fetch_settle(r);
    return UCS_OK;
}

static ucs_status_t kv_on_written(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                  const ucp_am_recv_param_t *recv) {
    kv_fetcher *f = arg;
    kv_written w;
    (void)data, (void)recv;
    if (!kv_parse_written(header, header_length, length, &w)) {
        f->malformed++;
        return UCS_OK;
    }
    kv_fetch *r = kv_fetch_find(f, w.request);
    if (r == NULL || r->kind != KV_FETCH_WRITE || w.index >= r->count || r->values[w.index].status != KV_PENDING) {
        f->late++;
        return UCS_OK;
    }
    kv_value *v = &r->values[w.index];
    if (w.status != KV_WRITTEN)
        kv_value_end(r, v, w.status);
    else if (--v->unanswered == 0)
        kv_value_end(r, v, KV_WRITTEN);
    kv_fetch_settle(r);
    return UCS_OK;
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
    if (!done && spin_ns != 0) {
        uint64_t until = kv_now_ns() + spin_ns;
        for (unsigned round = 1; !done; round++) {
            ucp_worker_progress(w->ucp);
            if (round % 16 != 0) continue;
            if (kv_now_ns() >= until) break;
            kv_relax();
        }
    }
    if (done) return 0;
    r->waited = NULL;
    return 1;
}

static int32_t kv_fetch_ask(kv_fetch *r, unsigned am_id, uint64_t session, const uint8_t *keys, uint32_t fragment,
                            uint64_t spin_ns) {
    size_t bytes = (size_t)r->count * KV_KEY_BYTES;
    kv_ask ask = {.session = session, .request = r->id, .count = r->count, .fragment = fragment};
    r->keys = malloc(bytes);
    if (r->keys != NULL) memcpy(r->keys, keys, bytes);
    if (r->keys == NULL ||
        !kv_part_send(r, am_id, &ask, sizeof ask, r->keys, bytes, UCP_AM_SEND_FLAG_EAGER, NULL))
        kv_fetch_give_up(r, KV_UNAVAILABLE);
    return kv_fetch_started(r, spin_ns);
}

/* Reads n keys into their pieces. memh: registration all contiguous destinations lie in, or NULL. sum: a kv_sum_fn or 0. */
int32_t kv_fetch_read(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint64_t id, uint32_t n, const uint8_t *keys,
                      const uint32_t *first, const uint64_t *addr, const uint64_t *len, uint32_t fragment,
                      uint64_t sum, ucp_mem_h memh, uint64_t spin_ns) {
    if (n == 0 || n > KV_MAX_KEYS) return UCS_ERR_INVALID_PARAM;
    kv_fetch *r = kv_fetch_new(f, e, KV_FETCH_READ, id, n, first, addr, len);
    if (r == NULL) return KV_ERR_FULL;
    r->sum = (kv_sum_fn)(uintptr_t)sum;
    r->memh = memh;
    return kv_fetch_ask(r, KV_AM_READ, session, keys, fragment, spin_ns);
}

int32_t kv_fetch_lookup(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint64_t id, uint32_t n, const uint8_t *keys,
                        uint64_t spin_ns) {
    if (n == 0 || n > KV_MAX_KEYS) return UCS_ERR_INVALID_PARAM;
    kv_fetch *r = kv_fetch_new(f, e, KV_FETCH_LOOKUP, id, n, NULL, NULL, NULL);
    if (r == NULL) return KV_ERR_FULL;
    return kv_fetch_ask(r, KV_AM_LOOKUP, session, keys, 0, spin_ns);
}

/* Sends one value of a WRITE: whole, or in eager fragments. */
static void kv_write_value(kv_fetch *r, uint64_t session, uint32_t index, uint16_t region, uint64_t offset,
                           uint32_t fragment) {
    kv_value *v = &r->values[index];
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
        if (!kv_part_send(r, KV_AM_WRITE, &w, sizeof w, bytes + w.at, length, fragment ? UCP_AM_SEND_FLAG_EAGER : 0,
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

/* ---- the fetcher ---- */

int32_t kv_fetcher_open(kv_worker *w, kv_fetcher **out) {
    static const struct {
        unsigned id;
        ucp_am_recv_callback_t cb;
    } handlers[] = {{KV_AM_FOUND, kv_on_found},
                    {KV_AM_DATA, kv_on_data},
                    {KV_AM_OUTCOMES, kv_on_outcomes},
                    {KV_AM_WRITTEN, kv_on_written}};
    kv_fetcher *f = calloc(1, sizeof *f);
    if (f == NULL) return KV_ERR_MEMORY;
    f->worker = w;
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        ucp_am_handler_param_t param;
        memset(&param, 0, sizeof param);
        param.field_mask =
            UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        param.id = handlers[i].id;
        param.cb = handlers[i].cb;
        param.arg = f;
        ucs_status_t status = ucp_worker_set_am_recv_handler(w->ucp, &param);
        if (status != UCS_OK) {
            free(f);
            return status;
        }
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
