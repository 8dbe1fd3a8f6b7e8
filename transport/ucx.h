/*
 * ucx.h: the thin binding on libucp. One worker belongs to one thread; nothing here calls back into Python.
 *
 * Completions go into a ring of fixed records that the caller drains. The ring cannot overflow: every operation and every
 * endpoint reserves its record before it starts (KV_ERR_FULL otherwise), and what the peer sends unasked is dropped and
 * counted when no unreserved record is left.
 *
 * Every submitting call returns 0 (finished, no record follows), 1 (pending: exactly one record with its id follows) or a
 * negative status (not started, no record follows). Buffers and memory handles belong to UCX until then.
 *
 * Only symbols and fields of UCX 1.13 are used.
 */
#ifndef KV_UCX_H
#define KV_UCX_H

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

typedef struct {
    uint64_t addr, len;
} kv_iov; /* a piece of the caller's memory */

#define KV_ERR_FULL (-1000)   /* ring or table full: drain completions first */
#define KV_ERR_MEMORY (-1001) /* malloc failed */

#define KV_MAX_HEADER 84  /* largest active message header carried; fits UCX's one-packet form */
#define KV_MAX_CONNECTIONS 8
#define KV_MAX_AM_IDS 16  /* application message ids 0..15; the data service uses ids from 16 on */
#define KV_HELD_MAX (64u << 20) /* bytes of unasked eager payload held for the application */

enum kv_kind {
    KV_DONE = 1,     /* an operation finished: id, status, length */
    KV_MESSAGE = 2,  /* active message: aux = token, id = message id, length, header; eager payload is held already */
    KV_CONNECT = 3,  /* a listener got a connection request: aux = request, id = listener */
    KV_EP_ERROR = 4, /* an endpoint failed: ep, status */
    KV_QUIET = 5,    /* a cancelled data request touches its buffers no more: id */
};

/* One completion, 128 bytes. */
typedef struct {
    uint64_t id;
    int32_t status;
    uint16_t kind, header_length;
    uint64_t length, aux, ep;
    uint8_t header[88];
} kv_record;

typedef struct kv_worker kv_worker;

typedef struct kv_op {
    kv_worker *worker;
    struct kv_op *next; /* free list */
    uint64_t id, length;
    uint32_t left;
    int32_t status;
    int *waited; /* inline wait: set to 1 when done, instead of a record */
    void *owned; /* freed with the operation */
    uint8_t header[KV_MAX_HEADER + 4];
} kv_op;

typedef struct kv_held { /* an unasked active message whose payload the application has not taken yet */
    struct kv_held *next;
    void *data; /* eager: own copy; rendezvous: UCX's descriptor */
    uint64_t length, token;
    int is_rendezvous;
} kv_held;

typedef struct kv_endpoint {
    kv_worker *worker;
    ucp_ep_h ep;
    struct kv_endpoint *next;
    void *close_request;
    int is_failed, is_closed, error_mode;
    struct kv_endpoint *others[KV_MAX_CONNECTIONS - 1]; /* further connections to the same peer, see kv_endpoint_join */
    uint32_t others_count;
} kv_endpoint;

typedef struct { /* argument of an application message handler */
    kv_worker *worker;
    uint32_t am_id;
} kv_am_arg;

struct kv_worker {
    ucp_context_h context;
    ucp_worker_h ucp;
    kv_record *ring;
    uint32_t capacity, head, tail, reserved; /* reserved: records promised to operations and endpoints */
    uint64_t inflight;                       /* operations started and not finished */
    uint64_t dropped;                        /* unasked messages dropped: no record or no memory left */
    kv_op *free_ops;
    kv_held *held;
    uint64_t held_bytes, next_token;
    kv_endpoint *endpoints;
    kv_am_arg am_args[KV_MAX_AM_IDS];
    int32_t last_status; /* of the operation that an inline wait saw end */
    uint64_t last_length;
};

/* An inline wait goes on while bytes keep coming, this long at most: the loop must have its turn. */
#define KV_INLINE_BOUND_NS 200000u

void kv_held_free(kv_worker *w, kv_held *h);
int kv_progress_until(kv_worker *w, const int *done, uint64_t idle_ns, uint64_t bound_ns);

int32_t kv_listener_make(ucp_worker_h worker, const char *host, uint16_t port, ucp_listener_conn_callback_t handler,
                         void *arg, ucp_listener_h *out, uint16_t *bound);

static inline uint64_t kv_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* In a polling loop, now and then: lets the one we wait for run when it shares our core. */
static inline void kv_relax(void) { sched_yield(); }

static inline int kv_ring_room(const kv_worker *w) {
    return w->head - w->tail + w->reserved < w->capacity;
}

/* Writes the next record; its room was reserved (or checked) before. */
static inline kv_record *kv_push(kv_worker *w, uint16_t kind, uint64_t id, int32_t status, uint64_t length) {
    kv_record *r = &w->ring[w->head++ & (w->capacity - 1)];
    r->kind = kind;
    r->id = id;
    r->status = status;
    r->length = length;
    r->aux = r->ep = 0;
    r->header_length = 0;
    return r;
}

static inline int32_t kv_status_of(ucs_status_ptr_t p) {
    return (int32_t)UCS_PTR_RAW_STATUS(p);
}

#endif
