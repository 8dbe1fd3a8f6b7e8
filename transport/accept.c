/*
 * accept.c: sessions whose client connects through a listener (sockaddr: rdmacm or tcp) instead of handing over its worker
 * address. Needed over RoCE where UCX's wire-up by address, which goes over UD, does not come through.
 *
 * The session is announced first (KV_AWAIT_SESSION, over the control connection): from then on its token is known, nothing
 * is answered, and exactly one connect request that carries the client's id becomes its endpoint. Requests with an id that
 * nobody announced are rejected, so a listener gives nobody a session.
 */
#include "service.h"

/* One client, one awaited session: the newest. An older one was given up by its client, and must not get its endpoint. */
void kv_accept_only(kv_service *s, const kv_session *newest) {
    for (uint32_t b = 0; b < KV_BUCKETS; b++)
        for (kv_session *session = s->sessions[b]; session != NULL; session = session->next)
            if (session != newest && session->client_id == newest->client_id) session->client_id = 0;
}

static kv_session *kv_awaited(kv_service *s, uint64_t client_id) {
    for (uint32_t b = 0; b < KV_BUCKETS; b++)
        for (kv_session *session = s->sessions[b]; session != NULL; session = session->next)
            if (session->ep == NULL && client_id != 0 && session->client_id == client_id) return session;
    return NULL;
}

static void kv_on_request(ucp_conn_request_h request, void *arg) {
    kv_service *s = arg;
    ucp_conn_request_attr_t attr;
    memset(&attr, 0, sizeof attr);
    attr.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ID;
    kv_session *session = NULL;
    if (ucp_conn_request_query(request, &attr) == UCS_OK) session = kv_awaited(s, attr.client_id);
    if (session == NULL) {
        kv_count(&s->counters.unknown_session, 1);
        ucp_listener_reject(s->listener, request);
        return;
    }
    ucp_ep_params_t params;
    memset(&params, 0, sizeof params);
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = request;
    ucp_ep_h ep;
    if (kv_session_connect(session, &params, &ep) == UCS_OK) session->ep = ep;
}

/* Starts listening: the bound port, or a negative status. */
int32_t kv_accept_start(kv_service *s, const char *host, uint16_t port) {
    if (s->listener != NULL) return UCS_ERR_ALREADY_EXISTS;
    uint16_t bound;
    int32_t status = kv_listener_make(s->worker, host, port, kv_on_request, s, &s->listener, &bound);
    return status == UCS_OK ? bound : status;
}

void kv_accept_stop(kv_service *s) {
    if (s->listener != NULL) ucp_listener_destroy(s->listener);
    s->listener = NULL;
}
