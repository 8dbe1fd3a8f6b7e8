/* Io engine on io_uring, by plain system calls: one ring, without polling threads.
 *
 * Invariants:
 * - No more operations are given than the submission queue holds, and each has one answer, so the completion queue, of
 *   twice that size, cannot overflow; if the kernel says that it did, its backlog is asked for.
 * - The kernel reads the submission queue during io_uring_enter only (no SQPOLL): what it did not take may be taken back.
 * - The ring is closed only when no operation is given.
 *
 * Memory and files are registered where the kernel allows (sparse tables: 5.19 and 5.5); otherwise each operation
 * names its own. Source: Linux man-pages io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
 */
#include "io.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define KV_HAS_URING 1
#endif
#endif

#ifdef KV_HAS_URING
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* What newer kernels take and older headers do not know. */
enum {
    KV_SUBMIT_ALL = 1 << 7, KV_COOP_TASKRUN = 1 << 8, KV_CQ_OVERFLOW = 1 << 1, KV_SPARSE = 1, KV_BUFFERS2 = 15,
    KV_BUFFERS_UPDATE = 16
};
enum { KV_REGIONS = 1024, KV_FILE_TABLE = 4096 };
#define KV_REGION_BYTES (1ull << 30) /* the kernel's limit for one */
#define KV_INLINE_BYTES 65536u       /* a longer transfer through the page cache is copied by a kernel thread */

#ifndef KV_SYS_SETUP /* the system calls; a test puts a kernel of its own in their place */
#define KV_SYS_SETUP(entries, params) (int)syscall(SYS_io_uring_setup, entries, params)
#define KV_SYS_ENTER(fd, submit, wait, flags) (int)syscall(SYS_io_uring_enter, fd, submit, wait, flags, NULL, 0)
#define KV_SYS_REGISTER(fd, what, arg, n) (int)syscall(SYS_io_uring_register, fd, what, arg, n)
#define KV_SYS_MMAP(size, fd, offset) mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset)
#define KV_SYS_MUNMAP(at, size) munmap(at, size)
#define KV_SYS_CLOSE(fd) close(fd)
#endif

struct kv_buffers2 { uint32_t nr, flags; uint64_t reserved, data, tags; };
struct kv_update2 { uint32_t offset, reserved; uint64_t data, tags; uint32_t nr, reserved2; };

typedef struct {
    int fd, has_buffers;
    uint32_t files, regions_top;
    uint8_t *rings;
    size_t rings_size, sqes_size;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    uint32_t *sq_tail, *sq_array, *sq_flags, *cq_head, *cq_tail;
    uint32_t sq_mask, cq_mask, tail; /* tail: ours; the kernel's copy follows in flush */
    uint32_t unsent, stalls;
    uint64_t given_bytes;
    struct { uint64_t address, nbytes; } regions[KV_REGIONS];
} kv_ring;

/* The registered region that holds all of it, or -1. */
static int kv_ring_region(const kv_ring *ring, uint64_t address, uint32_t nbytes)
{
    for (uint32_t i = 0; i < ring->regions_top; i++) {
        uint64_t into = address - ring->regions[i].address;
        if (into < ring->regions[i].nbytes && nbytes <= ring->regions[i].nbytes - into) return (int)i;
    }
    return -1;
}

static void kv_ring_give(kv_io *io, uint32_t number)
{
    static const uint8_t plain[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC};
    static const uint8_t fixed[] = {IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED};
    kv_ring *ring = io->state;
    kv_slot *slot = &io->slots[number];
    uint32_t at = ring->tail++ & ring->sq_mask;
    struct io_uring_sqe *sqe = &ring->sqes[at];
    memset(sqe, 0, sizeof *sqe);
    ring->sq_array[at] = at;
    ring->unsent++;
    sqe->user_data = number;
    sqe->opcode = plain[slot->op.kind];
    sqe->fd = slot->fd;
    if (io->files[slot->op.file].registered) {
        sqe->fd = slot->op.file;
        sqe->flags = IOSQE_FIXED_FILE;
    }
    if (slot->op.kind == KV_SYNC) {
        sqe->fsync_flags = IORING_FSYNC_DATASYNC;
        if (slot->answer) sqe->opcode = IORING_OP_NOP, sqe->flags = 0, sqe->fd = -1, sqe->fsync_flags = 0;
        return;
    }
    sqe->addr = slot->op.address + slot->done;
    sqe->off = slot->op.offset + slot->done;
    sqe->len = kv_io_ask(slot);
    int region = kv_ring_region(ring, sqe->addr, sqe->len);
    if (region >= 0) {
        sqe->opcode = fixed[slot->op.kind];
        sqe->buf_index = (uint16_t)region;
    }
    /* what the kernel could not do at once it does in a thread of its own; nor does the loop copy long transfers */
    if (slot->tries || (!slot->direct && sqe->len > KV_INLINE_BYTES)) sqe->flags |= IOSQE_ASYNC;
    ring->given_bytes += slot->op.length;
    if (ring->given_bytes > io->view.peak_bytes) io->view.peak_bytes = ring->given_bytes;
}

/* End what the kernel has not taken from the queue with -error. */
static void kv_ring_take_back(kv_io *io, int error)
{
    kv_ring *ring = io->state;
    for (; ring->unsent; ring->unsent--) {
        uint32_t number = (uint32_t)ring->sqes[--ring->tail & ring->sq_mask].user_data;
        ring->given_bytes -= io->slots[number].op.length;
        kv_io_finish_later(io, number, -(int64_t)error);
    }
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
}

static void kv_ring_flush(kv_io *io)
{
    kv_ring *ring = io->state;
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
    for (int tries = 0; ring->unsent;) {
        int taken = KV_SYS_ENTER(ring->fd, ring->unsent, 0, 0);
        io->view.enters++;
        if (taken > 0) {
            ring->unsent -= (uint32_t)taken;
            ring->stalls = 0;
            continue;
        }
        int error = taken < 0 ? errno : EAGAIN;
        if (error == EINTR && tries++ < KV_TRIES) continue;
        if (error != EINTR && error != EAGAIN && error != EBUSY) {
            kv_ring_take_back(io, error);
        } else if (io->given > ring->unsent) {
            ring->stalls = 0; /* an answer will come, and with it another try */
        } else if (ring->stalls++ >= KV_STALLS) {
            kv_ring_take_back(io, error);
        }
        if (ring->unsent && io->view.again == KV_CALM) io->view.again = KV_LATER;
        return;
    }
}

static uint32_t kv_ring_reap(kv_io *io)
{
    kv_ring *ring = io->state;
    uint32_t head = *ring->cq_head, answers = 0;
    if (__atomic_load_n(ring->sq_flags, __ATOMIC_RELAXED) & KV_CQ_OVERFLOW) {
        int refused = KV_SYS_ENTER(ring->fd, 0, 0, IORING_ENTER_GETEVENTS);
        if (refused) io->view.again = KV_LATER; /* the flag stays up until it worked */
    }
    for (uint32_t tail; head != (tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)); answers++) {
        const struct io_uring_cqe *cqe = &ring->cqes[head++ & ring->cq_mask];
        uint64_t number = cqe->user_data;
        int64_t got = cqe->res;
        __atomic_store_n(ring->cq_head, head, __ATOMIC_RELEASE);
        if (number >= io->slots_count || io->slots[number].state != SLOT_GIVEN) continue; /* not an answer of ours */
        ring->given_bytes -= io->slots[number].op.length;
        if (kv_io_step(&io->slots[number], got)) kv_io_finish(io, (uint32_t)number);
        else kv_ring_give(io, (uint32_t)number);
    }
    return answers;
}

static int kv_ring_file(kv_io *io, uint32_t number, int fd)
{
    kv_ring *ring = io->state;
    int32_t one = fd;
    struct io_uring_files_update update = {.offset = number, .fds = (uint64_t)(uintptr_t)&one};
    if (number >= ring->files) return 0;
    return KV_SYS_REGISTER(ring->fd, IORING_REGISTER_FILES_UPDATE, &update, 1) == 1;
}

static int kv_ring_set_region(kv_ring *ring, uint32_t index, uint64_t address, uint64_t nbytes)
{
    struct iovec one = {.iov_base = (void *)(uintptr_t)address, .iov_len = nbytes};
    uint64_t tag = 0;
    struct kv_update2 update = {
        .offset = index, .data = (uint64_t)(uintptr_t)&one, .tags = (uint64_t)(uintptr_t)&tag, .nr = 1};
    if (KV_SYS_REGISTER(ring->fd, KV_BUFFERS_UPDATE, &update, sizeof update) != 1) return 0;
    ring->regions[index].address = address;
    ring->regions[index].nbytes = nbytes;
    return 1;
}

/* Regions of one `kv_ring_memory` lie beside each other in memory; `nbytes` of them are forgotten from `address` on. */
static void kv_ring_forget(kv_ring *ring, uint64_t address, uint64_t nbytes)
{
    for (uint32_t i = 0; i < ring->regions_top; i++) {
        if (ring->regions[i].nbytes == 0 || ring->regions[i].address - address >= nbytes) continue;
        if (!kv_ring_set_region(ring, i, 0, 0)) ring->regions[i].nbytes = 0; /* the kernel lets go when it closes */
    }
    while (ring->regions_top && ring->regions[ring->regions_top - 1].nbytes == 0) ring->regions_top--;
}

/* Registers nbytes at address (1, or 0 when the kernel refuses), or forgets what overlaps them (forget). */
static int kv_ring_memory(kv_io *io, uint64_t address, uint64_t nbytes, int forget)
{
    kv_ring *ring = io->state;
    if (forget) {
        kv_ring_forget(ring, address, nbytes);
        return 0;
    }
    if (!ring->has_buffers) return 0;
    uint32_t index = 0;
    for (uint64_t into = 0; into < nbytes; into += KV_REGION_BYTES) {
        uint64_t piece = nbytes - into < KV_REGION_BYTES ? nbytes - into : KV_REGION_BYTES;
        while (index < ring->regions_top && ring->regions[index].nbytes) index++;
        if (index == KV_REGIONS || !kv_ring_set_region(ring, index, address + into, piece)) {
            kv_ring_forget(ring, address, into);
            return 0;
        }
        if (index == ring->regions_top) ring->regions_top++;
    }
    return 1;
}

static void kv_ring_free(kv_ring *ring)
{
    if (ring->sqes) KV_SYS_MUNMAP(ring->sqes, ring->sqes_size);
    if (ring->rings) KV_SYS_MUNMAP(ring->rings, ring->rings_size);
    if (ring->fd >= 0) KV_SYS_CLOSE(ring->fd);
    free(ring);
}

static void kv_ring_close(kv_io *io) { kv_ring_free(io->state); }

static const kv_backend kv_ring_backend = {kv_ring_give, kv_ring_flush,  kv_ring_reap,
                                           kv_ring_file, kv_ring_memory, kv_ring_close};

/* Whether the kernel has every operation that is used; its own word, not its version. */
static int kv_ring_knows(const kv_ring *ring)
{
    enum { OPS = 64 };
    static const uint8_t needed[] = {IORING_OP_NOP,        IORING_OP_READ,        IORING_OP_WRITE,
                                     IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED, IORING_OP_FSYNC};
    struct { struct io_uring_probe head; struct io_uring_probe_op ops[OPS]; } probe;
    memset(&probe, 0, sizeof probe);
    if (KV_SYS_REGISTER(ring->fd, IORING_REGISTER_PROBE, &probe, OPS)) return 0;
    for (size_t i = 0; i < sizeof needed; i++)
        if (needed[i] > probe.head.last_op || !(probe.ops[needed[i]].flags & IO_URING_OP_SUPPORTED)) return 0;
    return 1;
}

/* Tables of files and memory to fill later; without them all works the same. */
static void kv_ring_tables(kv_ring *ring)
{
    struct rlimit most;
    struct kv_buffers2 buffers = {.nr = KV_REGIONS, .flags = KV_SPARSE};
    uint32_t files = KV_FILE_TABLE;
    if (getrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_cur < files) files = (uint32_t)most.rlim_cur;
    int32_t *none = malloc((files + 1) * sizeof *none);
    if (none) {
        memset(none, 0xff, files * sizeof *none);
        if (KV_SYS_REGISTER(ring->fd, IORING_REGISTER_FILES, none, files) == 0) ring->files = files;
        free(none);
    }
    ring->has_buffers = KV_SYS_REGISTER(ring->fd, KV_BUFFERS2, &buffers, sizeof buffers) == 0;
}

static int kv_ring_map(kv_ring *ring, const struct io_uring_params *p)
{
    size_t sq = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t cq = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->rings_size = sq > cq ? sq : cq;
    ring->sqes_size = p->sq_entries * sizeof(struct io_uring_sqe);
    void *rings = KV_SYS_MMAP(ring->rings_size, ring->fd, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return -errno;
    ring->rings = rings;
    void *sqes = KV_SYS_MMAP(ring->sqes_size, ring->fd, IORING_OFF_SQES);
    if (sqes == MAP_FAILED) return -errno;
    ring->sqes = sqes;
    ring->sq_tail = (uint32_t *)(void *)(ring->rings + p->sq_off.tail);
    ring->sq_array = (uint32_t *)(void *)(ring->rings + p->sq_off.array);
    ring->sq_flags = (uint32_t *)(void *)(ring->rings + p->sq_off.flags);
    ring->sq_mask = p->sq_entries - 1;
    ring->tail = *ring->sq_tail;
    ring->cq_head = (uint32_t *)(void *)(ring->rings + p->cq_off.head);
    ring->cq_tail = (uint32_t *)(void *)(ring->rings + p->cq_off.tail);
    ring->cqes = (struct io_uring_cqe *)(void *)(ring->rings + p->cq_off.cqes);
    ring->cq_mask = p->cq_entries - 1;
    return 0;
}

/* 0, or -errno; -ENOSYS when the kernel's io_uring is older than 5.6. */
static int kv_ring_open(kv_io *io, uint32_t entries)
{
    struct io_uring_params params;
    kv_ring *ring = calloc(1, sizeof *ring);
    int failed = 0;
    if (!ring) return -ENOMEM;
    for (uint32_t flags = KV_SUBMIT_ALL | KV_COOP_TASKRUN;; flags = 0) {
        memset(&params, 0, sizeof params);
        params.flags = flags | IORING_SETUP_CLAMP;
        ring->fd = KV_SYS_SETUP(entries, &params);
        if (ring->fd >= 0 || errno != EINVAL || flags == 0) break;
    }
    if (ring->fd < 0) failed = -errno;
    else if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_NODROP)) failed = -ENOSYS;
    else if (!kv_ring_knows(ring)) failed = -ENOSYS;
    else failed = kv_ring_map(ring, &params);
    if (failed) {
        kv_ring_free(ring);
        return failed;
    }
    kv_ring_tables(ring);
    io->backend = &kv_ring_backend;
    io->state = ring;
    io->view.fd = ring->fd;
    io->given_max = params.sq_entries;
    return 0;
}
#else
static int kv_ring_open(kv_io *io, uint32_t entries)
{
    (void)io, (void)entries;
    return -ENOSYS; /* built without the kernel's headers */
}
#endif
