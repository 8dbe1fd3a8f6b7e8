/* ucx.c: context, worker, memory, remote keys, endpoints, listener, ring. See ucx.h for the rules. */
#include "ucx.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

/* ---- library and context ---- */

void kv_version(uint32_t out[3]) {
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    out[0] = major, out[1] = minor, out[2] = release;
}

const char *kv_status_text(int32_t status) {
    if (status == KV_ERR_FULL) return "too many operations in flight";
    if (status == KV_ERR_MEMORY) return "out of memory";
    return ucs_status_string((ucs_status_t)status);
}

/* Opens a context. settings: n name/value pairs without the UCX_ prefix; a setting this UCX does not know is skipped and
 * counted in *unknown. is_shared: workers of this context run in several threads. */
int32_t kv_context_open(const char *const *names, const char *const *values, size_t n, int is_shared,
                        ucp_context_h *out, uint32_t *unknown) {
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return status;
    *unknown = 0;
    for (size_t i = 0; i < n; i++)
        if (ucp_config_modify(config, names[i], values[i]) != UCS_OK) ++*unknown;
    ucp_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
    params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
    params.mt_workers_shared = is_shared;
    status = ucp_init_version(1, 13, &params, config, out);
    ucp_config_release(config);
    return status;
}

void kv_context_close(ucp_context_h context) { ucp_cleanup(context); }

/* What UCX prints of a context (its devices) or of an endpoint (its lanes): bytes written to text, cut at cap. There is no
 * call that answers it in UCX 1.13; lanes.py reads the text. */
static size_t kv_describe(ucp_context_h context, ucp_ep_h ep, char *text, size_t cap) {
    char *all = NULL;
    size_t length = 0;
    FILE *stream = open_memstream(&all, &length);
    if (stream == NULL) return 0;
    if (ep != NULL)
        ucp_ep_print_info(ep, stream);
    else
        ucp_context_print_info(context, stream);
    fclose(stream);
    if (length > cap) length = cap;
    memcpy(text, all, length);
    free(all);
    return length;
}

size_t kv_context_describe(ucp_context_h context, char *text, size_t cap) {
    return kv_describe(context, NULL, text, cap);
}

size_t kv_endpoint_describe(kv_endpoint *e, char *text, size_t cap) { return kv_describe(NULL, e->ep, text, cap); }

/* ---- worker ---- */

/* client_id: what a listener that this worker connects to is told of it. */
int32_t kv_worker_open(ucp_context_h context, uint32_t capacity, uint64_t client_id, kv_worker **out) {
    kv_worker *w = calloc(1, sizeof *w);
    if (w == NULL) return KV_ERR_MEMORY;
    w->context = context;
    w->capacity = capacity; /* a power of two */
    w->ring = calloc(capacity, sizeof *w->ring);
    if (w->ring == NULL) {
        free(w);
        return KV_ERR_MEMORY;
    }
    ucp_worker_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SINGLE;
    params.field_mask |= UCP_WORKER_PARAM_FIELD_CLIENT_ID;
    params.client_id = client_id;
    ucs_status_t status = ucp_worker_create(context, &params, &w->ucp);
    if (status != UCS_OK) {
        free(w->ring);
        free(w);
        return status;
    }
    *out = w;
    return 0;
}

void kv_held_free(kv_worker *w, kv_held *h) {
    if (h->is_rendezvous)
        ucp_am_data_release(w->ucp, h->data);
    else
        w->held_bytes -= h->length, free(h->data);
    free(h);
}

/* Destroys the worker; endpoints must be closed. Operations that never finished are freed with it. */
void kv_worker_close(kv_worker *w) {
    while (w->held != NULL) {
        kv_held *h = w->held;
        w->held = h->next;
        kv_held_free(w, h);
    }
    ucp_worker_destroy(w->ucp);
    while (w->free_ops != NULL) {
        kv_op *o = w->free_ops;
        w->free_ops = o->next;
        free(o);
    }
    while (w->endpoints != NULL) {
        kv_endpoint *e = w->endpoints;
        w->endpoints = e->next;
        free(e);
    }
    free(w->ring);
    free(w);
}

int32_t kv_worker_fd(kv_worker *w, int *fd) { return ucp_worker_get_efd(w->ucp, fd); }

/* 0: sleep on the descriptor now; -1 (UCS_ERR_BUSY is mapped to 1): progress again first. */
int32_t kv_worker_arm(kv_worker *w) {
    ucs_status_t status = ucp_worker_arm(w->ucp);
    return status == UCS_ERR_BUSY ? 1 : status;
}

/* Length of the worker's address, copied to buf when it fits into cap; negative status on failure. */
int64_t kv_worker_address(kv_worker *w, void *buf, size_t cap) {
    ucp_address_t *address;
    size_t length;
    ucs_status_t status = ucp_worker_get_address(w->ucp, &address, &length);
    if (status != UCS_OK) return status;
    if (length <= cap) memcpy(buf, address, length);
    ucp_worker_release_address(w->ucp, address);
    return (int64_t)length;
}

/* Progress until *done (done NULL: until there is a record), nothing moved for idle_ns, or bound_ns passed in all. One pass
 * at least. Whether anything moved. */
int kv_progress_until(kv_worker *w, const int *done, uint64_t idle_ns, uint64_t bound_ns) {
    uint64_t begin = 0, last = 0;
    int has_moved = 0;
    for (unsigned round = 1;; round++) {
        int moves = ucp_worker_progress(w->ucp) != 0;
        has_moved |= moves;
        if (done != NULL ? *done : w->head != w->tail) return has_moved;
        if (!moves && idle_ns == 0) return has_moved;
        if (!moves && round % 8 != 0) continue;
        uint64_t now = kv_now_ns();
        if (begin == 0) begin = last = now;
        if (moves) last = now;
        if (now - last >= idle_ns || now - begin >= bound_ns) return has_moved;
        if (!moves) kv_relax();
    }
}

/* Progress as above, then the number of records waiting. *has_moved: anything but records counts too. */
uint32_t kv_progress(kv_worker *w, uint64_t idle_ns, uint64_t bound_ns, int *has_moved) {
    *has_moved = kv_progress_until(w, NULL, idle_ns, bound_ns);
    return w->head - w->tail;
}

kv_record *kv_ring(kv_worker *w) { return w->ring; }
uint32_t kv_ring_capacity(const kv_worker *w) { return w->capacity; }
uint64_t kv_ring_tail(const kv_worker *w) { return w->tail; }
uint32_t kv_ring_count(const kv_worker *w) { return w->head - w->tail; }
void kv_ring_release(kv_worker *w, uint32_t count) { w->tail += count; }
uint64_t kv_inflight(const kv_worker *w) { return w->inflight; }
uint64_t kv_dropped(const kv_worker *w) { return w->dropped; }
int32_t kv_last_status(const kv_worker *w) { return w->last_status; }
uint64_t kv_last_length(const kv_worker *w) { return w->last_length; }

/* ---- memory ---- */

/* Registers length bytes at addr, or allocates them when addr is 0. */
int32_t kv_memory_map(ucp_context_h context, uint64_t addr, uint64_t length, ucp_mem_h *out, uint64_t *base) {
    ucp_mem_map_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.length = length;
    if (addr != 0) {
        params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
        params.address = (void *)(uintptr_t)addr;
    } else {
        params.flags = UCP_MEM_MAP_ALLOCATE;
    }
    ucs_status_t status = ucp_mem_map(context, &params, out);
    if (status != UCS_OK) return status;
    ucp_mem_attr_t attr;
    memset(&attr, 0, sizeof attr);
    attr.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
    status = ucp_mem_query(*out, &attr);
    if (status != UCS_OK) {
        ucp_mem_unmap(context, *out);
        return status;
    }
    *base = (uint64_t)(uintptr_t)attr.address;
    return 0;
}

int32_t kv_memory_unmap(ucp_context_h context, ucp_mem_h memh) { return ucp_mem_unmap(context, memh); }

int64_t kv_rkey_pack(ucp_context_h context, ucp_mem_h memh, void *buf, size_t cap) {
    void *packed;
    size_t length;
    ucs_status_t status = ucp_rkey_pack(context, memh, &packed, &length);
    if (status != UCS_OK) return status;
    if (length <= cap) memcpy(buf, packed, length);
    ucp_rkey_buffer_release(packed);
    return (int64_t)length;
}

int32_t kv_rkey_unpack(kv_endpoint *e, const void *packed, ucp_rkey_h *out) {
    return ucp_ep_rkey_unpack(e->ep, packed, out);
}

void kv_rkey_destroy(ucp_rkey_h rkey) { ucp_rkey_destroy(rkey); }

int32_t kv_rkey_pointer(ucp_rkey_h rkey, uint64_t remote, uint64_t *local) {
    void *p = NULL;
    ucs_status_t status = ucp_rkey_ptr(rkey, remote, &p);
    *local = (uint64_t)(uintptr_t)p;
    return status;
}

/* ---- endpoints ---- */

static void kv_on_ep_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    kv_endpoint *e = arg;
    (void)ep;
    if (e->is_failed || e->is_closed) return;
    e->is_failed = 1;
    e->worker->reserved--; /* its own record */
    kv_push(e->worker, KV_EP_ERROR, 0, status, 0)->ep = (uint64_t)(uintptr_t)e;
}

static int32_t kv_endpoint_make(kv_worker *w, ucp_ep_params_t *params, int error_mode, kv_endpoint **out) {
    if (!kv_ring_room(w)) return KV_ERR_FULL;
    kv_endpoint *e = calloc(1, sizeof *e);
    if (e == NULL) return KV_ERR_MEMORY;
    e->worker = w;
    e->error_mode = error_mode;
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params->err_mode = error_mode ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    params->err_handler.cb = kv_on_ep_error;
    params->err_handler.arg = e;
    w->reserved++;
    ucs_status_t status = ucp_ep_create(w->ucp, params, &e->ep);
    if (status != UCS_OK) {
        w->reserved--;
        free(e);
        return status;
    }
    e->next = w->endpoints;
    w->endpoints = e;
    *out = e;
    return 0;
}

int32_t kv_endpoint_from_address(kv_worker *w, const void *address, int error_mode, kv_endpoint **out) {
    ucp_ep_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = address;
    return kv_endpoint_make(w, &params, error_mode, out);
}

/* sockaddr: what inet_pton gave, family 4 or 6. */
static int32_t kv_sockaddr(const char *host, uint16_t port, struct sockaddr_storage *out, socklen_t *length) {
    memset(out, 0, sizeof *out);
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET, v4->sin_port = htons(port), *length = sizeof *v4;
        return 0;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6, v6->sin6_port = htons(port), *length = sizeof *v6;
        return 0;
    }
    return UCS_ERR_INVALID_PARAM;
}

int32_t kv_endpoint_from_socket(kv_worker *w, const char *host, uint16_t port, int error_mode, kv_endpoint **out) {
    struct sockaddr_storage address;
    socklen_t length;
    int32_t status = kv_sockaddr(host, port, &address, &length);
    if (status != 0) return status;
    ucp_ep_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER | UCP_EP_PARAMS_FLAGS_SEND_CLIENT_ID;
    params.sockaddr.addr = (const struct sockaddr *)&address;
    params.sockaddr.addrlen = length;
    return kv_endpoint_make(w, &params, error_mode, out);
}

int32_t kv_endpoint_from_request(kv_worker *w, uint64_t request, int error_mode, kv_endpoint **out) {
    ucp_ep_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = (ucp_conn_request_h)(uintptr_t)request;
    return kv_endpoint_make(w, &params, error_mode, out);
}

/* Lets bulk data to the peer of `first` go over `other` too; closed before `first`. 0, or KV_ERR_FULL. */
int32_t kv_endpoint_join(kv_endpoint *first, kv_endpoint *other) {
    if (first->others_count >= KV_MAX_CONNECTIONS - 1) return KV_ERR_FULL;
    first->others[first->others_count++] = other;
    return 0;
}

/* Starts closing: 0 closed, 1 pending (ask kv_endpoint_is_closed after progress), negative: it could not be started. In
 * PEER mode `force` ends every operation with CANCELED; UCX refuses force in NONE mode (INVALID_PARAM). */
int32_t kv_endpoint_close(kv_endpoint *e, int force) {
    if (e->is_closed || e->close_request != NULL) return e->is_closed ? 0 : 1;
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0;
    ucs_status_ptr_t p = ucp_ep_close_nbx(e->ep, &param);
    if (UCS_PTR_IS_ERR(p) && kv_status_of(p) == UCS_ERR_INVALID_PARAM) return UCS_ERR_INVALID_PARAM;
    if (!e->is_failed) e->worker->reserved--;
    if (UCS_PTR_IS_PTR(p)) {
        e->close_request = p;
        e->is_failed = 1; /* no error record from now on */
        return 1;
    }
    e->is_closed = 1;
    return 0;
}

int kv_endpoint_is_closed(kv_endpoint *e) {
    if (!e->is_closed && e->close_request != NULL &&
        ucp_request_check_status(e->close_request) != UCS_INPROGRESS) {
        ucp_request_free(e->close_request);
        e->close_request = NULL;
        e->is_closed = 1;
    }
    return e->is_closed;
}

/* Forgets a closed endpoint; the pointer is dead afterwards. */
void kv_endpoint_free(kv_endpoint *e) {
    for (kv_endpoint **at = &e->worker->endpoints; *at != NULL; at = &(*at)->next)
        if (*at == e) {
            *at = e->next;
            free(e);
            return;
        }
}

/* ---- listener ---- */

static void kv_on_connect(ucp_conn_request_h request, void *arg) {
    kv_worker *w = arg;
    if (!kv_ring_room(w)) {
        w->dropped++;
        return; /* never accepted: the peer's connect fails at its deadline */
    }
    kv_push(w, KV_CONNECT, 0, 0, 0)->aux = (uint64_t)(uintptr_t)request;
}

/* A listener on a worker; the handler is called from that worker's progress. */
int32_t kv_listener_make(ucp_worker_h worker, const char *host, uint16_t port, ucp_listener_conn_callback_t handler,
                         void *arg, ucp_listener_h *out, uint16_t *bound) {
    struct sockaddr_storage address;
    socklen_t length;
    int32_t status = kv_sockaddr(host, port, &address, &length);
    if (status != 0) return status;
    ucp_listener_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = (const struct sockaddr *)&address;
    params.sockaddr.addrlen = length;
    params.conn_handler.cb = handler;
    params.conn_handler.arg = arg;
    status = ucp_listener_create(worker, &params, out);
    if (status != 0) return status;
    ucp_listener_attr_t attr;
    memset(&attr, 0, sizeof attr);
    attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    status = ucp_listener_query(*out, &attr);
    if (status != 0) {
        ucp_listener_destroy(*out);
        *out = NULL;
        return status;
    }
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&attr.sockaddr;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&attr.sockaddr;
    *bound = ntohs(attr.sockaddr.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
    return 0;
}

int32_t kv_listen(kv_worker *w, const char *host, uint16_t port, ucp_listener_h *out, uint16_t *bound) {
    return kv_listener_make(w->ucp, host, port, kv_on_connect, w, out, bound);
}

int32_t kv_connect_reject(ucp_listener_h listener, uint64_t request) {
    return ucp_listener_reject(listener, (ucp_conn_request_h)(uintptr_t)request);
}

void kv_listener_close(ucp_listener_h listener) { ucp_listener_destroy(listener); }
