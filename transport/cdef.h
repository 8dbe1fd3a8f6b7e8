/* What Python calls: read by build_ucx.py, not by the C compiler. Meanings stand with the definitions. */
typedef struct { uint64_t addr, len; } kv_iov;
typedef struct {
    uint64_t id; int32_t status; uint16_t kind, header_length; uint64_t length, aux, ep; uint8_t header[88];
} kv_record;
typedef struct kv_worker kv_worker;
typedef struct kv_endpoint kv_endpoint;
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef struct ucp_listener *ucp_listener_h;

void kv_version(uint32_t *out);
const char *kv_status_text(int32_t status);
int32_t kv_context_open(const char *const *names, const char *const *values, size_t n, int is_shared,
                        ucp_context_h *out, uint32_t *unknown);
void kv_context_close(ucp_context_h context);
size_t kv_context_describe(ucp_context_h context, char *text, size_t cap);
size_t kv_endpoint_describe(kv_endpoint *e, char *text, size_t cap);

int32_t kv_worker_open(ucp_context_h context, uint32_t capacity, uint64_t client_id, kv_worker **out);
void kv_worker_close(kv_worker *w);
int32_t kv_worker_fd(kv_worker *w, int *fd);
int32_t kv_worker_arm(kv_worker *w);
int64_t kv_worker_address(kv_worker *w, void *buf, size_t cap);
uint32_t kv_progress(kv_worker *w, uint64_t idle_ns, uint64_t bound_ns, int *has_moved);
kv_record *kv_ring(kv_worker *w);
uint32_t kv_ring_capacity(kv_worker *w);
uint64_t kv_ring_tail(kv_worker *w);
uint32_t kv_ring_count(kv_worker *w);
void kv_ring_release(kv_worker *w, uint32_t count);
uint64_t kv_inflight(kv_worker *w);
uint64_t kv_dropped(kv_worker *w);
int32_t kv_last_status(kv_worker *w);
uint64_t kv_last_length(kv_worker *w);

int32_t kv_memory_map(ucp_context_h context, uint64_t addr, uint64_t length, ucp_mem_h *out, uint64_t *base);
int32_t kv_memory_unmap(ucp_context_h context, ucp_mem_h memh);
int64_t kv_rkey_pack(ucp_context_h context, ucp_mem_h memh, void *buf, size_t cap);
int32_t kv_rkey_unpack(kv_endpoint *e, const void *packed, ucp_rkey_h *out);
void kv_rkey_destroy(ucp_rkey_h rkey);
int32_t kv_rkey_pointer(ucp_rkey_h rkey, uint64_t remote, uint64_t *local);

int32_t kv_endpoint_from_address(kv_worker *w, const void *address, int error_mode, kv_endpoint **out);
int32_t kv_endpoint_from_socket(kv_worker *w, const char *host, uint16_t port, int error_mode, kv_endpoint **out);
int32_t kv_endpoint_from_request(kv_worker *w, uint64_t request, int error_mode, kv_endpoint **out);
int32_t kv_endpoint_join(kv_endpoint *first, kv_endpoint *other);
int32_t kv_endpoint_close(kv_endpoint *e, int force);
int kv_endpoint_is_closed(kv_endpoint *e);
void kv_endpoint_free(kv_endpoint *e);
int32_t kv_listen(kv_worker *w, const char *host, uint16_t port, ucp_listener_h *out, uint16_t *bound);
int32_t kv_connect_reject(ucp_listener_h listener, uint64_t request);
void kv_listener_close(ucp_listener_h listener);

int32_t kv_transfer(kv_endpoint *e, int is_put, size_t n, const uint64_t *local, const uint64_t *length,
                    const uint64_t *remote, ucp_rkey_h rkey, ucp_mem_h memh, uint64_t id, uint64_t spin_ns);
int32_t kv_flush(kv_endpoint *e, uint64_t id, uint64_t spin_ns);
int32_t kv_message_send(kv_endpoint *e, uint32_t am_id, const void *header, size_t header_length, size_t n,
                        const kv_iov *pieces, uint32_t flags, ucp_mem_h memh, uint64_t id, uint64_t spin_ns);
int32_t kv_message_handle(kv_worker *w, uint32_t am_id);
int32_t kv_message_receive(kv_worker *w, uint64_t token, uint64_t addr, uint64_t capacity, ucp_mem_h memh, uint64_t id,
                           uint64_t spin_ns);
void kv_message_drop(kv_worker *w, uint64_t token);

typedef struct {
    uint64_t addr, length, sum, generation; uint32_t slot; uint16_t region; uint8_t status, tier;
} kv_found;
typedef struct kv_service kv_service;
typedef struct kv_fetcher kv_fetcher;

int32_t kv_service_open(ucp_context_h context, uint64_t resolve, uint64_t resolve_ctx, uint64_t spin_ns,
                        kv_service **out);
void kv_service_close(kv_service *s);
int kv_service_result_fd(kv_service *s);
size_t kv_service_address(kv_service *s, void *buf, size_t cap);
int32_t kv_service_lend(kv_service *s, uint32_t index, uint64_t base, uint64_t size, ucp_mem_h memh);
int32_t kv_service_command(kv_service *s, int kind, uint64_t ticket, uint64_t token, const void *address, size_t length,
                           int is_peer_mode, int is_eager_only, int connections);
size_t kv_service_results(kv_service *s, size_t max, uint64_t *tickets, uint64_t *tokens, int32_t *statuses);
void kv_service_grant(kv_service *s, uint64_t token, size_t n, const uint16_t *region, const uint64_t *offset,
                      const uint64_t *capacity, uint8_t *out);
void kv_service_revoke(kv_service *s, uint64_t token, size_t n, const uint16_t *region, const uint64_t *offset,
                       uint8_t *out);
void kv_service_counters(kv_service *s, uint64_t *out);

int32_t kv_fetcher_open(kv_worker *w, kv_fetcher **out);
void kv_fetcher_close(kv_fetcher *f);
void kv_fetcher_counters(kv_fetcher *f, uint64_t *out);
int32_t kv_fetch_read(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, uint32_t n,
                      const uint8_t *keys, const uint32_t *first, const uint64_t *addr, const uint64_t *len,
                      uint32_t fragment, int is_checked, ucp_mem_h memh, uint64_t spin_ns);
int32_t kv_fetch_read_one(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, const uint8_t *key,
                          void *into, uint64_t size, uint32_t fragment, int is_checked, uint64_t spin_ns, uint8_t *status,
                          uint64_t *length);
int32_t kv_fetch_lookup(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint32_t epoch, uint64_t id, uint32_t n,
                        const uint8_t *keys, uint64_t spin_ns);
int32_t kv_fetch_write(kv_fetcher *f, kv_endpoint *e, uint64_t session, uint64_t id, uint32_t n, const uint32_t *first,
                       const uint64_t *addr, const uint64_t *len, const uint16_t *region, const uint64_t *offset,
                       uint32_t fragment, ucp_mem_h memh, uint64_t spin_ns);
int kv_pieces_fit(uint32_t n, const uint32_t *first, uint32_t pieces);
uint32_t kv_chunk_end(uint32_t n, const uint32_t *first, const uint64_t *len, uint32_t low, uint64_t max_bytes,
                      uint32_t max_values);
int64_t kv_fetch_take(kv_fetcher *f, uint64_t id, uint8_t *status, uint64_t *length, uint64_t *generation,
                      kv_found *found, uint32_t *receives);
void kv_fetch_endpoint_gone(kv_fetcher *f, kv_endpoint *e);
