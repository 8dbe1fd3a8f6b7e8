/* A kernel's io_uring in the process: takes what is submitted in pieces, answers late, out of order, shortly or with
 * errors, and checks what it is asked. Included before uring.c, whose system calls it stands in for.
 *
 * Invariants: the bytes of a file are `double_files[fd].bytes`; memory is touched only between taking a request and its
 * answer; a ring that is closed with requests held, or asked for more bytes than it may have, ends the test.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define CHECK(what)                                                              \
    do {                                                                         \
        if (!(what)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #what); \
            abort();                                                             \
        }                                                                        \
    } while (0)

enum { DOUBLE_ENTRIES = 16, DOUBLE_FILES = 2, DOUBLE_TABLE = 8192, DOUBLE_BUFFERS = 1024, FILE_ROOM = 64 * 4096 };

static uint64_t rng_state;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}

static int chance(unsigned percent) { return rng() % 100 < percent; }

typedef struct { uint8_t bytes[FILE_ROOM]; size_t size; int fd, direct; } double_file;
static double_file double_files[DOUBLE_FILES];

static struct {
    uint32_t sq_head, sq_tail, sq_flags, cq_head, cq_tail, array[DOUBLE_ENTRIES];
    struct io_uring_cqe cqes[2 * DOUBLE_ENTRIES];
} shared; /* what the ring maps */

static struct {
    int open, mapped, table_made, buffers_made;
    int always;               /* every io_uring_enter fails with it */
    uint64_t cap;
    struct io_uring_sqe sqes[DOUBLE_ENTRIES], held[DOUBLE_ENTRIES];
    uint32_t held_count;
    struct io_uring_cqe backlog[DOUBLE_ENTRIES];
    uint32_t backlog_count;
    int32_t table[DOUBLE_TABLE];
    struct iovec buffers[DOUBLE_BUFFERS];
    uint8_t odd[1 << 16];     /* by user_data: the last answer ended at an odd place */
    unsigned overflows, partial;
} kernel;

static int fail_with(int error)
{
    errno = error;
    return -1;
}

static int double_setup(unsigned entries, struct io_uring_params *p)
{
    CHECK(!kernel.open && entries >= DOUBLE_ENTRIES);
    if (p->flags & ~(uint32_t)IORING_SETUP_CLAMP) return fail_with(EINVAL); /* an old kernel */
    memset(&kernel, 0, sizeof kernel);
    memset(&shared, 0, sizeof shared);
    shared.sq_head = shared.sq_tail = 0xfffffff8u; /* the counters wrap */
    shared.cq_head = shared.cq_tail = 0xfffffff0u;
    kernel.open = 1;
    p->sq_entries = DOUBLE_ENTRIES;
    p->cq_entries = 2 * DOUBLE_ENTRIES;
    p->features = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
    p->sq_off.head = 0;
    p->sq_off.tail = 4;
    p->sq_off.flags = 8;
    p->cq_off.head = 12;
    p->cq_off.tail = 16;
    p->sq_off.array = 20;
    p->cq_off.cqes = (uint32_t)((uint8_t *)shared.cqes - (uint8_t *)&shared);
    return 1000;
}

static void *double_mmap(size_t size, int fd, uint64_t offset)
{
    CHECK(fd == 1000 && kernel.open);
    kernel.mapped++;
    if (offset == IORING_OFF_SQES) {
        CHECK(size == sizeof kernel.sqes);
        return kernel.sqes;
    }
    CHECK(offset == IORING_OFF_SQ_RING && size <= sizeof shared);
    return &shared;
}

static int double_munmap(void *at, size_t size)
{
    CHECK(at && size);
    kernel.mapped--;
    return 0;
}

static int double_close(int fd)
{
    CHECK(fd == 1000 && kernel.open && kernel.held_count == 0 && kernel.mapped == 0);
    kernel.open = 0;
    return 0;
}

static int double_register(int fd, unsigned what, void *argument, unsigned n)
{
    CHECK(fd == 1000 && kernel.open);
    if (what == IORING_REGISTER_PROBE) {
        struct io_uring_probe *probe = argument;
        probe->last_op = (uint8_t)(n - 1);
        for (unsigned i = 0; i < n; i++) probe->ops[i].flags = IO_URING_OP_SUPPORTED;
        return 0;
    }
    if (what == IORING_REGISTER_FILES) {
        CHECK(n <= DOUBLE_TABLE);
        memcpy(kernel.table, argument, n * sizeof(int32_t));
        kernel.table_made = 1;
        return 0;
    }
    if (what == IORING_REGISTER_FILES_UPDATE) {
        struct io_uring_files_update *update = argument;
        CHECK(kernel.table_made && n == 1 && update->offset < DOUBLE_TABLE);
        kernel.table[update->offset] = *(int32_t *)(uintptr_t)update->fds;
        return 1;
    }
    if (what == 15) { /* a sparse table of buffers */
        kernel.buffers_made = 1;
        return 0;
    }
    struct { uint32_t offset, reserved; uint64_t data, tags; uint32_t nr, reserved2; } *update = argument;
    CHECK(what == 16 && kernel.buffers_made && update->nr == 1 && update->offset < DOUBLE_BUFFERS);
    if (chance(20) && ((struct iovec *)(uintptr_t)update->data)->iov_len) return fail_with(ENOMEM);
    kernel.buffers[update->offset] = *(struct iovec *)(uintptr_t)update->data;
    return 1;
}

static void post(const struct io_uring_cqe *answer)
{
    CHECK(shared.cq_tail - __atomic_load_n(&shared.cq_head, __ATOMIC_ACQUIRE) < 2 * DOUBLE_ENTRIES);
    shared.cqes[shared.cq_tail & (2 * DOUBLE_ENTRIES - 1)] = *answer;
    __atomic_store_n(&shared.cq_tail, shared.cq_tail + 1, __ATOMIC_RELEASE);
}

static double_file *file_of(const struct io_uring_sqe *ask)
{
    int fd = ask->fd;
    if (ask->flags & IOSQE_FIXED_FILE) {
        CHECK(fd >= 0 && fd < DOUBLE_TABLE);
        fd = kernel.table[fd];
    }
    for (int i = 0; i < DOUBLE_FILES; i++)
        if (double_files[i].fd == fd) return &double_files[i];
    CHECK(!"a file that was attached");
    return NULL;
}

/* How much of `want` bytes is moved this time: a direct transfer stops at sectors, and not twice at the same one. */
static size_t shortened(size_t want, int direct, uint8_t *odd)
{
    size_t got = want;
    if (want == 0) return 0;
    if (chance(30)) got = direct ? rng() % (want / 512 + 1) * 512 : 1 + rng() % want;
    if (got > want || (direct && got == 0) || (direct && got % 4096 && *odd)) got = want;
    *odd = direct && got % 4096 != 0;
    return got;
}

static int32_t perform(const struct io_uring_sqe *ask)
{
    if (ask->opcode == IORING_OP_NOP) return 0;
    double_file *file = file_of(ask);
    if (ask->opcode == IORING_OP_FSYNC) {
        CHECK(ask->fsync_flags == IORING_FSYNC_DATASYNC);
        return chance(4) ? -EIO : 0;
    }
    int is_read = ask->opcode == IORING_OP_READ || ask->opcode == IORING_OP_READ_FIXED;
    if (ask->opcode == IORING_OP_READ_FIXED || ask->opcode == IORING_OP_WRITE_FIXED) {
        struct iovec *in = &kernel.buffers[ask->buf_index];
        CHECK(ask->addr >= (uintptr_t)in->iov_base);
        CHECK(ask->addr + ask->len <= (uintptr_t)in->iov_base + in->iov_len);
    }
    if (file->direct && ((ask->addr | ask->off | ask->len) & 4095)) return -EINVAL;
    if (chance(8)) return chance(20) ? -EIO : chance(50) ? -EAGAIN : -EINTR;
    uint64_t room = is_read ? file->size : FILE_ROOM;
    size_t most = ask->off >= room ? 0 : room - ask->off < ask->len ? (size_t)(room - ask->off) : ask->len;
    size_t got = shortened(most, file->direct, &kernel.odd[ask->user_data & 0xffff]);
    uint8_t *memory = (uint8_t *)(uintptr_t)ask->addr;
    if (is_read) memcpy(memory, file->bytes + ask->off, got);
    else memcpy(file->bytes + ask->off, memory, got);
    return (int32_t)got;
}

/* Answer some of what is held, in any order. */
static void double_work(unsigned percent)
{
    for (uint32_t i = 0; i < kernel.held_count;) {
        uint32_t which = i + (uint32_t)(rng() % (kernel.held_count - i));
        struct io_uring_sqe ask = kernel.held[which];
        if (!chance(percent)) {
            i++;
            continue;
        }
        kernel.held[which] = kernel.held[--kernel.held_count];
        struct io_uring_cqe answer = {.user_data = ask.user_data, .res = perform(&ask)};
        if (kernel.backlog_count || (chance(5))) { /* as though the queue were full */
            kernel.backlog[kernel.backlog_count++] = answer;
            __atomic_store_n(&shared.sq_flags, 2, __ATOMIC_RELAXED);
            kernel.overflows++;
        } else {
            post(&answer);
        }
    }
}

static int double_enter(int fd, unsigned submit, unsigned wait, unsigned flags)
{
    CHECK(fd == 1000 && kernel.open && wait == 0);
    if (kernel.always) return fail_with(kernel.always);
    if (flags & IORING_ENTER_GETEVENTS) {
        CHECK(submit == 0);
        for (uint32_t i = 0; i < kernel.backlog_count; i++) post(&kernel.backlog[i]);
        kernel.backlog_count = 0;
        shared.sq_flags = 0;
        return 0;
    }
    CHECK(submit > 0 && submit == __atomic_load_n(&shared.sq_tail, __ATOMIC_ACQUIRE) - shared.sq_head);
    if (chance(15)) {
        static const int errors[] = {EINTR, EAGAIN, EBUSY, EPERM};
        return fail_with(errors[chance(3) ? 3 : rng() % 3]);
    }
    unsigned taken = chance(25) ? (unsigned)(rng() % submit) : submit;
    kernel.partial += taken < submit;
    for (unsigned i = 0; i < taken; i++, shared.sq_head++) {
        struct io_uring_sqe ask = kernel.sqes[shared.array[shared.sq_head & (DOUBLE_ENTRIES - 1)]];
        CHECK(kernel.held_count < DOUBLE_ENTRIES);
        for (uint32_t h = 0; h < kernel.held_count; h++) CHECK(kernel.held[h].user_data != ask.user_data);
        kernel.held[kernel.held_count++] = ask;
    }
    uint64_t bytes = 0, moves = 0;
    for (uint32_t h = 0; h < kernel.held_count; h++) {
        if (kernel.held[h].opcode == IORING_OP_FSYNC) continue;
        bytes += kernel.held[h].len;
        moves++;
    }
    CHECK(bytes <= kernel.cap || moves == 1);
    if (chance(40)) double_work(50); /* some answers come before the call returns */
    return (int)taken;
}

#define KV_SYS_SETUP(entries, params) double_setup(entries, params)
#define KV_SYS_ENTER(fd, submit, wait, flags) double_enter(fd, submit, wait, flags)
#define KV_SYS_REGISTER(fd, what, arg, n) double_register(fd, what, arg, n)
#define KV_SYS_MMAP(size, fd, offset) double_mmap(size, fd, offset)
#define KV_SYS_MUNMAP(at, size) double_munmap(at, size)
#define KV_SYS_CLOSE(fd) double_close(fd)
