/* service_calls.h: the binding as Python calls it, for the drivers that run it on the real UCX, and what they share. */
#ifndef SERVICE_CALLS_H
#define SERVICE_CALLS_H

#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "fetch.h"
#include "service.h"

#define CHECK(condition)                                                                                   \
    do {                                                                                                   \
        if (!(condition)) {                                                                                \
            fprintf(stderr, "%s: line %d: %s does not hold\n", __FILE__, __LINE__, #condition);            \
            abort();                                                                                       \
        }                                                                                                  \
    } while (0)

/* declared in cdef.h for Python only */
int32_t kv_context_open(const char *const *, const char *const *, size_t, int, ucp_context_h *, uint32_t *);
void kv_context_close(ucp_context_h);
int32_t kv_worker_open(ucp_context_h, uint32_t, uint64_t, kv_worker **);
void kv_worker_close(kv_worker *);
int64_t kv_worker_address(kv_worker *, void *, size_t);
uint32_t kv_progress(kv_worker *, uint64_t, uint64_t, int *);
void kv_ring_release(kv_worker *, uint32_t);
int32_t kv_memory_map(ucp_context_h, uint64_t, uint64_t, ucp_mem_h *, uint64_t *);
int32_t kv_memory_unmap(ucp_context_h, ucp_mem_h);
int32_t kv_endpoint_from_address(kv_worker *, const void *, int, kv_endpoint **);
int32_t kv_endpoint_close(kv_endpoint *, int);
int kv_endpoint_is_closed(kv_endpoint *);
void kv_endpoint_free(kv_endpoint *);
int32_t kv_message_send(kv_endpoint *, uint32_t, const void *, size_t, size_t, const kv_iov *, uint32_t, ucp_mem_h, uint64_t,
                        uint64_t);
int32_t kv_service_open(ucp_context_h, uint64_t, uint64_t, uint64_t, kv_service **);
void kv_service_close(kv_service *);
int kv_service_result_fd(kv_service *);
size_t kv_service_address(kv_service *, void *, size_t);
int32_t kv_service_lend(kv_service *, uint32_t, uint64_t, uint64_t, ucp_mem_h);
int32_t kv_service_command(kv_service *, int, uint64_t, uint64_t, const void *, size_t, int, int, int);
size_t kv_service_results(kv_service *, size_t, uint64_t *, uint64_t *, int32_t *);
void kv_service_grant(kv_service *, uint64_t, size_t, const uint16_t *, const uint64_t *, const uint64_t *, uint8_t *);
void kv_service_revoke(kv_service *, uint64_t, size_t, const uint16_t *, const uint64_t *, uint8_t *);
void kv_service_counters(kv_service *, uint64_t *);
int32_t kv_fetcher_open(kv_worker *, kv_fetcher **);
void kv_fetcher_close(kv_fetcher *);
void kv_fetcher_counters(const kv_fetcher *, uint64_t *);
int32_t kv_fetch_read(kv_fetcher *, kv_endpoint *, uint64_t, uint32_t, uint64_t, uint32_t, const uint8_t *,
                      const uint32_t *, const uint64_t *, const uint64_t *, uint32_t, int, ucp_mem_h, uint64_t);
int32_t kv_fetch_lookup(kv_fetcher *, kv_endpoint *, uint64_t, uint32_t, uint64_t, uint32_t, const uint8_t *, uint64_t);
int32_t kv_fetch_write(kv_fetcher *, kv_endpoint *, uint64_t, uint64_t, uint32_t, const uint32_t *, const uint64_t *,
                       const uint64_t *, const uint16_t *, const uint64_t *, uint32_t, ucp_mem_h, uint64_t);
int64_t kv_fetch_take(kv_fetcher *, uint64_t, uint8_t *, uint64_t *, uint64_t *, kv_found *, uint32_t *);
void kv_fetch_endpoint_gone(kv_fetcher *, kv_endpoint *);

const char *__lsan_default_suppressions(void) { return "leak:libucs\nleak:libucp\nleak:libuct\nleak:libucm\n"; }

static uint64_t state;

static inline uint64_t next(void) {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    return z ^ z >> 27;
}

__attribute__((no_sanitize("thread"))) static inline void fill(uint8_t *at, uint64_t n, uint64_t seed) {
    for (uint64_t k = 0; k < n; k++) at[k] = (uint8_t)(k * 13 + seed);
}

#endif
