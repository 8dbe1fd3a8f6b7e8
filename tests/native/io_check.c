/* Drives the io engines under sanitizers: the ring on a kernel of the test's own, which answers late, shortly and with
 * errors; the threads on system calls that do the same. Every buffer has exactly its length on the heap, and every
 * batch is checked against what its file holds.
 *
 *   io_check SEED ROUNDS
 *
 * Exit code 0: everything held. Built by scripts/sanitize.sh.
 */
#include "uring_double.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t pool_cap, pool_bytes, pool_moves;

/* One system call of a worker: errors and short answers as the ring's. */
static ssize_t pool_move(int fd, void *at, size_t n, off_t offset, int is_read)
{
    static uint8_t odd;
    ssize_t got = -1;
    pthread_mutex_lock(&pool_lock);
    pool_bytes += n;
    pool_moves++;
    CHECK(pool_bytes <= pool_cap || pool_moves == 1);
    pthread_mutex_unlock(&pool_lock); /* others move meanwhile */
    sched_yield();
    pthread_mutex_lock(&pool_lock);
    double_file *file = fd == double_files[0].fd ? &double_files[0] : &double_files[1];
    CHECK(fd == file->fd && (!file->direct || (((uintptr_t)at | n | (uint64_t)offset) & 4095) == 0));
    int error = chance(8) ? (chance(20) ? EIO : EINTR) : 0;
    if (!error) {
        size_t room = is_read ? file->size : FILE_ROOM;
        size_t most = (size_t)offset >= room ? 0 : room - (size_t)offset < n ? room - (size_t)offset : n;
        /* the answer of another worker's in between resets `odd`: an odd place is answered twice at the file's end only */
        size_t fit = shortened(most, file->direct, &odd);
        if (file->direct && fit != most) fit = fit / 4096 ? fit / 4096 * 4096 : most;
        got = (ssize_t)fit;
        if (is_read) memcpy(at, file->bytes + offset, fit);
        else memcpy(file->bytes + offset, at, fit);
    }
    pool_bytes -= n;
    pool_moves--;
    pthread_mutex_unlock(&pool_lock);
    errno = error;
    return got;
}

static int pool_sync(void)
{
    pthread_mutex_lock(&pool_lock);
    int failed = chance(4);
    pthread_mutex_unlock(&pool_lock);
    errno = EIO;
    return failed ? -1 : 0;
}

#define KV_SYS_PREAD(fd, at, n, offset) pool_move(fd, at, n, offset, 1)
#define KV_SYS_PWRITE(fd, at, n, offset) pool_move(fd, (void *)(uintptr_t)(at), n, offset, 0)
#define KV_SYS_FDATASYNC(fd) pool_sync()

#include "../../tiers/uring.c"
#include "../../tiers/workers.c"
#include "../../tiers/io.c"

enum {
    MAX_OPS = 40, BATCHES = MAX_OPS + KV_SYNCS, LONGEST = 12, PAGES = FILE_ROOM / 4096,
    CHUNK = 32 * 1024, CHUNKS = 16, ARENA = CHUNK * CHUNKS, BORDER = CHUNK * 5 + 4096 /* between two registered regions */
};

typedef struct {
    int used, is_sync, file;
    uint32_t n;
    kv_io_op ops[LONGEST];
    uint8_t *buffers[LONGEST];
    int64_t *results;
} batch;

typedef struct {
    kv_io *io;
    int file[DOUBLE_FILES], fenced[DOUBLE_FILES], busy[DOUBLE_FILES][PAGES]; /* readers, or -1: a writer */
    batch batches[BATCHES];
    uint8_t *arena, chunk_used[CHUNKS];
    uint64_t finished, failed;
} harness;

static uint64_t random_locked(void)
{
    pthread_mutex_lock(&pool_lock);
    uint64_t found = rng();
    pthread_mutex_unlock(&pool_lock);
    return found;
}

static int chance_locked(unsigned percent) { return random_locked() % 100 < percent; }

static void attach_file(harness *h, int which)
{
    h->file[which] = kv_io_attach(h->io, double_files[which].fd, double_files[which].direct);
    CHECK(h->file[which] >= 0);
    h->fenced[which] = 0;
}

/* Memory for one operation: exactly its length on the heap, or a chunk of the arena, part of which is registered. */
static uint8_t *take_memory(harness *h, uint32_t length, int direct)
{
    uint32_t chunk = (uint32_t)(random_locked() % CHUNKS);
    if (chance_locked(30) && !h->chunk_used[chunk]) {
        h->chunk_used[chunk] = 1;
        return h->arena + (size_t)chunk * CHUNK;
    }
    uint8_t *memory = direct ? aligned_alloc(4096, length + (length == 0) * 4096u) : malloc(length + (length == 0));
    CHECK(memory);
    return memory;
}

static void give_memory(harness *h, uint8_t *memory)
{
    size_t into = (size_t)((uintptr_t)memory - (uintptr_t)h->arena);
    if (into < ARENA) h->chunk_used[into / CHUNK] = 0;
    else free(memory);
}

/* One operation that nobody else's writes touch; 0 when the pages drawn are in use. */
static int draw(harness *h, batch *b, int which)
{
    int write = chance_locked(50), direct = double_files[which].direct;
    uint64_t unit = direct ? 4096 : 1, places = FILE_ROOM / unit;
    uint64_t offset = random_locked() % places * unit;
    uint32_t length = (uint32_t)((random_locked() % (direct ? 6 : 20000)) * unit);
    if (offset + length > FILE_ROOM) length = (uint32_t)(FILE_ROOM - offset);
    if (write && offset + length > double_files[which].size / 4096 * 4096) return 0; /* its end stays where it is */
    uint64_t last = length ? (offset + length - 1) / 4096 : offset / 4096;
    for (uint64_t p = offset / 4096; p <= last; p++)
        if (h->busy[which][p] < 0 || (write && h->busy[which][p])) return 0;
    for (uint64_t p = offset / 4096; p <= last; p++) h->busy[which][p] += write ? -1 : 1;
    uint8_t *memory = take_memory(h, length, direct);
    for (uint32_t i = 0; i < length; i++) memory[i] = (uint8_t)(write ? offset + i * 7 + b->n : 0xEE);
    b->buffers[b->n] = memory;
    kv_io_op op = {(uintptr_t)memory, offset, length, (uint16_t)h->file[which], (uint16_t)write};
    b->ops[b->n++] = op;
    return 1;
}

static void release(harness *h, batch *b)
{
    for (uint32_t i = 0; i < b->n; i++) {
        kv_io_op *op = &b->ops[i];
        uint64_t last = op->length ? (op->offset + op->length - 1) / 4096 : op->offset / 4096;
        for (uint64_t p = op->offset / 4096; p <= last; p++) h->busy[b->file][p] += op->kind ? 1 : -1;
        give_memory(h, b->buffers[i]);
    }
    free(b->results);
    memset(b, 0, sizeof *b);
}

static void check_batch(harness *h, batch *b)
{
    double_file *file = &double_files[b->file];
    for (uint32_t i = 0; i < b->n; i++) {
        kv_io_op *op = &b->ops[i];
        int64_t got = b->results[i];
        h->failed += got < 0;
        h->finished++;
        if (got < 0) {
            CHECK(got == -EIO || got == -EPERM || got == -EAGAIN || got == -EINTR || got == -EBUSY);
            continue;
        }
        uint64_t want = op->length;
        if (op->kind == KV_READ && op->offset + want > file->size)
            want = op->offset >= file->size ? 0 : file->size - op->offset;
        CHECK((uint64_t)got == want);
        pthread_mutex_lock(&pool_lock);
        CHECK(memcmp(b->buffers[i], file->bytes + op->offset, (size_t)want) == 0);
        pthread_mutex_unlock(&pool_lock);
    }
    if (b->is_sync && b->results[0] < 0) {
        CHECK(h->io->files[h->file[b->file]].fenced == -b->results[0]);
        h->fenced[b->file] = 1;
    }
}

static void drain(harness *h)
{
    for (uint32_t i = 0, n = kv_io_drain(h->io); i < n; i++) {
        batch *b = &h->batches[h->io->view.done[i]];
        CHECK(b->used);
        check_batch(h, b);
        release(h, b);
    }
}

static int writes(const batch *b)
{
    uint32_t found = b->is_sync;
    for (uint32_t i = 0; i < b->n; i++) found |= b->ops[i].kind == KV_WRITE;
    return found != 0;
}

static void submit(harness *h)
{
    batch b = {.used = 1, .file = (int)(random_locked() % DOUBLE_FILES), .is_sync = chance_locked(15)};
    int number;
    for (uint32_t want = 1 + (uint32_t)(random_locked() % LONGEST); !b.is_sync && want; want--) draw(h, &b, b.file);
    if (!b.is_sync && !b.n) return;
    b.results = malloc((b.is_sync ? 1 : b.n) * sizeof(int64_t));
    CHECK(b.results);
    if (b.is_sync) number = kv_io_sync(h->io, (uint32_t)h->file[b.file], b.results);
    else number = kv_io_submit(h->io, b.ops, b.n, b.results);
    if (number < 0) {
        CHECK(number == KV_FENCED ? h->fenced[b.file] : number == KV_BUSY);
        release(h, &b);
        return;
    }
    CHECK(!h->fenced[b.file] || !writes(&b));
    CHECK(number < BATCHES && !h->batches[number].used);
    h->batches[number] = b;
}

static void run(const char *name, kv_io *io, int is_ring, unsigned steps)
{
    static harness h;
    memset(&h, 0, sizeof h);
    h.io = io;
    CHECK(io);
    for (int i = 0; i < DOUBLE_FILES; i++) attach_file(&h, i);
    uint64_t arena = (uintptr_t)(h.arena = aligned_alloc(4096, ARENA));
    int pinned[] = {kv_io_register(io, arena, BORDER), kv_io_register(io, arena + BORDER, ARENA - BORDER)};
    CHECK(is_ring || !pinned[0]);
    for (unsigned s = 0; s < steps; s++) {
        submit(&h);
        if (is_ring && chance(60)) double_work(40);
        if (chance_locked(50)) drain(&h);
        for (int i = 0; i < DOUBLE_FILES; i++) {
            if (!h.fenced[i] || h.io->files[h.file[i]].uses) continue;
            CHECK(kv_io_detach(io, (uint32_t)h.file[i]) == 0);
            attach_file(&h, i);
        }
    }
    while (io->view.pending) {
        CHECK(kv_io_close(io) == KV_BUSY);
        if (is_ring) double_work(60);
        else if (io->view.again == KV_CALM)
            CHECK(poll(&(struct pollfd){.fd = io->view.fd, .events = POLLIN}, 1, 60000) == 1);
        drain(&h);
    }
    if (pinned[0]) kv_io_unregister(io, arena, BORDER);
    if (pinned[1]) kv_io_unregister(io, arena + BORDER, ARENA - BORDER);
    free(h.arena);
    CHECK(io->free_slots == io->slots_count && io->given == 0 && io->given_bytes == 0);
    CHECK(h.failed < h.finished);
    fprintf(stderr, "io_check: %s, %llu operations, %llu failed\n", name, (unsigned long long)h.finished,
            (unsigned long long)h.failed);
    CHECK(kv_io_close(io) == 0);
}

/* A kernel that never has memory for an operation: the batch ends all the same. */
static void check_stall(void)
{
    int32_t error;
    int64_t result = 1;
    uint8_t *memory = malloc(100);
    kv_io *io = kv_io_open_uring(4, 1000, DOUBLE_ENTRIES, &error);
    CHECK(io && memory);
    kernel.always = EAGAIN;
    kv_io_op op = {(uintptr_t)memory, 0, 100, (uint16_t)kv_io_attach(io, double_files[0].fd, 0), KV_READ};
    CHECK(kv_io_submit(io, &op, 1, &result) >= 0 && io->view.again == KV_LATER);
    unsigned asked = 0;
    while (kv_io_drain(io) == 0) CHECK(io->view.again != KV_CALM && asked++ < 2 * KV_STALLS);
    CHECK(result == -EAGAIN && io->view.pending == 0);
    kernel.always = 0;
    free(memory);
    CHECK(kv_io_close(io) == 0);
}

int main(int argc, char **argv)
{
    unsigned rounds = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 0) : 20;
    uint64_t cap = 96 * 1024;
    int32_t error;
    rng_state = (argc > 1 ? strtoull(argv[1], NULL, 0) : 1) * 2 + 1;
    for (int i = 0; i < DOUBLE_FILES; i++) {
        double_files[i].fd = memfd_create("io_check", MFD_CLOEXEC);
        double_files[i].direct = i;
        double_files[i].size = FILE_ROOM - 4096 + (i ? 777 : 3);
        CHECK(double_files[i].fd >= 0);
        for (size_t at = 0; at < FILE_ROOM; at++) double_files[i].bytes[at] = (uint8_t)rng();
    }
    unsigned overflows = 0, partial = 0;
    for (unsigned r = 0; r < rounds; r++) {
        kv_io *ring = kv_io_open_uring(MAX_OPS, cap, DOUBLE_ENTRIES, &error);
        kernel.cap = cap;
        run("ring", ring, 1, 400);
        overflows += kernel.overflows;
        partial += kernel.partial;
        pool_cap = cap;
        run("threads", kv_io_open_threads(MAX_OPS, cap, 4, &error), 0, 1000);
    }
    CHECK(overflows > 0 && partial > 0);
    check_stall();
    puts("io_check: ok");
    return 0;
}
