/*
 * wire.h: the messages of the data service, byte by byte, and their parsers. No UCX in here: pure functions over bytes that
 * anybody may have sent. A parser says 1 and fills *out, or says 0; then nothing of the message may be used.
 *
 * Over TCP every DATA and WRITE is an eager fragment: UCX's rendezvous there is a put by the other side, which can land after
 * a forced close (openucx/ucx#11918); an eager fragment is copied by the receiver, or dropped.
 *
 * All numbers little endian. Header = the active message's header, payload = its data. Reserved bytes are zero.
 *
 *   LOOKUP  (id 16, client to node)           READ  (id 18, client to node)
 *     0  8  session token                       payload: count keys of 16 bytes each
 *     8  8  request id (the client's)
 *     16 4  count: keys, 1..4096
 *     20 4  fragment: READ only: largest payload of one DATA message; 0 = one message a block
 *
 *   FOUND  (id 17, node to client)            OUTCOMES  (id 20, node to client)
 *     0  8  request id                          payload: count outcomes of 24 bytes each:
 *     8  4  count                                 0  4  index of the key in the request
 *     12 4  epoch                                 4  1  status    5  1  tier    6  2  reserved
 *     payload: count kv_found, addr = offset       8  8  length    16 8  generation
 *     epoch: of the node, that all of this was true in (kv_resolve_fn). What a client knows of the node, it knows of one
 *     epoch, so in any other a miss means nothing to it.
 *
 *   DATA  (id 19, node to client): one block, or a fragment of one. It carries no epoch: its sum proves it
 *     0  8  request id
 *     8  4  index of the key in the request
 *     12 1  status (HIT)    13 1  tier    14 2  reserved
 *     16 8  length of the whole value
 *     24 8  where this payload begins in it
 *     32 8  xxh3 of the whole value
 *     40 8  generation
 *     payload: the bytes
 *
 *   WRITE  (id 21, client to node)            WRITTEN  (id 22, node to client)
 *     0  8  session token                       0  8  request id
 *     8  8  request id                          8  4  index
 *     16 4  index of the value in the request   12 1  status    13 3  reserved
 *     20 2  region    22 2  reserved            (no payload)
 *     24 8  offset of the granted extent
 *     32 8  where this payload begins in it
 *     payload: the bytes
 */
#ifndef KV_WIRE_H
#define KV_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little endian and so must be the host");

enum kv_message_id {
    KV_AM_LOOKUP = 16,
    KV_AM_FOUND = 17,
    KV_AM_READ = 18,
    KV_AM_DATA = 19,
    KV_AM_OUTCOMES = 20,
    KV_AM_WRITE = 21,
    KV_AM_WRITTEN = 22,
};

enum kv_read_status {
    KV_HIT = 0,
    KV_MISS = 1,
    KV_SIZE = 2,
    KV_CORRUPT = 3,
    KV_UNMAPPED = 4,
    KV_STALE = 5,
    KV_UNAVAILABLE = 6,
    KV_CANCELLED = 7,
    KV_OTHER_EPOCH = 8, /* the client's own word, never sent: answered, but not in the epoch that it asked for */
};

enum kv_write_status {
    KV_WRITTEN = 0,
    KV_REFUSED = 1, /* no live grant of this session covers it */
    KV_BROKEN = 2,  /* the transfer failed */
    /* 6, 7: as above */
};

#define KV_KEY_BYTES 16
#define KV_MAX_KEYS 4096u
#define KV_MAX_VALUE (1ull << 30)

typedef struct {
    uint64_t addr, length, sum, generation;
    uint32_t slot;
    uint16_t region;
    uint8_t status, tier;
} kv_found;

typedef struct {
    uint64_t session, request;
    uint32_t count, fragment;
} kv_ask;

typedef struct {
    uint64_t request;
    uint32_t count, epoch;
} kv_many;

typedef struct {
    uint32_t index;
    uint8_t status, tier;
    uint16_t reserved;
    uint64_t length, generation;
} kv_outcome;

typedef struct {
    uint64_t request;
    uint32_t index;
    uint8_t status, tier;
    uint16_t reserved;
    uint64_t length, at, sum, generation;
} kv_data;

typedef struct {
    uint64_t session, request;
    uint32_t index;
    uint16_t region, reserved;
    uint64_t offset, at;
} kv_write;

typedef struct {
    uint64_t request;
    uint32_t index;
    uint8_t status, reserved[3];
} kv_written;

_Static_assert(sizeof(kv_found) == 40 && sizeof(kv_ask) == 24 && sizeof(kv_many) == 16 && sizeof(kv_outcome) == 24 &&
                   sizeof(kv_data) == 48 && sizeof(kv_write) == 40 && sizeof(kv_written) == 16,
               "structs are the wire layout");

/* LOOKUP and READ. */
static inline int kv_parse_ask(const void *header, size_t header_length, size_t payload_length, kv_ask *out) {
    if (header_length != sizeof *out) return 0;
    memcpy(out, header, sizeof *out);
    return out->count >= 1 && out->count <= KV_MAX_KEYS && payload_length == (size_t)out->count * KV_KEY_BYTES;
}

static inline int kv_parse_many(const void *header, size_t header_length, size_t payload_length, size_t item,
                                kv_many *out) {
    if (header_length != sizeof *out) return 0;
    memcpy(out, header, sizeof *out);
    return out->count >= 1 && out->count <= KV_MAX_KEYS && payload_length == (size_t)out->count * item;
}

static inline int kv_parse_found(const void *header, size_t header_length, size_t payload_length, kv_many *out) {
    return kv_parse_many(header, header_length, payload_length, sizeof(kv_found), out);
}

static inline int kv_parse_outcomes(const void *header, size_t header_length, size_t payload_length, kv_many *out) {
    return kv_parse_many(header, header_length, payload_length, sizeof(kv_outcome), out);
}

static inline int kv_parse_data(const void *header, size_t header_length, size_t payload_length, kv_data *out) {
    if (header_length != sizeof *out) return 0;
    memcpy(out, header, sizeof *out);
    if (out->status != KV_HIT || out->reserved != 0 || out->length > KV_MAX_VALUE || out->at > out->length) return 0;
    if (payload_length > out->length - out->at) return 0;
    return payload_length != 0 || out->length == 0; /* an empty payload belongs to an empty value only */
}

static inline int kv_parse_write(const void *header, size_t header_length, size_t payload_length, kv_write *out) {
    if (header_length != sizeof *out) return 0;
    memcpy(out, header, sizeof *out);
    if (out->reserved != 0 || payload_length == 0 || payload_length > KV_MAX_VALUE) return 0;
    return out->at <= KV_MAX_VALUE - payload_length && out->offset <= UINT64_MAX - KV_MAX_VALUE;
}

static inline int kv_parse_written(const void *header, size_t header_length, size_t payload_length, kv_written *out) {
    if (header_length != sizeof *out || payload_length != 0) return 0;
    memcpy(out, header, sizeof *out);
    if (out->status > KV_BROKEN && out->status != KV_UNAVAILABLE && out->status != KV_CANCELLED) return 0;
    return out->reserved[0] == 0 && out->reserved[1] == 0 && out->reserved[2] == 0;
}

/* Does the payload of a WRITE fit into a granted extent of capacity bytes? Call after kv_parse_write. */
static inline int kv_write_fits(const kv_write *w, size_t payload_length, uint64_t capacity) {
    return w->at <= capacity && payload_length <= capacity - w->at;
}

/* Over which of n connections the payload at position `at` of value `index` goes. Values take turns, so that the fragments
 * of one come in order; where a request has fewer values than that, fragments do. fragment 0: values are not cut. */
static inline uint32_t kv_turn(uint32_t n, uint64_t request, uint32_t count, uint32_t index, uint64_t length, uint64_t at,
                               uint64_t fragment) {
    if (count >= n || fragment == 0) return (uint32_t)((request + index) % n);
    return (uint32_t)((request + index * ((length + fragment - 1) / fragment) + at / fragment) % n);
}

/* Does [offset, offset + length) lie in a region of size bytes? */
static inline int kv_in_region(uint64_t offset, uint64_t length, uint64_t size) {
    return offset <= size && length <= size - offset;
}

#endif
