/* serve.c: what the data thread does with LOOKUP, READ and WRITE. See service.h and wire.h. */
#include "service.h"

/* ---- sending ---- */

static kv_send *kv_send_new(kv_session *session, uint64_t bytes) {
    kv_service *s = session->service;
    kv_send *send = s->free_sends;
    if (send != NULL)
        s->free_sends = send->next;
    else if ((send = malloc(sizeof *send)) == NULL)
        return NULL;
    send->session = session;
    send->bytes = bytes;
    send->owned = NULL;
    session->sends++;
    session->bytes += bytes;
    return send;
}

static void kv_send_end(kv_send *send) {
    kv_session *session = send->session;
    kv_service *s = session->service;
    session->sends--;
    session->bytes -= send->bytes;
    free(send->owned);
    send->next = s->free_sends;
    s->free_sends = send;
    if (session->parked != NULL && !session->is_waiting) {
        session->is_waiting = 1;
        session->waiting = s->waiting;
        s->waiting = session;
    }
}

static void kv_on_send_end(void *request, ucs_status_t status, void *arg) {
    (void)status; /* a lost peer shows at the endpoint */
    kv_send_end(arg);
    ucp_request_free(request);
}

static void kv_send_start(kv_send *send, ucp_ep_h ep, unsigned am_id, size_t header_length, const void *payload, size_t length,
                          ucp_mem_h memh, uint32_t flags) {
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = kv_on_send_end;
    param.user_data = send;
    param.flags = flags;
    if (memh != NULL) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memh;
    }
    ucs_status_ptr_t p = ucp_am_send_nbx(ep, am_id, send->header, header_length, payload, length, &param);
    if (!UCS_PTR_IS_PTR(p)) kv_send_end(send);
}

/* The session a request belongs to, when it may be answered. */
static kv_session *kv_asker(kv_service *s, uint64_t token) {
    kv_session *session = kv_session_find(s, token);
    if (session == NULL) {
        kv_count(&s->counters.unknown_session, 1);
        return NULL;
    }
    if (session->is_lost || session->ep == NULL || session->sends >= KV_MAX_SENDS) {
        kv_count(&s->counters.dropped, 1);
        return NULL;
    }
    return session;
}

/* ---- where blocks lie ---- */

/* Where a found block lies, checked against the region it names; NULL when it does not lie there. */
static const uint8_t *kv_block_at(kv_service *s, const kv_found *f, ucp_mem_h *memh) {
    if (f->region >= KV_MAX_REGIONS || f->length > KV_MAX_VALUE) return NULL;
    kv_lent *r = &s->regions[f->region];
    uint64_t size = atomic_load_explicit(&r->size, memory_order_acquire);
    uint64_t base = atomic_load_explicit(&r->base, memory_order_relaxed);
    if (f->addr < base || !kv_in_region(f->addr - base, f->length, size)) return NULL;
    *memh = atomic_load_explicit(&r->memh, memory_order_relaxed);
    return (const uint8_t *)(uintptr_t)f->addr;
}

/* Where a found block lies within its region, for one-sided reads; no addresses leave this process. */
static uint64_t kv_offset_of(kv_service *s, const kv_found *f) {
    ucp_mem_h memh;
    const uint8_t *at = kv_block_at(s, f, &memh);
    return at == NULL ? UINT64_MAX : (uint64_t)(uintptr_t)at - atomic_load_explicit(&s->regions[f->region].base, memory_order_relaxed);
}

/* ---- LOOKUP ---- */

static ucs_status_t kv_on_lookup(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                 const ucp_am_recv_param_t *recv) {
    kv_service *s = arg;
    kv_ask ask;
    if ((recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || !kv_parse_ask(header, header_length, length, &ask)) {
        kv_count(&s->counters.malformed, 1);
        return UCS_OK;
    }
    kv_session *session = kv_asker(s, ask.session);
    if (session == NULL) return UCS_OK;
    kv_found *found = malloc(ask.count * sizeof *found);
    kv_send *send = found == NULL ? NULL : kv_send_new(session, ask.count * sizeof *found);
    if (send == NULL) {
        free(found);
        kv_count(&s->counters.dropped, 1);
        return UCS_OK;
    }
    kv_many answer = {.request = ask.request, .count = ask.count};
    s->resolve(s->resolve_ctx, ask.count, data, found, &answer.epoch);
    for (uint32_t i = 0; i < ask.count; i++) found[i].addr = kv_offset_of(s, &found[i]);
    kv_count(&s->counters.lookups, 1);
    kv_count(&s->counters.lookup_keys, ask.count);
    memcpy(send->header, &answer, sizeof answer);
    send->owned = found;
    kv_send_start(send, session->ep, KV_AM_FOUND, sizeof answer, found, ask.count * sizeof *found, NULL, UCP_AM_SEND_FLAG_EAGER);
    return UCS_OK;
}

/* ---- READ ---- */

/* Sends one block: whole, or in eager fragments. 0: nothing was sent, for memory ran out, or the fragments would be more than
 * a session may have in flight. */
static int kv_send_block(kv_session *session, const kv_parked *p, uint32_t index, const kv_found *f,
                         const uint8_t *bytes, ucp_mem_h memh) {
    kv_data data = {.request = p->request, .index = index, .status = KV_HIT, .tier = f->tier, .length = f->length,
                    .sum = f->sum, .generation = f->generation};
    uint64_t step = p->fragment != 0 ? p->fragment : f->length;
    if (f->length != 0 && f->length / step > KV_MAX_SENDS) return 0;
    do {
        uint64_t length = f->length - data.at < step ? f->length - data.at : step;
        kv_send *send = kv_send_new(session, length);
        if (send == NULL) return data.at != 0; /* the rest is missing: the client's deadline ends it */
        memcpy(send->header, &data, sizeof data);
        uint32_t turn = kv_turn(session->others_count + 1, p->request, p->count, index, f->length, data.at, p->fragment);
        kv_send_start(send, turn == 0 ? session->ep : session->others[turn - 1], KV_AM_DATA, sizeof data, bytes + data.at, length, length ? memh : NULL,
                      p->fragment != 0 || length == 0 ? UCP_AM_SEND_FLAG_EAGER : 0);
        data.at += length;
    } while (data.at < f->length);
    return 1;
}

static void kv_send_outcomes(kv_session *session, uint64_t request, uint32_t epoch, const kv_outcome *outcomes,
                             uint32_t count) {
    size_t bytes = count * sizeof *outcomes;
    kv_outcome *copy = malloc(bytes);
    kv_send *send = copy == NULL ? NULL : kv_send_new(session, bytes);
    if (send == NULL) {
        free(copy);
        kv_count(&session->service->counters.dropped, 1);
        return;
    }
    memcpy(copy, outcomes, bytes);
    kv_many many = {.request = request, .count = count, .epoch = epoch};
    memcpy(send->header, &many, sizeof many);
    send->owned = copy;
    kv_send_start(send, session->ep, KV_AM_OUTCOMES, sizeof many, copy, bytes, NULL, UCP_AM_SEND_FLAG_EAGER);
}

/* Answers the next chunk of a READ. */
static void kv_answer_chunk(kv_session *session, kv_parked *p) {
    kv_service *s = session->service;
    kv_found found[KV_RESOLVE_CHUNK];
    kv_outcome outcomes[KV_RESOLVE_CHUNK];
    uint32_t missed = 0, hits = 0, epoch;
    uint64_t bytes = 0;
    uint32_t n = p->count - p->done < KV_RESOLVE_CHUNK ? p->count - p->done : KV_RESOLVE_CHUNK;
    s->resolve(s->resolve_ctx, n, p->keys + (size_t)p->done * KV_KEY_BYTES, found, &epoch);
    uint32_t i = 0;
    for (; i < n && session->bytes < KV_SESSION_WINDOW; i++) {
        kv_found *f = &found[i];
        ucp_mem_h memh = NULL;
        const uint8_t *at = f->status == KV_HIT ? kv_block_at(s, f, &memh) : NULL;
        uint8_t status = f->status;
        if (status == KV_HIT && at == NULL) status = KV_UNMAPPED;
        if (status == KV_HIT && kv_send_block(session, p, p->done + i, f, at, memh)) {
            hits++;
            bytes += f->length;
            continue;
        }
        if (status == KV_HIT) status = KV_UNAVAILABLE;
        outcomes[missed++] = (kv_outcome){.index = p->done + i, .status = status, .tier = f->tier, .length = f->length,
                                          .generation = f->generation};
    }
    if (missed != 0) kv_send_outcomes(session, p->request, epoch, outcomes, missed);
    p->done += i;
    kv_count(&s->counters.read_hits, hits);
    kv_count(&s->counters.read_bytes, bytes);
}

/* Answers parked reads while the session's window has room. */
void kv_serve_pump(kv_session *session) {
    while (session->parked != NULL && session->bytes < KV_SESSION_WINDOW && session->sends < KV_MAX_SENDS &&
           !session->is_lost) {
        kv_parked *p = session->parked;
        kv_answer_chunk(session, p);
        if (p->done < p->count) continue;
        session->parked = p->next;
        if (session->parked == NULL) session->parked_end = &session->parked;
        session->parked_count--;
        free(p);
    }
}

void kv_serve_waiting(kv_service *s) {
    while (s->waiting != NULL) {
        kv_session *session = s->waiting;
        s->waiting = session->waiting;
        session->is_waiting = 0;
        kv_serve_pump(session);
        if (session->bytes >= KV_SESSION_WINDOW) break; /* the others' turn comes with the next progress */
    }
}

static ucs_status_t kv_on_read(void *arg, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *recv) {
    kv_service *s = arg;
    kv_ask ask;
    if ((recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) || !kv_parse_ask(header, header_length, length, &ask)) {
        kv_count(&s->counters.malformed, 1);
        return UCS_OK;
    }
    kv_session *session = kv_asker(s, ask.session);
    if (session == NULL) return UCS_OK;
    kv_parked *p = session->parked_count < KV_MAX_PARKED ? malloc(sizeof *p + length) : NULL;
    if (p == NULL) {
        kv_count(&s->counters.dropped, 1);
        return UCS_OK;
    }
    p->next = NULL;
    p->request = ask.request;
    p->count = ask.count;
    p->done = 0;
    p->fragment = ask.fragment != 0 && ask.fragment < 4096 ? 4096 : ask.fragment;
    memcpy(p->keys, data, length);
    *session->parked_end = p;
    session->parked_end = &p->next;
    session->parked_count++;
    kv_count(&s->counters.reads, 1);
    kv_count(&s->counters.read_keys, ask.count);
    kv_serve_pump(session);
    return UCS_OK;
}

/* ---- WRITE ---- */

static void kv_send_written(kv_session *session, const kv_write *w, uint8_t status) {
    if (session->is_closing || session->is_lost) return;
    kv_send *send = session->sends < 2 * KV_MAX_SENDS ? kv_send_new(session, 0) : NULL;
    if (send == NULL) {
        kv_count(&session->service->counters.dropped, 1);
        return;
    }
    kv_written written = {.request = w->request, .index = w->index, .status = status};
    memcpy(send->header, &written, sizeof written);
    kv_send_start(send, session->ep, KV_AM_WRITTEN, sizeof written, NULL, 0, NULL, UCP_AM_SEND_FLAG_EAGER);
}

/* One write is over: its grant is free again, the client is told. */
static void kv_write_end(kv_session *session, const kv_write *w, uint64_t length, ucs_status_t status) {
    kv_service *s = session->service;
    kv_grant_release(s, w->region, w->offset, w->session);
    if (status == UCS_OK) {
        kv_count(&s->counters.writes, 1);
        kv_count(&s->counters.write_bytes, length);
    }
    kv_send_written(session, w, status == UCS_OK ? KV_WRITTEN : KV_BROKEN);
}

static void kv_on_write_received(void *request, ucs_status_t status, size_t length, void *arg) {
    kv_incoming *in = arg;
    in->session->receives--;
    kv_write_end(in->session, &in->header, length, status);
    free(in);
    ucp_request_free(request);
}

static ucs_status_t kv_on_write(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                const ucp_am_recv_param_t *recv) {
    kv_service *s = arg;
    kv_write w;
    if (!kv_parse_write(header, header_length, length, &w)) {
        kv_count(&s->counters.malformed, 1);
        return UCS_OK;
    }
    kv_session *session = kv_session_find(s, w.session);
    if (session == NULL) {
        kv_count(&s->counters.unknown_session, 1);
        return UCS_OK;
    }
    if (session->ep == NULL) { /* awaited: its client cannot be told */
        kv_count(&s->counters.dropped, 1);
        return UCS_OK;
    }
    int is_rendezvous = (recv->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    if ((is_rendezvous && session->is_eager_only) || kv_grant_hold(s, &w, length) == NULL) {
        kv_count(&s->counters.refused, 1);
        kv_send_written(session, &w, KV_REFUSED);
        return UCS_OK;
    }
    kv_lent *r = &s->regions[w.region];
    uint8_t *into = (uint8_t *)(uintptr_t)atomic_load(&r->base) + w.offset + w.at;
    if (!is_rendezvous) {
        memcpy(into, data, length);
        kv_write_end(session, &w, length, UCS_OK);
        return UCS_OK;
    }
    kv_incoming *in = malloc(sizeof *in);
    if (in == NULL) {
        kv_write_end(session, &w, length, UCS_ERR_NO_MEMORY);
        return UCS_OK;
    }
    in->session = session;
    in->header = w;
    in->length = length;
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    param.cb.recv_am = kv_on_write_received;
    param.user_data = in;
    param.memh = atomic_load(&r->memh);
    session->receives++;
    ucs_status_ptr_t p = ucp_am_recv_data_nbx(s->worker, data, into, length, &param);
    if (!UCS_PTR_IS_PTR(p)) {
        session->receives--;
        kv_write_end(session, &w, length, (ucs_status_t)kv_status_of(p));
        free(in);
    }
    return UCS_INPROGRESS;
}

static ucs_status_t kv_on_unknown(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                  const ucp_am_recv_param_t *recv) {
    (void)header, (void)header_length, (void)data, (void)length, (void)recv;
    kv_count(&((kv_service *)arg)->counters.malformed, 1);
    return UCS_OK;
}

/* Ids that are not ours are counted; without a handler UCX would print a warning for each such message. */
int32_t kv_serve_install(kv_service *s) {
    for (unsigned id = 0; id < 32; id++) {
        ucp_am_handler_param_t param;
        memset(&param, 0, sizeof param);
        param.field_mask =
            UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        param.id = id;
        param.cb = id == KV_AM_LOOKUP ? kv_on_lookup
                   : id == KV_AM_READ ? kv_on_read
                   : id == KV_AM_WRITE ? kv_on_write
                                       : kv_on_unknown;
        param.arg = s;
        ucs_status_t status = ucp_worker_set_am_recv_handler(s->worker, &param);
        if (status != UCS_OK) return status;
    }
    return 0;
}
