/*
 * fetch.h: the client's side of the data service: requests on their way, and where their bytes go.
 *
 * One fetcher per worker, in the worker's thread. A request lives in C from its start until the caller has taken its
 * results and nothing of it is in flight; results and copies of the pieces are its own, so nothing of the caller's is
 * touched but the destinations themselves.
 *
 * Memory safety of destinations. They are written (a) by copying, in a message handler, only while the request is alive;
 * (b) by a rendezvous receive that was started while it was alive. `kv_fetch_take` ends (a) at once and returns how many of
 * (b) are in flight; a KV_QUIET record follows when the last one ended. Whoever took may reuse the memory then, not before; if the record does not come, closing the endpoint by force (PEER mode) or destroying the worker brings it.
 * Fragmented requests (fragment != 0) receive by copying only.
 *
 * A request is asked in one epoch of the node: what FOUND and OUTCOMES say of another one is KV_OTHER_EPOCH, no answer.
 *
 * Sources of a WRITE are read by UCX until its sends complete; KV_QUIET tells that too.
 */
#ifndef KV_FETCH_H
#define KV_FETCH_H

#include "ucx.h"
#include "../tiers/xxh3.h"
#include "wire.h"

enum kv_fetch_kind { KV_FETCH_READ = 1, KV_FETCH_LOOKUP = 2, KV_FETCH_WRITE = 3 };

#define KV_FETCH_BUCKETS 1024
#define KV_PENDING 255 /* status of a value without an answer yet */

typedef struct {
    uint64_t expected, got, length, generation, sum;
    uint8_t *bounce;  /* for what cannot be received, or sent, in place */
    kvx_state *state; /* the sum so far, while fragments come in order */
    uint32_t first_piece, pieces, unanswered;
    uint8_t status, is_receiving;
} kv_value;

typedef struct kv_fetch {
    struct kv_fetch *next;
    struct kv_fetcher *fetcher;
    kv_endpoint *endpoint;
    uint64_t id;
    ucp_mem_h memh;
    int *waited;
    kv_value *values;
    kv_iov *pieces;
    kv_found *found;
    uint8_t *keys;
    uint32_t count, left, receives, sends, epoch;
    uint8_t kind, is_checked, is_recorded, is_taken, is_abandoned, is_quiet_wanted;
} kv_fetch;

typedef struct kv_fetcher {
    kv_worker *worker;
    kv_fetch *buckets[KV_FETCH_BUCKETS];
    uint64_t live, late, stale, malformed; /* requests held; messages nobody waits for; sums that differ; broken messages */
} kv_fetcher;

typedef struct { /* a message of a request in flight, or a receive for one of its values */
    kv_fetch *fetch;
    uint32_t index;
    uint8_t header[sizeof(kv_data)];
} kv_part;

static inline uint8_t *kv_piece_at(const kv_fetch *r, const kv_value *v, uint32_t i) {
    return (uint8_t *)(uintptr_t)r->pieces[v->first_piece + i].addr;
}

/* fetch.c */
kv_fetch *kv_fetch_find(kv_fetcher *f, uint64_t id);
void kv_fetch_settle(kv_fetch *r);
void kv_value_end(kv_fetch *r, kv_value *v, uint8_t status);
void kv_scatter(const kv_fetch *r, const kv_value *v, uint64_t at, uint8_t *bytes, uint64_t n, int is_gather);
/* receive.c */
int32_t kv_receive_install(kv_fetcher *f);

#endif
