/* serve_model.h: what serve_fuzz.c expects of the node's side: sessions, grants, requests, regions, as plain arrays. */
#ifndef SERVE_MODEL_H
#define SERVE_MODEL_H

enum { SESSIONS = 12, GRANTS = 48, TICKETS = 256, TRACKED = 96, ITEMS = 64, SMALL = 4096, BIG = 1 << 20, REGIONS = 3 };
enum { ABSENT, ASKED, OPEN, LEAVING, GONE };
static const uint64_t UNTRACKED = 1ull << 63; /* in request ids: only the form of their answers is checked */

typedef struct {
    int state, is_await, is_close_asked, is_eager_only;
    uint64_t token, client_id, close_ticket;
    kv_session *session;
} a_session;

typedef struct {
    int is_used, is_revoked;
    uint32_t busy;
    uint64_t token, offset, capacity;
    uint16_t region;
} a_grant;

typedef struct {
    uint64_t id;
    unsigned kind, session;
    uint32_t count, left, fragment;
    int is_accepted;
    uint8_t *answered;
    uint64_t *at;
} a_request;

static struct {
    kv_service *service;
    a_session sessions[SESSIONS];
    a_grant grants[GRANTS];
    a_request requests[TRACKED];
    uint8_t ticket_answers[TICKETS]; /* 0 not issued, 1 awaited, 2 answered */
    kv_found items[ITEMS];
    uint8_t *memory[REGIONS], *shadow[2];
    uint64_t lent[REGIONS], tickets;
    unsigned sessions_count, requests_count, idle, turns, drained;
    uint32_t epoch; /* of the latest resolve: every one has its own */
    int is_draining, is_cut_off, is_poor; /* is_poor: starts with no region lent */
} m;

static uint8_t *big;
static const uint64_t sizes[REGIONS] = {SMALL, SMALL, BIG};

/* ---- the model ---- */

FUZZ_QUIET static unsigned grants_used(void) {
    unsigned n = 0;
    for (unsigned i = 0; i < GRANTS; i++) n += (unsigned)m.grants[i].is_used;
    return n;
}

FUZZ_QUIET static a_grant *grant_at(uint16_t region, uint64_t offset) {
    for (unsigned i = 0; i < GRANTS; i++)
        if (m.grants[i].is_used && m.grants[i].region == region && m.grants[i].offset == offset) return &m.grants[i];
    return NULL;
}

FUZZ_QUIET static a_session *session_of(uint64_t token) {
    for (unsigned i = 0; i < m.sessions_count; i++)
        if (m.sessions[i].token == token && m.sessions[i].state != ABSENT) return &m.sessions[i];
    return NULL;
}

/* What the commands that ran meanwhile did. */
FUZZ_QUIET static void learn(void) {
    for (unsigned i = 0; i < m.sessions_count; i++) {
        a_session *s = &m.sessions[i];
        if (s->state == ASKED && (s->session = kv_session_find(m.service, s->token)) != NULL) s->state = OPEN;
        if (s->state != OPEN || kv_session_find(m.service, s->token) != NULL) continue;
        CHECK(s->is_close_asked || m.service->is_stopping);
        s->state = LEAVING;
        for (unsigned g = 0; g < GRANTS; g++) {
            a_grant *grant = &m.grants[g];
            if (!grant->is_used || grant->token != s->token) continue;
            if (grant->busy == 0) grant->is_used = 0;
            grant->is_revoked = 1;
        }
    }
}

FUZZ_QUIET static void check_session(const kv_session *session, const struct ucp_ep *ep) {
    uint32_t pending = ep == NULL ? 0 : ep->pending;
    for (uint32_t i = 0; ep != NULL && i < session->others_count; i++) pending += session->others[i]->pending;
    CHECK(session->sends == pending);
    CHECK(session->sends <= 3 * KV_MAX_SENDS + KV_RESOLVE_CHUNK);
    CHECK(session->sends != 0 || session->bytes == 0);
}

/* After every event. */
FUZZ_QUIET static void check_all(void) {
    kv_service *s = m.service;
    for (int i = 0; i < 2; i++) CHECK(memcmp(m.memory[i], m.shadow[i], SMALL) == 0);
    CHECK(s->grants_count == grants_used());
    uint32_t open = 0;
    for (unsigned i = 0; i < m.sessions_count; i++) {
        if (m.sessions[i].state != OPEN) continue;
        const kv_session *session = m.sessions[i].session;
        open++;
        check_session(session, session->ep);
        uint32_t parked = 0;
        for (const kv_parked *p = session->parked; p != NULL; p = p->next) parked++;
        CHECK(parked == session->parked_count && parked <= KV_MAX_PARKED);
        /* a parked read is looked at again: something is on its way, or it stands in the queue */
        CHECK(parked == 0 || session->is_lost || session->sends != 0 || session->is_waiting);
    }
    for (const kv_session *session = s->waiting; session != NULL; session = session->waiting)
        CHECK(session->is_waiting && kv_session_find(s, session->token) == session);
    uint32_t closing = 0;
    for (const kv_session *session = s->closing; session != NULL; session = session->next) closing++;
    CHECK(open == s->sessions_count && open <= KV_MAX_SESSIONS && open == s->counters.sessions);
    CHECK(closing == s->counters.closing && closing <= 2 * KV_MAX_SESSIONS);
}

/* Where an answer's session stands in the model. */
FUZZ_QUIET static unsigned session_by_ep(const struct ucp_ep *ep) {
    for (unsigned i = 0; i < m.sessions_count; i++) {
        if (m.sessions[i].state != OPEN) continue;
        const kv_session *session = m.sessions[i].session;
        if (session->ep == ep) return i;
        for (uint32_t k = 0; k < session->others_count; k++)
            if (session->others[k] == ep) return i;
    }
    CHECK(!"an answer on the endpoint of an open session");
    return 0;
}

FUZZ_QUIET static a_request *request_of(uint64_t id, unsigned session, unsigned kind) {
    if (id & UNTRACKED) return NULL;
    for (unsigned i = 0; i < m.requests_count; i++)
        if (m.requests[i].id == id) {
            CHECK(m.requests[i].session == session && m.requests[i].kind == kind && m.requests[i].is_accepted);
            return &m.requests[i];
        }
    CHECK(!"an answer to something that was asked");
    return NULL;
}

static void answer(a_request *r, uint32_t index) {
    CHECK(index < r->count && !r->answered[index]);
    r->answered[index] = 1;
    r->left--;
}

static void double_on_send(struct ucp_ep *ep, unsigned id, const void *header, size_t header_length, const void *payload,
                           size_t length, uint32_t flags, void *user_data) {
    kv_many many;
    kv_data data;
    kv_written written;
    (void)user_data;
    unsigned session = session_by_ep(ep);
    CHECK(id == KV_AM_DATA || ep == m.sessions[session].session->ep); /* further connections carry DATA only */
    int is_eager = (flags & UCP_AM_SEND_FLAG_EAGER) != 0;
    if (id == KV_AM_FOUND) {
        CHECK(is_eager && kv_parse_found(header, header_length, length, &many) && many.epoch == m.epoch);
        a_request *r = request_of(many.request, session, KV_AM_LOOKUP);
        for (uint32_t i = 0; r != NULL && i < r->count; i++) answer(r, i);
        const kv_found *f = payload;
        for (uint32_t i = 0; i < many.count; i++)
            CHECK(f[i].addr == UINT64_MAX ||
                  (f[i].region < REGIONS && kv_in_region(f[i].addr, f[i].length, m.lent[f[i].region])));
    } else if (id == KV_AM_OUTCOMES) {
        CHECK(is_eager && kv_parse_outcomes(header, header_length, length, &many) && many.epoch == m.epoch);
        a_request *r = request_of(many.request, session, KV_AM_READ);
        for (uint32_t i = 0; i < many.count; i++) {
            const kv_outcome *o = (const kv_outcome *)payload + i;
            CHECK(o->status != KV_HIT && o->reserved == 0);
            if (r == NULL) continue;
            CHECK(o->index < r->count && r->at[o->index] == 0);
            answer(r, o->index);
        }
    } else if (id == KV_AM_DATA) {
        CHECK(kv_parse_data(header, header_length, length, &data));
        uintptr_t at = (uintptr_t)payload;
        int is_lent = length == 0;
        for (unsigned i = 0; i < REGIONS; i++)
            is_lent |= at >= (uintptr_t)m.memory[i] && kv_in_region(at - (uintptr_t)m.memory[i], length, m.lent[i]);
        CHECK(is_lent);
        a_request *r = request_of(data.request, session, KV_AM_READ);
        if (r == NULL) return;
        CHECK(data.index < r->count && !r->answered[data.index] && r->at[data.index] == data.at);
        CHECK(r->fragment == 0 || (is_eager && length <= (r->fragment < 4096 ? 4096 : r->fragment)));
        r->at[data.index] += length;
        if (r->at[data.index] == data.length) answer(r, data.index);
    } else {
        CHECK(id == KV_AM_WRITTEN && is_eager && kv_parse_written(header, header_length, length, &written));
        CHECK(written.status <= KV_BROKEN);
        a_request *r = request_of(written.request, session, KV_AM_WRITE);
        if (r != NULL) answer(r, written.index);
    }
}

/* The extent that a message's write goes to; it must be granted, and stay so until the bytes have come. */
static a_grant *written_grant(const kv_write *w, const uint8_t *into, size_t length) {
    CHECK(w->region < 2);
    a_grant *g = grant_at(w->region, w->offset);
    CHECK(g != NULL && g->token == w->session);
    CHECK(into == m.memory[w->region] + w->offset + w->at && w->at + length <= g->capacity);
    CHECK(w->offset + w->at + length <= SMALL);
    return g;
}

static void double_on_receive(double_message *message, uint8_t *into, size_t length, void *user_data) {
    const kv_incoming *in = user_data;
    (void)message;
    a_grant *g = written_grant(&in->header, into, length);
    CHECK(!g->is_revoked);
    g->busy++;
}

static void double_on_land(double_message *message, uint8_t *into, size_t length, void *user_data) {
    const kv_incoming *in = user_data;
    a_grant *g = written_grant(&in->header, into, length);
    const a_session *s = session_of(in->header.session);
    CHECK(s != NULL && (s->state == OPEN || s->state == LEAVING)); /* GONE: its close was confirmed clean */
    memcpy(m.shadow[in->header.region] + in->header.offset + in->header.at, message->bytes, length);
    CHECK(g->busy != 0);
    if (--g->busy == 0 && g->is_revoked && s->state == LEAVING) g->is_used = 0;
}

#endif
