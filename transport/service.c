/* service.c: the data thread, its commands, sessions, grants and regions. See service.h for the rules. */
#include "service.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- results to the node ---- */

static void kv_wake(int fd) {
    uint64_t one = 1;
    ssize_t written = write(fd, &one, sizeof one);
    (void)written; /* full counter: the reader is awake anyway */
}

static void kv_clear(int fd) {
    uint64_t value;
    ssize_t got = read(fd, &value, sizeof value);
    (void)got;
}

static void kv_deliver(kv_service *s, uint64_t ticket, uint64_t token, int32_t status) {
    kv_result *r = malloc(sizeof *r);
    if (r == NULL) return; /* the asker's deadline ends it */
    r->next = NULL;
    r->ticket = ticket;
    r->token = token;
    r->status = status;
    pthread_mutex_lock(&s->mutex);
    *s->results_end = r;
    s->results_end = &r->next;
    pthread_mutex_unlock(&s->mutex);
    kv_wake(s->result_fd);
}

/* ---- sessions (data thread) ---- */

kv_session *kv_session_find(kv_service *s, uint64_t token) {
    kv_session *session = s->sessions[kv_bucket(token, 0)];
    while (session != NULL && session->token != token) session = session->next;
    return session;
}

static void kv_on_session_error(void *arg, ucp_ep_h ep, ucs_status_t status) {
    kv_session *session = arg;
    (void)ep;
    if (session->is_lost) return;
    session->is_lost = 1;
    if (!session->is_closing) kv_deliver(session->service, 0, session->token, status);
}

/* The endpoint of a session, in its error mode, from what `params` says of the peer. */
ucs_status_t kv_session_connect(kv_session *session, ucp_ep_params_t *params, ucp_ep_h *out) {
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params->err_mode = session->is_peer_mode ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    params->err_handler.cb = kv_on_session_error;
    params->err_handler.arg = session;
    return ucp_ep_create(session->service->worker, params, out);
}

static void kv_session_close(kv_service *s, kv_session *session, uint64_t ticket);

static int32_t kv_session_open(kv_service *s, const kv_command *c) {
    if (s->sessions_count >= KV_MAX_SESSIONS || atomic_load(&s->counters.closing) >= KV_MAX_SESSIONS) return KV_ERR_FULL;
    if (kv_session_find(s, c->token) != NULL) return UCS_ERR_ALREADY_EXISTS;
    kv_session *session = calloc(1, sizeof *session);
    if (session == NULL) return KV_ERR_MEMORY;
    session->service = s;
    session->token = c->token;
    session->is_peer_mode = c->is_peer_mode;
    session->is_eager_only = c->is_eager_only;
    session->parked_end = &session->parked;
    ucs_status_t status = UCS_OK;
    if (c->kind == KV_AWAIT_SESSION) {
        if (c->address_length != sizeof session->client_id) status = UCS_ERR_INVALID_PARAM;
        else memcpy(&session->client_id, c->address, sizeof session->client_id);
    } else {
        ucp_ep_params_t params;
        memset(&params, 0, sizeof params);
        params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
        params.address = (const ucp_address_t *)c->address;
        status = kv_session_connect(session, &params, &session->ep);
        for (int i = 1; status == UCS_OK && i < c->connections && i < KV_MAX_CONNECTIONS; i++) {
            status = kv_session_connect(session, &params, &session->others[session->others_count]);
            session->others_count += status == UCS_OK;
        }
    }
    if (status != UCS_OK && session->ep == NULL) {
        free(session);
        return status;
    }
    kv_session **bucket = &s->sessions[kv_bucket(c->token, 0)];
    session->next = *bucket;
    *bucket = session;
    s->sessions_count++;
    kv_count(&s->counters.sessions, 1);
    if (c->kind == KV_AWAIT_SESSION) kv_accept_only(s, session);
    if (status != UCS_OK) kv_session_close(s, session, 0);
    return status;
}

static void kv_session_unlink(kv_service *s, kv_session *session) {
    kv_session **at = &s->sessions[kv_bucket(session->token, 0)];
    while (*at != session) at = &(*at)->next;
    *at = session->next;
    for (at = &s->waiting; *at != NULL; at = &(*at)->waiting)
        if (*at == session) {
            *at = session->waiting;
            break;
        }
    session->is_waiting = 0;
}

/* From here on the token is unknown and its grants are gone; what is in flight is ended or waited for by kv_reap. */
static void kv_session_close(kv_service *s, kv_session *session, uint64_t ticket) {
    kv_session_unlink(s, session);
    session->is_closing = 1;
    while (session->parked != NULL) {
        kv_parked *p = session->parked;
        session->parked = p->next;
        free(p);
    }
    pthread_mutex_lock(&s->grants_mutex);
    for (uint32_t b = 0; b < KV_BUCKETS; b++)
        for (kv_grant **at = &s->grants[b]; *at != NULL;) {
            kv_grant *g = *at;
            if (g->token == session->token && g->busy == 0) {
                *at = g->next;
                free(g);
                s->grants_count--;
                continue;
            }
            if (g->token == session->token) g->is_revoked = 1;
            at = &g->next;
        }
    pthread_mutex_unlock(&s->grants_mutex);
    ucp_request_param_t param;
    memset(&param, 0, sizeof param);
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = session->is_peer_mode ? UCP_EP_CLOSE_FLAG_FORCE : 0; /* NONE mode knows no force */
    for (uint32_t i = 0; i <= session->others_count && session->ep != NULL; i++) {
        ucs_status_ptr_t p = ucp_ep_close_nbx(i == 0 ? session->ep : session->others[i - 1], &param);
        session->close_requests[i] = UCS_PTR_IS_PTR(p) ? p : NULL;
    }
    session->close_ticket = ticket;
    session->close_until_ns = kv_now_ns() + KV_CLOSE_BOUND_NS;
    session->next = s->closing;
    s->closing = session;
    s->sessions_count--;
    atomic_fetch_sub_explicit(&s->counters.sessions, 1, memory_order_relaxed);
    kv_count(&s->counters.closing, 1);
}

static int kv_session_is_closed(kv_session *session) {
    int is_closed = 1;
    for (uint32_t i = 0; i <= session->others_count; i++) {
        void *request = session->close_requests[i];
        if (request == NULL) continue;
        if (ucp_request_check_status(request) == UCS_INPROGRESS) {
            is_closed = 0;
            continue;
        }
        ucp_request_free(request);
        session->close_requests[i] = NULL;
    }
    return is_closed;
}

/* Delivers the results of sessions whose receives are over, frees those of which nothing is in flight any more. In NONE
 * mode a dead peer's sends may never end: such a session stays, a few hundred bytes, until the service does. */
static void kv_reap(kv_service *s) {
    uint64_t now = kv_now_ns();
    s->is_closing_soon = 0;
    for (kv_session **at = &s->closing; *at != NULL;) {
        kv_session *session = *at;
        if (session->close_ticket != 0) {
            int is_late = session->receives != 0 && now > session->close_until_ns;
            if (session->receives == 0 || is_late) {
                kv_deliver(s, session->close_ticket, session->token, is_late ? KV_STILL_WRITING : KV_CLOSED_CLEAN);
                session->close_ticket = 0; /* a late one is looked at each time the thread wakes */
            }
        }
        if (session->close_ticket == 0 && kv_session_is_closed(session) && session->sends == 0 && session->receives == 0) {
            *at = session->next;
            free(session);
            atomic_fetch_sub_explicit(&s->counters.closing, 1, memory_order_relaxed);
            continue;
        }
        if (now < session->close_until_ns) s->is_closing_soon = 1;
        at = &session->next;
    }
}

/* ---- the thread ---- */

static int kv_commands_run(kv_service *s) {
    pthread_mutex_lock(&s->mutex);
    kv_command *c = s->commands;
    s->commands = NULL;
    s->commands_end = &s->commands;
    pthread_mutex_unlock(&s->mutex);
    int count = 0;
    while (c != NULL) {
        kv_command *next = c->next;
        if (c->kind == KV_LISTEN) {
            kv_deliver(s, c->ticket, c->token, kv_accept_start(s, (const char *)c->address, (uint16_t)c->token));
        } else if (c->kind != KV_CLOSE_SESSION) {
            kv_deliver(s, c->ticket, c->token, kv_session_open(s, c));
        } else {
            kv_session *session = kv_session_find(s, c->token);
            if (session == NULL)
                kv_deliver(s, c->ticket, c->token, KV_UNKNOWN_SESSION);
            else
                kv_session_close(s, session, c->ticket);
        }
        free(c);
        c = next;
        count++;
    }
    return count;
}

static int32_t kv_service_start(kv_service *s) {
    ucp_worker_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SINGLE;
    ucs_status_t status = ucp_worker_create(s->context, &params, &s->worker);
    if (status != UCS_OK) return status;
    status = ucp_worker_get_efd(s->worker, &s->worker_fd);
    ucp_address_t *address = NULL;
    if (status == UCS_OK) status = ucp_worker_get_address(s->worker, &address, &s->address_length);
    if (status == UCS_OK && (s->address = malloc(s->address_length)) == NULL) status = UCS_ERR_NO_MEMORY;
    if (status == UCS_OK) memcpy(s->address, address, s->address_length);
    if (address != NULL) ucp_worker_release_address(s->worker, address);
    if (status == UCS_OK) status = kv_serve_install(s);
    if (status != UCS_OK) ucp_worker_destroy(s->worker);
    return status;
}

static void kv_service_finish(kv_service *s) {
    kv_accept_stop(s);
    for (uint32_t b = 0; b < KV_BUCKETS; b++)
        while (s->sessions[b] != NULL) kv_session_close(s, s->sessions[b], 0);
    uint64_t until = kv_now_ns() + 500000000u;
    while (s->closing != NULL && kv_now_ns() < until) {
        ucp_worker_progress(s->worker);
        kv_reap(s);
    }
    ucp_worker_destroy(s->worker); /* what is still in flight ends here, before its sessions are freed */
    while (s->closing != NULL) {
        kv_session *session = s->closing;
        s->closing = session->next;
        free(session);
    }
    while (s->free_sends != NULL) {
        kv_send *send = s->free_sends;
        s->free_sends = send->next;
        free(send);
    }
}

static void kv_service_sleep(kv_service *s) {
    if (ucp_worker_arm(s->worker) != UCS_OK) return; /* busy: something arrived */
    struct pollfd fds[2] = {{.fd = s->worker_fd, .events = POLLIN}, {.fd = s->command_fd, .events = POLLIN}};
    poll(fds, 2, s->closing != NULL && s->is_closing_soon ? 2 : 1000); /* bounded: wake-ups get lost */
    if (fds[1].revents) kv_clear(s->command_fd);
}

static void *kv_service_main(void *arg) {
    kv_service *s = arg;
    int32_t status = kv_service_start(s);
    pthread_mutex_lock(&s->mutex);
    s->state = status == 0 ? 1 : status;
    pthread_cond_signal(&s->started);
    pthread_mutex_unlock(&s->mutex);
    if (status != 0) return NULL;
    uint64_t last = kv_now_ns();
    for (unsigned round = 0; !atomic_load_explicit(&s->is_stopping, memory_order_acquire); round++) {
        unsigned moved = 0;
        while (moved < 64 && ucp_worker_progress(s->worker)) moved++;
        if (s->waiting != NULL) kv_serve_waiting(s);
        if (s->closing != NULL) kv_reap(s);
        if (moved != 0) {
            last = kv_now_ns();
            if (round % 64 == 0) kv_commands_run(s);
            continue;
        }
        if (round % 8 != 0) continue;
        if (kv_commands_run(s) != 0) {
            last = kv_now_ns();
        } else if (kv_now_ns() - last >= s->spin_ns) {
            kv_count(&s->counters.turns, 1);
            kv_service_sleep(s);
            kv_commands_run(s);
            last = kv_now_ns() - s->spin_ns; /* spin again only after an event */
        } else {
            kv_relax();
        }
    }
    kv_service_finish(s);
    return NULL;
}

/* ---- called by the node ---- */

/* Starts the thread. resolve: a kv_resolve_fn; it and its context outlive the service. */
int32_t kv_service_open(ucp_context_h context, uint64_t resolve, uint64_t resolve_ctx, uint64_t spin_ns,
                        kv_service **out) {
    kv_service *s = calloc(1, sizeof *s);
    if (s == NULL) return KV_ERR_MEMORY;
    s->context = context;
    s->resolve = (kv_resolve_fn)(uintptr_t)resolve;
    s->resolve_ctx = (void *)(uintptr_t)resolve_ctx;
    s->spin_ns = spin_ns;
    s->commands_end = &s->commands;
    s->results_end = &s->results;
    s->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->result_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&s->mutex, NULL);
    pthread_mutex_init(&s->grants_mutex, NULL);
    pthread_cond_init(&s->started, NULL);
    int32_t status = KV_ERR_MEMORY;
    if (s->command_fd >= 0 && s->result_fd >= 0 && pthread_create(&s->thread, NULL, kv_service_main, s) == 0) {
        pthread_mutex_lock(&s->mutex);
        while (s->state == 0) pthread_cond_wait(&s->started, &s->mutex);
        status = s->state < 0 ? s->state : 0;
        pthread_mutex_unlock(&s->mutex);
        if (status == 0) {
            *out = s;
            return 0;
        }
        pthread_join(s->thread, NULL);
    }
    if (s->command_fd >= 0) close(s->command_fd);
    if (s->result_fd >= 0) close(s->result_fd);
    free(s->address);
    free(s);
    return status;
}

/* Ends every session and the thread, then frees all of it. */
void kv_service_close(kv_service *s) {
    atomic_store_explicit(&s->is_stopping, 1, memory_order_release);
    kv_wake(s->command_fd);
    pthread_join(s->thread, NULL);
    while (s->commands != NULL) {
        kv_command *c = s->commands;
        s->commands = c->next;
        free(c);
    }
    while (s->results != NULL) {
        kv_result *r = s->results;
        s->results = r->next;
        free(r);
    }
    for (uint32_t b = 0; b < KV_BUCKETS; b++)
        while (s->grants[b] != NULL) {
            kv_grant *g = s->grants[b];
            s->grants[b] = g->next;
            free(g);
        }
    close(s->command_fd);
    close(s->result_fd);
    pthread_mutex_destroy(&s->mutex);
    pthread_mutex_destroy(&s->grants_mutex);
    pthread_cond_destroy(&s->started);
    free(s->address);
    free(s);
}

int kv_service_result_fd(kv_service *s) { return s->result_fd; }

size_t kv_service_address(kv_service *s, void *buf, size_t cap) {
    if (s->address_length <= cap) memcpy(buf, s->address, s->address_length);
    return s->address_length;
}

/* Lends a region. An index is set once, or again with size 0 to withdraw it (messages in flight may still read it). */
int32_t kv_service_lend(kv_service *s, uint32_t index, uint64_t base, uint64_t size, ucp_mem_h memh) {
    if (index >= KV_MAX_REGIONS) return UCS_ERR_OUT_OF_RANGE;
    kv_lent *r = &s->regions[index];
    if (size != 0 && atomic_load(&r->size) != 0) return UCS_ERR_ALREADY_EXISTS;
    if (size != 0) {
        atomic_store_explicit(&r->base, base, memory_order_relaxed);
        atomic_store_explicit(&r->memh, memh, memory_order_relaxed);
    }
    atomic_store_explicit(&r->size, size, memory_order_release);
    return 0;
}

/* Posts an open (address given) or close command; its result carries the ticket. is_eager_only: WRITEs of this session are
 * never received in place by rendezvous, so that nothing of it can land after its end (needed over TCP, see wire.h).
 * connections: to the client's worker, 1 to KV_MAX_CONNECTIONS; it makes as many to ours. */
int32_t kv_service_command(kv_service *s, int kind, uint64_t ticket, uint64_t token, const void *address, size_t length,
                           int is_peer_mode, int is_eager_only, int connections) {
    kv_command *c = malloc(sizeof *c + length);
    if (c == NULL) return KV_ERR_MEMORY;
    c->next = NULL;
    c->kind = kind;
    c->ticket = ticket;
    c->token = token;
    c->is_peer_mode = is_peer_mode;
    c->is_eager_only = is_eager_only;
    c->connections = connections;
    c->address_length = length;
    if (length) memcpy(c->address, address, length);
    pthread_mutex_lock(&s->mutex);
    *s->commands_end = c;
    s->commands_end = &c->next;
    pthread_mutex_unlock(&s->mutex);
    kv_wake(s->command_fd);
    return 0;
}

/* Up to max results into the arrays; their number. */
size_t kv_service_results(kv_service *s, size_t max, uint64_t *tickets, uint64_t *tokens, int32_t *statuses) {
    kv_clear(s->result_fd);
    size_t n = 0;
    pthread_mutex_lock(&s->mutex);
    while (n < max && s->results != NULL) {
        kv_result *r = s->results;
        s->results = r->next;
        if (s->results == NULL) s->results_end = &s->results;
        tickets[n] = r->ticket;
        tokens[n] = r->token;
        statuses[n++] = r->status;
        free(r);
    }
    int is_more = s->results != NULL;
    pthread_mutex_unlock(&s->mutex);
    if (is_more) kv_wake(s->result_fd);
    return n;
}

/* ---- grants (any thread) ---- */

static kv_grant **kv_grant_at(kv_service *s, uint16_t region, uint64_t offset) {
    kv_grant **at = &s->grants[kv_bucket(offset, region + 1u)];
    while (*at != NULL && !((*at)->offset == offset && (*at)->region == region)) at = &(*at)->next;
    return at;
}

/* Grants n extents to a session; out[i]: OK, TAKEN (granted already, or still being written), UNKNOWN (outside a region). */
void kv_service_grant(kv_service *s, uint64_t token, size_t n, const uint16_t *region, const uint64_t *offset,
                      const uint64_t *capacity, uint8_t *out) {
    pthread_mutex_lock(&s->grants_mutex);
    for (size_t i = 0; i < n; i++) {
        uint64_t size = region[i] < KV_MAX_REGIONS ? atomic_load(&s->regions[region[i]].size) : 0;
        if (capacity[i] == 0 || !kv_in_region(offset[i], capacity[i], size)) {
            out[i] = KV_GRANT_UNKNOWN;
            continue;
        }
        kv_grant **at = kv_grant_at(s, region[i], offset[i]);
        kv_grant *g = *at == NULL ? calloc(1, sizeof *g) : NULL;
        if (g == NULL) {
            out[i] = KV_GRANT_TAKEN;
            continue;
        }
        g->token = token;
        g->offset = offset[i];
        g->capacity = capacity[i];
        g->region = region[i];
        *at = g;
        s->grants_count++;
        out[i] = KV_GRANT_OK;
    }
    pthread_mutex_unlock(&s->grants_mutex);
}

/* Revokes n extents of a session; out[i]: OK (nobody writes it through messages any more), BUSY (a write is in flight; no
 * further one starts; ask again), UNKNOWN. */
void kv_service_revoke(kv_service *s, uint64_t token, size_t n, const uint16_t *region, const uint64_t *offset,
                       uint8_t *out) {
    pthread_mutex_lock(&s->grants_mutex);
    for (size_t i = 0; i < n; i++) {
        kv_grant **at = kv_grant_at(s, region[i], offset[i]);
        kv_grant *g = *at;
        if (g == NULL || g->token != token) {
            out[i] = KV_GRANT_UNKNOWN;
        } else if (g->busy != 0) {
            g->is_revoked = 1;
            out[i] = KV_GRANT_BUSY;
        } else {
            *at = g->next;
            free(g);
            s->grants_count--;
            out[i] = KV_GRANT_OK;
        }
    }
    pthread_mutex_unlock(&s->grants_mutex);
}

/* Data thread: the live grant that covers this write, held busy, or NULL. */
kv_grant *kv_grant_hold(kv_service *s, const kv_write *w, size_t length) {
    pthread_mutex_lock(&s->grants_mutex);
    kv_grant *g = *kv_grant_at(s, w->region, w->offset);
    if (g != NULL && g->token == w->session && !g->is_revoked && kv_write_fits(w, length, g->capacity))
        g->busy++;
    else
        g = NULL;
    pthread_mutex_unlock(&s->grants_mutex);
    return g;
}

/* Data thread: one write into it is over. A revoked grant's record stays until `revoke` or the close sees it idle. */
void kv_grant_release(kv_service *s, uint16_t region, uint64_t offset, uint64_t token) {
    pthread_mutex_lock(&s->grants_mutex);
    kv_grant **at = kv_grant_at(s, region, offset);
    kv_grant *g = *at;
    if (g != NULL && --g->busy == 0 && g->is_revoked && kv_session_find(s, token) == NULL) {
        *at = g->next; /* its session is closing: nobody will ask again */
        free(g);
        s->grants_count--;
    }
    pthread_mutex_unlock(&s->grants_mutex);
}

/* lookups, lookup keys, reads, read keys, hits, bytes read, writes, bytes written, refused, unknown session, malformed,
 * dropped, sessions now, sleeps, grants now, sessions that are closing now. */
void kv_service_counters(kv_service *s, uint64_t out[16]) {
    const _Atomic uint64_t *c = &s->counters.lookups;
    for (int i = 0; i < 14; i++) out[i] = atomic_load_explicit(&c[i], memory_order_relaxed);
    pthread_mutex_lock(&s->grants_mutex);
    out[14] = s->grants_count;
    pthread_mutex_unlock(&s->grants_mutex);
    out[15] = atomic_load_explicit(&s->counters.closing, memory_order_relaxed);
}
