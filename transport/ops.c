/* ops.c: active messages, one-sided reads and writes, flush, inline wait. See ucx.h for the rules. */
#include "ucx.h"

/* ---- operations ---- */

static kv_op *kv_op_new(kv_worker *w, uint64_t id) {
    if (!kv_ring_room(w)) return NULL;
    kv_op *o = w->free_ops;
    if (o != NULL)
        w->free_ops = o->next;
    else if ((o = malloc(sizeof *o)) == NULL)
        return NULL;
    o->worker = w;
    o->id = id;
    o->length = 0;
    o->left = 1;
    o->status = 0;
    o->waited = NULL;
    o->owned = NULL;
    w->reserved++;
    w->inflight++;
    return o;
}

static void kv_op_free(kv_op *o) {
    kv_worker *w = o->worker;
    w->reserved--;
    w->inflight--;
    free(o->owned);
    o->next = w->free_ops;
    w->free_ops = o;
}

/* One of the operation's parts ended; the last one makes the record (or answers the inline wait). */
static void kv_op_part_done(kv_op *o, ucs_status_t status, uint64_t length) {
    kv_worker *w = o->worker;
    if (status != UCS_OK) o->status = status;
    o->length += length;
    if (--o->left != 0) return;
    if (o->waited != NULL) {
        *o->waited = 1;
        w->last_status = o->status;
        w->last_length = o->length;
    }
    int is_recorded = o->waited == NULL;
    uint64_t id = o->id, total = o->length;
    int32_t result = o->status;
    kv_op_free(o);
    if (is_recorded) kv_push(w, KV_DONE, id, result, total);
}

static void kv_on_sent(void *request, ucs_status_t status, void *arg) {
    kv_op_part_done(arg, status, 0);
    ucp_request_free(request);
}

static void kv_on_received(void *request, ucs_status_t status, size_t length, void *arg) {
    kv_op_part_done(arg, status, length);
    ucp_request_free(request);
}

/* Ends a submission of a one-part operation: p is what UCX returned. */
static int32_t kv_submitted(kv_op *o, ucs_status_ptr_t p, uint64_t spin_ns) {
    kv_worker *w = o->worker;
    if (!UCS_PTR_IS_PTR(p)) {
        kv_op_free(o);
        return kv_status_of(p);
    }
    if (spin_ns == 0) return 1;
    int done = 0;
    o->waited = &done;
    kv_progress_until(w, &done, spin_ns, KV_INLINE_BOUND_NS);
    if (done) return w->last_status;
    o->waited = NULL;
    return 1;
}

static void kv_send_param(ucp_request_param_t *param, kv_op *o, ucp_mem_h memh) {
    memset(param, 0, sizeof *param);
    param->op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param->cb.send = kv_on_sent;
    param->user_data = o;
    if (memh != NULL) {
        param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param->memh = memh;
    }
}

/* ---- one-sided ---- */

/* n transfers between local[i] (length[i] bytes) and remote[i]; one completion. is_put: local to remote. */
int32_t kv_transfer(kv_endpoint *e, int is_put, size_t n, const uint64_t *local, const uint64_t *length,
                    const uint64_t *remote, ucp_rkey_h rkey, ucp_mem_h memh, uint64_t id, uint64_t spin_ns) {
    kv_worker *w = e->worker;
    kv_op *o = kv_op_new(w, id);
    if (o == NULL) return KV_ERR_FULL;
    int done = 0;
    o->waited = &done; /* no record while submitting */
    o->left = 1;
    ucp_request_param_t param;
    kv_send_param(&param, o, memh);
    if (n > 1) param.op_attr_mask |= UCP_OP_ATTR_FLAG_MULTI_SEND;
    for (size_t i = 0; i < n && o->status == 0; i++) {
        void *at = (void *)(uintptr_t)local[i];
        ucs_status_ptr_t p = is_put ? ucp_put_nbx(e->ep, at, length[i], remote[i], rkey, &param)
                                    : ucp_get_nbx(e->ep, at, length[i], remote[i], rkey, &param);
        if (UCS_PTR_IS_PTR(p))
            o->left++;
        else if (p != NULL)
            o->status = kv_status_of(p);
        o->length += length[i];
    }
    kv_op_part_done(o, UCS_OK, 0);
    if (!done) kv_progress_until(w, &done, spin_ns, KV_INLINE_BOUND_NS);
    if (done) return w->last_status;
    o->waited = NULL;
    return 1;
}

int32_t kv_flush(kv_endpoint *e, uint64_t id, uint64_t spin_ns) {
    kv_op *o = kv_op_new(e->worker, id);
    if (o == NULL) return KV_ERR_FULL;
    ucp_request_param_t param;
    kv_send_param(&param, o, NULL);
    return kv_submitted(o, ucp_ep_flush_nbx(e->ep, &param), spin_ns);
}

/* ---- active messages ---- */

/* Sends header and n pieces of payload. flags: UCP_AM_SEND_FLAG_*. The header is copied, the pieces are not. */
int32_t kv_message_send(kv_endpoint *e, uint32_t am_id, const void *header, size_t header_length, size_t n,
                        const kv_iov *pieces, uint32_t flags, ucp_mem_h memh, uint64_t id, uint64_t spin_ns) {
    if (header_length > KV_MAX_HEADER || am_id > 31) return UCS_ERR_INVALID_PARAM;
    kv_op *o = kv_op_new(e->worker, id);
    if (o == NULL) return KV_ERR_FULL;
    if (header_length) memcpy(o->header, header, header_length);
    ucp_request_param_t param;
    kv_send_param(&param, o, n == 1 ? memh : NULL);
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flags;
    const void *buffer = n == 1 ? (const void *)(uintptr_t)pieces[0].addr : NULL;
    size_t count = n == 1 ? pieces[0].len : 0;
    if (n > 1) {
        ucp_dt_iov_t *list = malloc(n * sizeof *list);
        if (list == NULL) {
            kv_op_free(o);
            return KV_ERR_MEMORY;
        }
        for (size_t i = 0; i < n; i++) {
            list[i].buffer = (void *)(uintptr_t)pieces[i].addr;
            list[i].length = pieces[i].len;
        }
        o->owned = list;
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
        param.datatype = ucp_dt_make_iov();
        buffer = list;
        count = n;
    }
    return kv_submitted(o, ucp_am_send_nbx(e->ep, am_id, o->header, header_length, buffer, count, &param), spin_ns);
}

static ucs_status_t kv_on_message(void *arg, const void *header, size_t header_length, void *data, size_t length,
                                  const ucp_am_recv_param_t *param) {
    kv_am_arg *a = arg;
    kv_worker *w = a->worker;
    int is_rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    kv_held *h = NULL;
    if (!kv_ring_room(w) || header_length > KV_MAX_HEADER) goto drop;
    if (length != 0) {
        if (!is_rendezvous && w->held_bytes + length > KV_HELD_MAX) goto drop;
        h = malloc(sizeof *h);
        if (h == NULL) goto drop;
        h->data = is_rendezvous ? data : malloc(length);
        if (h->data == NULL) {
            free(h);
            goto drop;
        }
        if (!is_rendezvous) {
            memcpy(h->data, data, length);
            w->held_bytes += length;
        }
        h->length = length;
        h->is_rendezvous = is_rendezvous;
        h->token = ++w->next_token;
        h->next = w->held;
        w->held = h;
    }
    kv_record *r = kv_push(w, KV_MESSAGE, a->am_id, 0, length);
    r->aux = h == NULL ? 0 : h->token;
    r->header_length = (uint16_t)header_length;
    if (header_length) memcpy(r->header, header, header_length);
    return is_rendezvous && h != NULL ? UCS_INPROGRESS : UCS_OK;
drop:
    w->dropped++;
    return UCS_OK;
}

/* Receives application messages of this id from now on. */
int32_t kv_message_handle(kv_worker *w, uint32_t am_id) {
    if (am_id >= KV_MAX_AM_IDS) return UCS_ERR_INVALID_PARAM;
    kv_am_arg *a = &w->am_args[am_id];
    a->worker = w;
    a->am_id = am_id;
    ucp_am_handler_param_t param;
    memset(&param, 0, sizeof param);
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    param.id = am_id;
    param.cb = kv_on_message;
    param.arg = a;
    return ucp_worker_set_am_recv_handler(w->ucp, &param);
}

static kv_held *kv_held_take(kv_worker *w, uint64_t token) {
    for (kv_held **at = &w->held; *at != NULL; at = &(*at)->next)
        if ((*at)->token == token) {
            kv_held *h = *at;
            *at = h->next;
            return h;
        }
    return NULL;
}

/* Brings a held message's payload into addr (capacity bytes). NO_ELEM: unknown token; BUFFER_TOO_SMALL leaves it held. */
int32_t kv_message_receive(kv_worker *w, uint64_t token, uint64_t addr, uint64_t capacity, ucp_mem_h memh, uint64_t id,
                           uint64_t spin_ns) {
    kv_held *h = kv_held_take(w, token);
    if (h == NULL) return UCS_ERR_NO_ELEM;
    if (h->length > capacity) {
        h->next = w->held;
        w->held = h;
        return UCS_ERR_BUFFER_TOO_SMALL;
    }
    w->last_length = h->length;
    if (!h->is_rendezvous) {
        memcpy((void *)(uintptr_t)addr, h->data, h->length);
        kv_held_free(w, h);
        return 0;
    }
    kv_op *o = kv_op_new(w, id);
    if (o == NULL) {
        h->next = w->held;
        w->held = h;
        return KV_ERR_FULL;
    }
    ucp_request_param_t param;
    kv_send_param(&param, o, memh);
    param.cb.recv_am = kv_on_received;
    uint64_t length = h->length;
    void *descriptor = h->data;
    free(h);
    return kv_submitted(o, ucp_am_recv_data_nbx(w->ucp, descriptor, (void *)(uintptr_t)addr, length, &param), spin_ns);
}

/* Drops a held message; the sender's operation ends well. */
void kv_message_drop(kv_worker *w, uint64_t token) {
    kv_held *h = kv_held_take(w, token);
    if (h != NULL) kv_held_free(w, h);
}
