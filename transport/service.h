/*
 * service.h: the node's data service: one C thread with its own UCX worker answers LOOKUP, READ and WRITE messages.
 *
 * Threads. The data thread owns the worker, the sessions and everything in flight. Other threads talk to it through three
 * doors only: the command queue (open and close a session), the grant table (mutex), the region table (set once per index,
 * release/acquire). Counters are relaxed atomics.
 *
 * Invariant of close_session: when its result is delivered, the session's token is unknown (every later message with it is
 * dropped), its grants are gone, and no receive into an extent is in flight, or the result says STILL_WRITING.
 */
#ifndef KV_SERVICE_H
#define KV_SERVICE_H

#include <pthread.h>

#include "ucx.h"
#include "wire.h"

/* Says where n keys lie, at a moment within the call; all UNAVAILABLE while this node may not answer. It alone decides that,
 * looking after it has read, so what is sent was true, also by a thread that was stopped in between. *epoch: the node's epoch
 * that all of it was true in; only this call can tell, for the next one may come after the epoch. Returns the hits. */
typedef size_t (*kv_resolve_fn)(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch);

#define KV_MAX_SESSIONS 4096
#define KV_MAX_PARKED 256              /* READ requests waiting in one session */
#define KV_MAX_SENDS 16384             /* messages to one session that UCX has not finished */
#define KV_SESSION_WINDOW (8ull << 20) /* payload bytes to one session in flight, then its reads wait */
#define KV_RESOLVE_CHUNK 32            /* keys resolved at once: addresses stay fresh */
#ifndef KV_BUCKETS /* tests ask for small tables */
#define KV_BUCKETS 4096
#define KV_MAX_REGIONS 1024
#endif
#define KV_CLOSE_BOUND_NS 5000000000ull

enum kv_close_result { KV_CLOSED_CLEAN = 0, KV_STILL_WRITING = 1, KV_UNKNOWN_SESSION = 2 };
enum kv_grant_result { KV_GRANT_OK = 0, KV_GRANT_BUSY = 1, KV_GRANT_UNKNOWN = 2, KV_GRANT_TAKEN = 3 };

typedef struct {
    _Atomic uint64_t base, size;
    _Atomic(ucp_mem_h) memh;
} kv_lent; /* a region: memory of ours that peers read and write through messages */

typedef struct kv_parked { /* a READ request being answered */
    struct kv_parked *next;
    uint64_t request;
    uint32_t count, done, fragment;
    uint8_t keys[];
} kv_parked;

typedef struct kv_session {
    struct kv_session *next;    /* bucket, or the list of closing ones */
    struct kv_session *waiting; /* list of sessions with parked reads and room again */
    struct kv_service *service;
    uint64_t token, client_id; /* client_id: of the connect request that is awaited while ep is NULL */
    ucp_ep_h ep, others[KV_MAX_CONNECTIONS - 1]; /* others: further connections to it, for DATA only */
    uint32_t others_count;
    int is_peer_mode, is_eager_only, is_lost, is_closing, is_waiting;
    uint32_t sends, receives, parked_count;
    uint64_t bytes;
    kv_parked *parked, **parked_end;
    void *close_requests[KV_MAX_CONNECTIONS];
    uint64_t close_ticket, close_until_ns;
} kv_session;

typedef struct kv_grant {
    struct kv_grant *next;
    uint64_t token, offset, capacity;
    uint32_t busy;
    uint16_t region;
    uint8_t is_revoked;
} kv_grant;

enum kv_command_kind {
    KV_OPEN_SESSION = 1,  /* address: the client's worker address */
    KV_CLOSE_SESSION = 2,
    KV_AWAIT_SESSION = 3, /* address: 8 bytes, the client's id */
    KV_LISTEN = 4,        /* address: host as text with its zero; token: port; the result is the bound port */
};

typedef struct kv_command {
    struct kv_command *next;
    int kind, is_peer_mode, is_eager_only, connections;
    uint64_t ticket, token;
    size_t address_length;
    uint8_t address[];
} kv_command;

typedef struct kv_result {
    struct kv_result *next;
    uint64_t ticket, token; /* ticket 0: news: this session's endpoint failed */
    int32_t status;
} kv_result;

typedef struct { /* see kv_service_counters for the order */
    _Atomic uint64_t lookups, lookup_keys, reads, read_keys, read_hits, read_bytes, writes, write_bytes, refused,
        unknown_session, malformed, dropped, sessions, turns, closing;
} kv_counters;

typedef struct kv_send { /* a message to a session in flight */
    struct kv_send *next;
    kv_session *session;
    uint64_t bytes;
    void *owned;
    uint8_t header[sizeof(kv_data)];
} kv_send;

typedef struct kv_incoming { /* a WRITE by rendezvous in flight */
    kv_session *session;
    kv_write header;
    uint64_t length;
} kv_incoming;

typedef struct kv_service {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_listener_h listener;
    kv_resolve_fn resolve;
    void *resolve_ctx;
    uint64_t spin_ns;
    pthread_t thread;
    pthread_mutex_t mutex; /* commands, results, start-up */
    pthread_cond_t started;
    int state; /* 0 starting, 1 running, negative: a status */
    atomic_int is_stopping;
    int command_fd, result_fd, worker_fd;
    kv_command *commands, **commands_end;
    kv_result *results, **results_end;
    uint8_t *address;
    size_t address_length;
    kv_lent regions[KV_MAX_REGIONS];
    pthread_mutex_t grants_mutex;
    kv_grant *grants[KV_BUCKETS];
    uint64_t grants_count;
    kv_session *sessions[KV_BUCKETS];
    kv_session *closing, *waiting;
    uint32_t sessions_count;
    int is_closing_soon; /* some session's close still has to be looked at often */
    kv_send *free_sends;
    kv_counters counters;
} kv_service;

static inline void kv_count(_Atomic uint64_t *counter, uint64_t n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static inline uint32_t kv_bucket(uint64_t a, uint64_t b) {
    uint64_t h = (a ^ (b * 0x9E3779B97F4A7C15ull)) * 0xD6E8FEB86659FD93ull;
    return (uint32_t)(h >> 40) % KV_BUCKETS;
}

/* serve.c */
int32_t kv_serve_install(kv_service *s);
void kv_serve_pump(kv_session *session);
void kv_serve_waiting(kv_service *s);
/* accept.c */
int32_t kv_accept_start(kv_service *s, const char *host, uint16_t port);
void kv_accept_stop(kv_service *s);
void kv_accept_only(kv_service *s, const kv_session *newest);
/* service.c */
ucs_status_t kv_session_connect(kv_session *session, ucp_ep_params_t *params, ucp_ep_h *out);
kv_session *kv_session_find(kv_service *s, uint64_t token);
kv_grant *kv_grant_hold(kv_service *s, const kv_write *w, size_t length);
void kv_grant_release(kv_service *s, uint16_t region, uint64_t offset, uint64_t token);

#endif
