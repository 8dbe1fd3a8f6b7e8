/* receive.c: what the node answers, into the destinations of the requests. See fetch.h for the rules, wire.h for the messages.
 *
 * Sums cost no pass of their own: a fragment is copied into its place and summed in one go while it is in the cache, as long
 * as a value's fragments come in order; else, and after a receive in place, the whole is summed at the end. */
#include "fetch.h"

/* ---- values ---- */

/* A sum that differs is STALE: the extent was reused under the read. */
static void kv_value_summed(kv_fetch *r, kv_value *v, uint64_t sum) {
    int is_same = sum == v->sum;
    if (!is_same) r->fetcher->stale++;
    kv_value_end(r, v, is_same ? KV_HIT : KV_STALE);
}

/* Copies the next n bytes of the value, from position v->got on, into its pieces, and sums them. bytes NULL: only sums. */
static void kv_scatter_sum(const kv_fetch *r, kv_value *v, kvx_state *state, const uint8_t *bytes, uint64_t n) {
    uint64_t at = bytes != NULL ? v->got : 0;
    for (uint32_t i = 0; i < v->pieces && n != 0; i++) {
        uint64_t room = r->pieces[v->first_piece + i].len;
        if (at >= room) {
            at -= room;
            continue;
        }
        uint64_t step = room - at < n ? room - at : n;
        uint8_t *piece = kv_piece_at(r, v, i) + at;
        if (bytes != NULL) {
            kvx_copy(state, piece, bytes, step);
            bytes += step;
        } else {
            kvx_copy(state, NULL, piece, step);
        }
        n -= step;
        at = 0;
    }
}

/* All bytes are in their places, not summed on the way. */
static void kv_value_landed(kv_fetch *r, kv_value *v) {
    if (!r->is_checked) {
        kv_value_end(r, v, KV_HIT);
    } else if (v->pieces == 1) {
        kv_value_summed(r, v, kvx_sum(kv_piece_at(r, v, 0), v->length));
    } else {
        kvx_state state;
        kvx_begin(&state);
        kv_scatter_sum(r, v, &state, NULL, v->length);
        kv_value_summed(r, v, kvx_end(&state));
    }
}

static void kv_on_value_received(void *request, ucs_status_t status, size_t length, void *arg) {
    kv_part *part = arg;
    kv_fetch *r = part->fetch;
    kv_value *v = &r->values[part->index];
    (void)length;
    r->receives--;
    v->is_receiving = 0;
    if (r->is_abandoned || status != UCS_OK) {
        kv_value_end(r, v, KV_UNAVAILABLE);
    } else {
        if (v->bounce != NULL) kv_scatter(r, v, 0, v->bounce, v->length, 0);
        kv_value_landed(r, v);
    }
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
        if (p == NULL) {
            if (v->bounce != NULL) kv_scatter(r, v, 0, v->bounce, v->length, 0);
            kv_value_landed(r, v);
        } else {
            kv_value_end(r, v, KV_UNAVAILABLE);
        }
        free(part);
        kv_fetch_settle(r);
    }
    return UCS_INPROGRESS;
}

/* A whole value, or a fragment of one. */
static void kv_value_eager(kv_fetch *r, kv_value *v, const kv_data *d, uint8_t *bytes, uint64_t length) {
    if (length == v->length && v->pieces == 1 && r->is_checked) {
        kv_value_summed(r, v, kvx_copy_sum(kv_piece_at(r, v, 0), bytes, length));
        return;
    }
    if (r->is_checked && d->at == 0 && v->got == 0 && (v->state = malloc(sizeof *v->state)) != NULL) kvx_begin(v->state);
    if (v->state != NULL && d->at == v->got) {
        kv_scatter_sum(r, v, v->state, bytes, length);
    } else {
        free(v->state);
        v->state = NULL;
        kv_scatter(r, v, d->at, bytes, length, 0);
    }
    v->got += length;
    if (v->got < v->length) return;
    if (v->state != NULL)
        kv_value_summed(r, v, kvx_end(v->state));
    else
        kv_value_landed(r, v);
}

/* ---- handlers ---- */

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
        int is_asked = many.epoch == r->epoch;
        v->length = is_asked ? o.length : 0;
        v->generation = is_asked ? o.generation : 0;
        kv_value_end(r, v, is_asked ? o.status : KV_OTHER_EPOCH);
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
    for (uint32_t i = 0; i < r->count; i++) kv_value_end(r, &r->values[i], many.epoch == r->epoch ? KV_HIT : KV_OTHER_EPOCH);
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

int32_t kv_receive_install(kv_fetcher *f) {
    static const struct {
        unsigned id;
        ucp_am_recv_callback_t cb;
    } handlers[] = {{KV_AM_FOUND, kv_on_found},
                    {KV_AM_DATA, kv_on_data},
                    {KV_AM_OUTCOMES, kv_on_outcomes},
                    {KV_AM_WRITTEN, kv_on_written}};
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        ucp_am_handler_param_t param;
        memset(&param, 0, sizeof param);
        param.field_mask =
            UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        param.id = handlers[i].id;
        param.cb = handlers[i].cb;
        param.arg = f;
        ucs_status_t status = ucp_worker_set_am_recv_handler(f->worker->ucp, &param);
        if (status != UCS_OK) return status;
    }
    return 0;
}
