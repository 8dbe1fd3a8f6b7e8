/* ucp_double.h: stands in for libucp under the fuzz targets, and only there: everything else runs on the real library.
 *
 * One worker, one thread. What the code under test starts is finished at once, later, or with an error, as the input says;
 * messages, connect requests and endpoint errors come from the input. It holds the code to UCX's rules: nothing is sent on an
 * endpoint that was closed, a request is freed exactly once and not before its end, a rendezvous descriptor is received or
 * released once, a connect request is answered once, header and payload stay readable until the operation's end.
 * A call of libucp that the code begins to make needs its definition here. The target says what it expects through
 * double_on_send, double_on_receive and double_on_land.
 */
#ifndef UCP_DOUBLE_H
#define UCP_DOUBLE_H

#include <ucp/api/ucp.h>

#include "fuzz_input.h"

typedef enum { DOUBLE_SEND, DOUBLE_RECEIVE, DOUBLE_GET, DOUBLE_PUT, DOUBLE_FLUSH, DOUBLE_CLOSE } double_kind;

typedef struct double_message { /* a message by rendezvous whose payload was not fetched yet */
    struct double_message *next;
    void *descriptor;
    uint8_t *bytes;
    size_t length;
    uint64_t tag;
} double_message;

typedef struct double_request {
    struct double_request *next, **at; /* list of those in flight */
    double_kind kind;
    int is_done, is_freed;
    ucs_status_t status;
    struct ucp_ep *ep;
    void (*send_cb)(void *, ucs_status_t, void *);
    void (*receive_cb)(void *, ucs_status_t, size_t, void *);
    void *user_data;
    const uint8_t *header;
    size_t header_length;
    uint64_t header_sum;
    uint8_t *buffer;
    size_t length;
    double_message *message;
} double_request;

struct ucp_ep {
    struct ucp_ep *next;
    ucp_err_handler_t handler;
    int is_peer_mode, is_failed, is_closed, is_forced;
    uint32_t pending; /* operations in flight, its close not among them */
    uint64_t number;
};

struct ucp_conn_request {
    uint64_t client_id;
    int is_queryable, is_answered;
};

struct ucp_listener {
    ucp_listener_conn_handler_t handler;
};

static struct {
    ucp_am_handler_param_t handlers[32];
    struct ucp_ep *eps;
    double_request *pending, *kept; /* kept: done, not freed yet */
    double_message *messages;
    struct ucp_listener *listener;
    struct ucp_conn_request *connecting[64];
    unsigned connecting_count, connect_fail_in; /* connect_fail_in: 0, or which of the next ucp_ep_create fails */
    uint32_t pending_count;
    uint64_t ep_count, received; /* receives started */
    uint8_t fate, fate_state;
    int is_open, is_listen_refused;
} dbl;

/* Defined by the target. */
static void double_on_send(struct ucp_ep *ep, unsigned id, const void *header, size_t header_length, const void *payload,
                           size_t length, uint32_t flags, void *user_data);
static void double_on_receive(double_message *m, uint8_t *into, size_t length, void *user_data);
static void double_on_land(double_message *m, uint8_t *into, size_t length, void *user_data);
static unsigned double_progress(void);
static unsigned double_is_idle(void); /* may the worker be armed? */

FUZZ_QUIET static inline uint64_t double_sum(const uint8_t *bytes, size_t n) {
    uint64_t sum = n;
    for (size_t i = 0; i < n; i++) sum = sum * 31 + bytes[i];
    return sum;
}

/* Reads both ends of n bytes, all of them when they are few. */
static inline void double_touch(const void *at, size_t n) {
    static uint8_t scratch[2048];
    size_t head = n < sizeof scratch ? n : sizeof scratch;
    if (n == 0) return;
    memcpy(scratch, at, head);
    memcpy(scratch, (const uint8_t *)at + n - head, head);
}

/* What becomes of the next operation: 0 ends now, 1 later, 2 fails now. fate: 0 all later, 1 all now, 2 all fail, else mixed. */
static inline int double_fate(void) {
    switch (dbl.fate & 3) {
    case 0: return 1;
    case 1: return 0;
    case 2: return 2;
    }
    dbl.fate_state = (uint8_t)(dbl.fate_state * 5 + 7 + dbl.fate);
    return dbl.fate_state >> 4 == 15 ? 2 : dbl.fate_state >> 6 & 1;
}

static const ucs_status_t double_errors[] = {UCS_ERR_CONNECTION_RESET, UCS_ERR_CANCELED, UCS_ERR_ENDPOINT_TIMEOUT,
                                             UCS_ERR_NO_MEMORY, UCS_ERR_IO_ERROR, UCS_ERR_MESSAGE_TRUNCATED};

static inline ucs_status_ptr_t double_error(ucs_status_t status) { return (ucs_status_ptr_t)(intptr_t)status; }

static double_request *double_start(double_kind kind, struct ucp_ep *ep, const ucp_request_param_t *param) {
    double_request *r = calloc(1, sizeof *r);
    CHECK(r != NULL);
    r->kind = kind;
    r->ep = ep;
    if (param != NULL && param->op_attr_mask & UCP_OP_ATTR_FIELD_CALLBACK) {
        if (kind == DOUBLE_RECEIVE)
            r->receive_cb = param->cb.recv_am;
        else
            r->send_cb = param->cb.send;
    }
    if (param != NULL && param->op_attr_mask & UCP_OP_ATTR_FIELD_USER_DATA) r->user_data = param->user_data;
    r->next = dbl.pending;
    r->at = &dbl.pending;
    if (r->next != NULL) r->next->at = &r->next;
    dbl.pending = r;
    dbl.pending_count++;
    if (ep != NULL && kind != DOUBLE_CLOSE) ep->pending++;
    return r;
}

static void double_message_free(double_message *m) {
    double_message **at = &dbl.messages;
    while (*at != m) at = &(*at)->next;
    *at = m->next;
    free(m->descriptor);
    free(m->bytes);
    free(m);
}

static double_message *double_message_of(const void *descriptor) {
    double_message *m = dbl.messages;
    while (m != NULL && m->descriptor != descriptor) m = m->next;
    CHECK(m != NULL); /* not a descriptor, or used up */
    return m;
}

/* Bytes of a receive arrive: all of them, or some when it fails. */
static void double_land(double_message *m, uint8_t *into, size_t length, ucs_status_t status, void *user_data) {
    size_t n = status == UCS_OK ? length : length / 2;
    double_on_land(m, into, n, user_data);
    memcpy(into, m->bytes, n);
}

/* Ends an operation in flight: its callback is called, and must have freed it. */
static void double_finish(double_request *r, ucs_status_t status) {
    if (r->ep != NULL && r->kind != DOUBLE_CLOSE && (r->ep->is_failed || r->ep->is_forced) && status == UCS_OK)
        status = UCS_ERR_CANCELED;
    *r->at = r->next;
    if (r->next != NULL) r->next->at = r->at;
    dbl.pending_count--;
    if (r->ep != NULL && r->kind != DOUBLE_CLOSE) r->ep->pending--;
    r->is_done = 1;
    r->status = status;
    if (r->kind == DOUBLE_SEND) {
        CHECK(double_sum(r->header, r->header_length) == r->header_sum);
        double_touch(r->buffer, r->length);
    }
    if (r->kind == DOUBLE_GET && status == UCS_OK) memset(r->buffer, 0x6e, r->length);
    if (r->kind == DOUBLE_RECEIVE) {
        double_land(r->message, r->buffer, r->length, status, r->user_data);
        double_message_free(r->message);
    }
    if (r->send_cb == NULL && r->receive_cb == NULL) { /* the code asks for its status */
        r->next = dbl.kept;
        r->at = &dbl.kept;
        if (r->next != NULL) r->next->at = &r->next;
        dbl.kept = r;
        return;
    }
    if (r->receive_cb != NULL)
        r->receive_cb(r, status, r->length, r->user_data);
    else
        r->send_cb(r, status, r->user_data);
    CHECK(r->is_freed);
    free(r);
}

/* Can this one end now? A close without force waits for what was sent before it. */
static inline int double_may_finish(const double_request *r) {
    return r->kind != DOUBLE_CLOSE || r->ep->is_forced || r->ep->pending == 0;
}

static inline void double_finish_one(uint64_t which, ucs_status_t status) {
    double_request *r = dbl.pending;
    if (r == NULL) return;
    for (which %= dbl.pending_count < 256 ? dbl.pending_count : 256; which--;) r = r->next;
    if (double_may_finish(r)) double_finish(r, status);
}

/* Ends everything that can end. */
static inline void double_finish_all(ucs_status_t status) {
    for (int is_more = 1; is_more;) {
        is_more = 0;
        for (double_request *r = dbl.pending; r != NULL; r = r->next)
            if (double_may_finish(r)) {
                double_finish(r, status);
                is_more = 1;
                break; /* the callback may have changed the list */
            }
    }
}

/* An active message arrives. header and payload are the double's from here on, n bytes of exactly that size each. */
static void double_deliver(unsigned id, uint8_t *header, size_t header_length, uint8_t *payload, size_t length,
                           int is_rendezvous, uint64_t tag) {
    const ucp_am_handler_param_t *h = &dbl.handlers[id & 31];
    ucp_am_recv_param_t param = {.recv_attr = is_rendezvous ? UCP_AM_RECV_ATTR_FLAG_RNDV : 0};
    ucs_status_t status = UCS_OK;
    if (h->cb == NULL || !dbl.is_open) {
        free(payload);
    } else if (!is_rendezvous) {
        status = h->cb(h->arg, header, header_length, payload, length, &param);
        CHECK(status == UCS_OK); /* eager bytes are not ours to keep */
        free(payload);
    } else {
        double_message *m = calloc(1, sizeof *m);
        CHECK(m != NULL);
        *m = (double_message){.next = dbl.messages, .descriptor = malloc(1), .bytes = payload, .length = length, .tag = tag};
        dbl.messages = m;
        void *descriptor = m->descriptor;
        uint64_t received = dbl.received;
        status = h->cb(h->arg, header, header_length, descriptor, length, &param);
        CHECK(status == UCS_OK || status == UCS_INPROGRESS);
        if (dbl.received != received) CHECK(status == UCS_INPROGRESS); /* a receive was started: UCX must not drop it */
        for (m = dbl.messages; m != NULL && m->descriptor != descriptor;) m = m->next;
        if (status == UCS_OK && m != NULL) double_message_free(m);
    }
    free(header);
}

static inline struct ucp_ep *double_ep(uint64_t which) {
    struct ucp_ep *ep = dbl.eps;
    for (which %= dbl.ep_count ? dbl.ep_count : 1; ep != NULL && which--;) ep = ep->next;
    return ep;
}

static inline void double_fail(struct ucp_ep *ep, ucs_status_t status) {
    if (ep == NULL || !ep->is_peer_mode || ep->is_closed || ep->is_failed) return;
    ep->is_failed = 1;
    ep->handler.cb(ep->handler.arg, ep, status);
}

/* A connect request arrives at the listener. */
static inline struct ucp_conn_request *double_connect(uint64_t client_id, int is_queryable) {
    if (dbl.listener == NULL || dbl.connecting_count == 64) return NULL;
    struct ucp_conn_request *c = calloc(1, sizeof *c);
    CHECK(c != NULL);
    *c = (struct ucp_conn_request){.client_id = client_id, .is_queryable = is_queryable};
    dbl.connecting[dbl.connecting_count++] = c;
    dbl.listener->handler.cb(c, dbl.listener->handler.arg);
    return c;
}

/* Before the first and after the last use: everything of ours is gone. */
static void double_reset(void) {
    CHECK(!dbl.is_open && dbl.pending == NULL && dbl.messages == NULL && dbl.listener == NULL);
    while (dbl.eps != NULL) {
        struct ucp_ep *ep = dbl.eps;
        dbl.eps = ep->next;
        free(ep);
    }
    while (dbl.kept != NULL) {
        double_request *r = dbl.kept;
        dbl.kept = r->next;
        free(r);
    }
    for (unsigned i = 0; i < dbl.connecting_count; i++) free(dbl.connecting[i]);
    memset(&dbl, 0, sizeof dbl);
}

/* ---- libucp ---- */

ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *out) {
    (void)context, (void)params;
    CHECK(!dbl.is_open);
    dbl.is_open = 1;
    *out = (ucp_worker_h)&dbl;
    return UCS_OK;
}

void ucp_worker_destroy(ucp_worker_h worker) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    while (dbl.pending != NULL) double_finish(dbl.pending, UCS_ERR_CANCELED);
    while (dbl.messages != NULL) double_message_free(dbl.messages);
    for (struct ucp_ep *ep = dbl.eps; ep != NULL; ep = ep->next) ep->is_closed = 1;
    dbl.is_open = 0;
}

unsigned ucp_worker_progress(ucp_worker_h worker) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    return double_progress();
}

ucs_status_t ucp_worker_arm(ucp_worker_h worker) {
    (void)worker;
    return double_is_idle() ? UCS_OK : UCS_ERR_BUSY;
}

ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd) {
    (void)worker;
    *fd = 1000;
    return UCS_OK;
}

ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t **address, size_t *length) {
    (void)worker;
    *address = calloc(1, *length = 24);
    return *address == NULL ? UCS_ERR_NO_MEMORY : UCS_OK;
}

void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t *address) {
    (void)worker;
    free(address);
}

ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t *param) {
    (void)worker;
    CHECK(param->id < 32);
    dbl.handlers[param->id] = *param;
    return UCS_OK;
}

ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *out) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    if (params->field_mask & UCP_EP_PARAM_FIELD_CONN_REQUEST) {
        CHECK(!params->conn_request->is_answered);
        params->conn_request->is_answered = 1; /* UCX uses it up in any case */
    }
    if (dbl.connect_fail_in != 0 && --dbl.connect_fail_in == 0) return UCS_ERR_UNREACHABLE;
    struct ucp_ep *ep = calloc(1, sizeof *ep);
    CHECK(ep != NULL);
    ep->handler = params->err_handler;
    ep->is_peer_mode = params->err_mode == UCP_ERR_HANDLING_MODE_PEER;
    ep->number = ++dbl.ep_count;
    ep->next = dbl.eps;
    dbl.eps = ep;
    *out = ep;
    return UCS_OK;
}

ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param) {
    CHECK(ep != NULL && !ep->is_closed);
    int is_forced = (param->flags & UCP_EP_CLOSE_FLAG_FORCE) != 0;
    if (is_forced && !ep->is_peer_mode) return double_error(UCS_ERR_INVALID_PARAM);
    ep->is_closed = 1;
    ep->is_forced = is_forced;
    if (double_fate() == 0 && ep->pending == 0) return NULL;
    return double_start(DOUBLE_CLOSE, ep, NULL);
}

ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h ep, unsigned id, const void *header, size_t header_length, const void *buffer,
                                 size_t count, const ucp_request_param_t *param) {
    CHECK(ep != NULL && !ep->is_closed && id < 32);
    const ucp_dt_iov_t *iov = param->op_attr_mask & UCP_OP_ATTR_FIELD_DATATYPE ? buffer : NULL;
    for (size_t i = 0; iov != NULL && i < count; i++) double_touch(iov[i].buffer, iov[i].length);
    if (iov == NULL) double_touch(buffer, count);
    double_on_send(ep, id, header, header_length, iov == NULL ? buffer : NULL, iov == NULL ? count : 0,
                   param->op_attr_mask & UCP_OP_ATTR_FIELD_FLAGS ? param->flags : 0, param->user_data);
    if (ep->is_failed) return double_error(UCS_ERR_CONNECTION_RESET);
    int fate = double_fate();
    if (fate == 0) return NULL;
    if (fate == 2) return double_error(double_errors[dbl.fate_state % 6]);
    double_request *r = double_start(DOUBLE_SEND, ep, param);
    r->header = header;
    r->header_length = header_length;
    r->header_sum = double_sum(header, header_length);
    r->buffer = iov == NULL ? (uint8_t *)(uintptr_t)buffer : NULL;
    r->length = iov == NULL ? count : 0;
    return r;
}

ucs_status_ptr_t ucp_am_recv_data_nbx(ucp_worker_h worker, void *descriptor, void *buffer, size_t count,
                                      const ucp_request_param_t *param) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    double_message *m = double_message_of(descriptor);
    CHECK(count >= m->length);
    dbl.received++;
    double_on_receive(m, buffer, m->length, param->user_data);
    int fate = double_fate();
    if (fate != 1) {
        ucs_status_t status = fate == 0 ? UCS_OK : double_errors[dbl.fate_state % 6];
        double_land(m, buffer, m->length, status, param->user_data);
        double_message_free(m);
        return double_error(status);
    }
    double_request *r = double_start(DOUBLE_RECEIVE, NULL, param);
    r->buffer = buffer;
    r->length = m->length;
    r->message = m;
    free(m->descriptor); /* used up */
    m->descriptor = NULL;
    return r;
}

void ucp_am_data_release(ucp_worker_h worker, void *data) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    double_message_free(double_message_of(data));
}

void ucp_request_free(void *request) {
    double_request *r = request;
    CHECK(r->is_done && !r->is_freed);
    r->is_freed = 1;
    if (r->send_cb != NULL || r->receive_cb != NULL) return; /* double_finish frees it after the callback */
    *r->at = r->next;
    if (r->next != NULL) r->next->at = r->at;
    free(r);
}

ucs_status_t ucp_request_check_status(void *request) {
    const double_request *r = request;
    return r->is_done ? r->status : UCS_INPROGRESS;
}

ucs_status_t ucp_conn_request_query(ucp_conn_request_h request, ucp_conn_request_attr_t *attr) {
    CHECK(!request->is_answered);
    if (!request->is_queryable) return UCS_ERR_IO_ERROR;
    attr->client_id = request->client_id;
    return UCS_OK;
}

ucs_status_t ucp_listener_reject(ucp_listener_h listener, ucp_conn_request_h request) {
    CHECK(listener != NULL && listener == dbl.listener && !request->is_answered);
    request->is_answered = 1;
    return UCS_OK;
}

ucs_status_t ucp_listener_create(ucp_worker_h worker, const ucp_listener_params_t *params, ucp_listener_h *out) {
    CHECK(worker == (ucp_worker_h)&dbl && dbl.is_open);
    if (dbl.listener != NULL) return UCS_ERR_BUSY;
    dbl.listener = calloc(1, sizeof *dbl.listener);
    CHECK(dbl.listener != NULL);
    dbl.listener->handler = params->conn_handler;
    *out = dbl.listener;
    return UCS_OK;
}

ucs_status_t ucp_listener_query(ucp_listener_h listener, ucp_listener_attr_t *attr) {
    CHECK(listener != NULL && listener == dbl.listener);
    attr->sockaddr.ss_family = AF_INET;
    return dbl.is_listen_refused ? UCS_ERR_IO_ERROR : UCS_OK;
}

void ucp_listener_destroy(ucp_listener_h listener) {
    CHECK(listener != NULL && listener == dbl.listener);
    free(listener);
    dbl.listener = NULL;
}

/* ---- what ucx.c calls beside: contexts, memory, remote keys; nothing of it depends on a peer ---- */

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) { *major = 1, *minor = 13, *release = 0; }
const char *ucs_status_string(ucs_status_t status) { return status == UCS_OK ? "OK" : "not OK"; }
ucs_status_t ucp_config_read(const char *prefix, const char *file, ucp_config_t **out) {
    (void)prefix, (void)file;
    *out = NULL;
    return UCS_OK;
}
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value) {
    (void)config, (void)value;
    return *name == '?' ? UCS_ERR_NO_ELEM : UCS_OK;
}
void ucp_config_release(ucp_config_t *config) { (void)config; }
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config,
                              ucp_context_h *out) {
    (void)major, (void)minor, (void)params, (void)config;
    *out = NULL;
    return UCS_OK;
}
void ucp_context_print_info(const ucp_context_h context, FILE *stream) { (void)context, (void)stream; }
void ucp_ep_print_info(ucp_ep_h ep, FILE *stream) { (void)ep, (void)stream; }
void ucp_cleanup(ucp_context_h context) { (void)context; }
ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *out) {
    (void)context;
    *out = (ucp_mem_h)params->address;
    return *out == NULL ? UCS_ERR_NO_MEMORY : UCS_OK;
}
ucs_status_t ucp_mem_query(ucp_mem_h memh, ucp_mem_attr_t *attr) {
    attr->address = memh;
    return UCS_OK;
}
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh) {
    (void)context, (void)memh;
    return UCS_OK;
}
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **out, size_t *length) {
    (void)context, (void)memh;
    *out = calloc(1, *length = 8);
    return *out == NULL ? UCS_ERR_NO_MEMORY : UCS_OK;
}
void ucp_rkey_buffer_release(void *packed) { free(packed); }
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *packed, ucp_rkey_h *out) {
    CHECK(ep != NULL && !ep->is_closed);
    *out = (ucp_rkey_h)(uintptr_t)packed;
    return UCS_OK;
}
void ucp_rkey_destroy(ucp_rkey_h rkey) { (void)rkey; }
ucs_status_t ucp_rkey_ptr(ucp_rkey_h rkey, uint64_t remote, void **out) {
    (void)rkey, (void)remote;
    *out = NULL;
    return UCS_ERR_UNREACHABLE;
}

static ucs_status_ptr_t double_transfer(ucp_ep_h ep, double_kind kind, void *local, size_t count,
                                        const ucp_request_param_t *param) {
    CHECK(ep != NULL && !ep->is_closed);
    if (ep->is_failed) return double_error(UCS_ERR_CONNECTION_RESET);
    double_touch(local, count);
    int fate = double_fate();
    if (fate == 2) return double_error(double_errors[dbl.fate_state % 6]);
    if (fate == 0) {
        if (kind == DOUBLE_GET) memset(local, 0x6e, count);
        return NULL;
    }
    double_request *r = double_start(kind, ep, param);
    r->buffer = local;
    r->length = count;
    return r;
}

ucs_status_ptr_t ucp_get_nbx(ucp_ep_h ep, void *local, size_t count, uint64_t remote, ucp_rkey_h rkey,
                             const ucp_request_param_t *param) {
    (void)remote, (void)rkey;
    return double_transfer(ep, DOUBLE_GET, local, count, param);
}

ucs_status_ptr_t ucp_put_nbx(ucp_ep_h ep, const void *local, size_t count, uint64_t remote, ucp_rkey_h rkey,
                             const ucp_request_param_t *param) {
    (void)remote, (void)rkey;
    return double_transfer(ep, DOUBLE_PUT, (void *)(uintptr_t)local, count, param);
}

ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param) {
    return double_transfer(ep, DOUBLE_FLUSH, NULL, 0, param);
}

#endif
