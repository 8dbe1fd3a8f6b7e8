/* fetch_model.h: what fetch_fuzz.c expects of the client's side: requests with their memory, operations, endpoints. */
#ifndef FETCH_MODEL_H
#define FETCH_MODEL_H

enum { REQUESTS = 24, VALUES = 6, PIECES = 3 * VALUES, OPERATIONS = 24, ENDPOINTS = 6, TOKENS = 64, CAPACITY = 64, EPOCH = 5 };
enum { UNUSED, STARTED, TAKEN, OVER };

typedef struct {
    int state, code, dones, quiets, is_quiet_due, is_checked;
    int is_told, is_told_otherwise; /* OUTCOMES or FOUND came of the epoch it asked in; of another one */
    unsigned kind, n;
    uint64_t id;
    uint32_t first[VALUES + 1];
    uint8_t *piece[PIECES]; /* NULL: freed */
    uint64_t length[PIECES], expected[VALUES], delivered[VALUES], next[VALUES];
    uint8_t seen[VALUES];
    struct ucp_ep *ep;
} a_request;

typedef struct {
    int is_pending;
    uint64_t id;
    uint8_t *buffer[4];
} an_operation;

typedef struct {
    kv_endpoint *endpoint;
    int is_peer_mode, is_closing;
    kv_endpoint *first; /* of those that go to one peer together; its own where it stands alone */
} an_endpoint;

static struct {
    kv_worker *worker;
    kv_fetcher *fetcher;
    a_request requests[REQUESTS];
    an_operation operations[OPERATIONS];
    an_endpoint endpoints[ENDPOINTS];
    uint64_t tokens[TOKENS], token_lengths[TOKENS];
    ucp_listener_h listener;
    uint64_t ids;
    unsigned tokens_count, ep_errors;
} m;

static uint64_t total_events, total_hits, total_quiets;

static uint8_t byte_of(uint64_t id, uint32_t index, uint64_t at) { return (uint8_t)(id * 7 + index * 13 + at * 3); }

/* ---- the model ---- */

FUZZ_QUIET static a_request *request_of(uint64_t id) {
    for (unsigned i = 0; i < REQUESTS; i++)
        if (m.requests[i].state != UNUSED && m.requests[i].id == id) return &m.requests[i];
    return NULL;
}

FUZZ_QUIET static an_operation *operation_of(uint64_t id) {
    for (unsigned i = 0; i < OPERATIONS; i++)
        if (m.operations[i].is_pending && m.operations[i].id == id) return &m.operations[i];
    return NULL;
}

FUZZ_QUIET static void free_pieces(a_request *r) {
    for (unsigned i = 0; i < PIECES; i++) {
        free(r->piece[i]);
        r->piece[i] = NULL;
    }
}

/* A message that says in which epoch it was true is about to come; a broken one may be nobody's. */
FUZZ_QUIET static void learn_told(unsigned id, const uint8_t *header, size_t header_length) {
    kv_many many;
    if ((id != KV_AM_FOUND && id != KV_AM_OUTCOMES) || header_length != sizeof many) return;
    memcpy(&many, header, sizeof many);
    a_request *r = request_of(many.request);
    if (r != NULL) *(many.epoch == EPOCH ? &r->is_told : &r->is_told_otherwise) = 1;
}

static void operation_over(an_operation *o) {
    for (unsigned i = 0; i < 4; i++) {
        free(o->buffer[i]);
        o->buffer[i] = NULL;
    }
    o->is_pending = 0;
}

/* After every call of the caller's. */
FUZZ_QUIET static void check_all(void) {
    const kv_worker *w = m.worker;
    uint32_t records = w->head - w->tail;
    uint64_t live = 0, inflight = 0, operations = 0, held = 0;
    CHECK(records <= w->capacity);
    for (unsigned i = 0; i < REQUESTS; i++) {
        a_request *q = &m.requests[i];
        kv_fetch *r = q->state == UNUSED ? NULL : kv_fetch_find(m.fetcher, q->id);
        if (r == NULL) {
            CHECK(q->state != STARTED);
            continue;
        }
        live++;
        inflight += !r->is_recorded;
        uint32_t left = 0, sends = 0, receives = 0;
        for (unsigned v = 0; v < q->n; v++) {
            uint8_t now = r->values[v].status;
            CHECK(q->seen[v] == KV_PENDING || q->seen[v] == now);
            CHECK(now != KV_OTHER_EPOCH || q->is_told_otherwise);
            if (now == KV_MISS || (now == KV_HIT && q->kind == KV_FETCH_LOOKUP))
                CHECK(q->is_told || q->kind == KV_FETCH_WRITE); /* there KV_REFUSED is as much */
            q->seen[v] = now;
            CHECK(!r->values[v].is_receiving || now == KV_PENDING); /* answered: nothing is still coming for it */
            left += now == KV_PENDING;
        }
        for (const double_request *d = dbl.pending; d != NULL; d = d->next) {
            if (d->send_cb == kv_on_part_sent) sends += ((kv_part *)d->user_data)->fetch == r;
            if (d->receive_cb == kv_on_value_received) receives += ((kv_part *)d->user_data)->fetch == r;
        }
        CHECK(left == r->left && sends == r->sends && receives == r->receives);
        CHECK(q->state == STARTED || r->sends || r->receives); /* taken: kept only for what is in flight */
    }
    CHECK(live == m.fetcher->live);
    for (unsigned i = 0; i < OPERATIONS; i++) operations += (uint64_t)m.operations[i].is_pending;
    CHECK(w->inflight <= inflight + operations);
    for (const kv_held *h = w->held; h != NULL; h = h->next) held += h->is_rendezvous ? 0 : h->length;
    CHECK(held == w->held_bytes && held <= KV_HELD_MAX);
}

static void double_on_send(struct ucp_ep *ep, unsigned id, const void *header, size_t header_length, const void *payload,
                           size_t length, uint32_t flags, void *user_data) {
    kv_ask ask;
    kv_write write;
    (void)ep, (void)payload, (void)flags, (void)user_data;
    double_touch(header, header_length);
    if (id == KV_AM_READ || id == KV_AM_LOOKUP) CHECK(kv_parse_ask(header, header_length, length, &ask));
    if (id == KV_AM_WRITE) CHECK(kv_parse_write(header, header_length, length, &write));
}

static void double_on_receive(double_message *message, uint8_t *into, size_t length, void *user_data) {
    (void)message, (void)user_data;
    double_touch(into, length);
}

static void double_on_land(double_message *message, uint8_t *into, size_t length, void *user_data) {
    (void)message, (void)into, (void)length, (void)user_data;
}

#endif
