/* Io engines: which operations wait, which are with the kernel, what an answer means, when a batch is done. */
#include "io.h"

#include <sys/stat.h>

static void kv_io_free(kv_io *io)
{
    free(io->slots);
    free(io->batches);
    free(io->files);
    free(io->view.done);
    free(io);
}

/* Tables for max_ops operations and KV_SYNCS syncs; NULL when memory is short. */
static kv_io *kv_io_new(uint32_t max_ops, uint64_t cap)
{
    kv_io *io = calloc(1, sizeof *io);
    uint32_t slots = max_ops + KV_SYNCS;
    if (!io) return NULL;
    io->slots = calloc(slots, sizeof *io->slots);
    io->batches = calloc(slots, sizeof *io->batches);
    io->files = calloc(KV_FILES, sizeof *io->files);
    io->view.done = calloc(slots, sizeof *io->view.done);
    if (!io->slots || !io->batches || !io->files || !io->view.done) {
        kv_io_free(io);
        return NULL;
    }
    for (uint32_t i = 0; i < slots; i++) io->slots[i].next = io->batches[i].next = i + 1 < slots ? i + 1 : KV_NONE;
    io->max_ops = max_ops;
    io->slots_count = io->free_slots = slots;
    io->cap = cap;
    io->view.fd = -1;
    io->waiting.head = io->finished.head = KV_NONE;
    return io;
}

static kv_io_view *kv_io_look(kv_io *io) { return &io->view; }

/* Only when nothing is pending: the kernel may write to memory until then. */
static int kv_io_close(kv_io *io)
{
    if (io->view.pending) return KV_BUSY;
    io->backend->close(io);
    kv_io_free(io);
    return 0;
}

/* A number for a regular file or a block device, or -errno; -EMFILE when all are taken. */
static int kv_io_attach(kv_io *io, int fd, int direct)
{
    struct stat is;
    uint32_t number = 0;
    if (fstat(fd, &is)) return -errno;
    if (!S_ISREG(is.st_mode) && !S_ISBLK(is.st_mode)) return -ESPIPE; /* a pipe could keep a transfer for ever */
    while (number < io->files_top && io->files[number].fd_plus_one) number++;
    if (number == KV_FILES) return -EMFILE;
    if (number == io->files_top) io->files_top++;
    kv_file fresh = {.fd_plus_one = (uint32_t)fd + 1, .direct = direct != 0};
    io->files[number] = fresh;
    io->files[number].registered = io->backend->file(io, number, fd) == 1;
    return (int)number;
}

static int kv_io_knows(const kv_io *io, uint32_t file) { return file < KV_FILES && io->files[file].fd_plus_one != 0; }

static int kv_io_detach(kv_io *io, uint32_t file)
{
    if (!kv_io_knows(io, file)) return KV_UNKNOWN_FILE;
    if (io->files[file].uses) return KV_BUSY;
    if (io->files[file].registered) io->backend->file(io, file, -1);
    memset(&io->files[file], 0, sizeof io->files[file]);
    return 0;
}

/* 1 registered, 0 the kernel refuses */
static int kv_io_register(kv_io *io, uint64_t address, uint64_t nbytes)
{
    return io->backend->memory(io, address, nbytes, 0) == 1;
}

/* Whether an operation that is not done uses some of the memory. */
static int kv_io_uses(const kv_io *io, uint64_t address, uint64_t nbytes)
{
    for (uint32_t i = 0; i < io->slots_count; i++) {
        const kv_slot *slot = &io->slots[i];
        if (slot->state == SLOT_FREE || slot->op.kind == KV_SYNC) continue;
        if (slot->op.address < address + nbytes && address < slot->op.address + slot->op.length) return 1;
    }
    return 0;
}

static void kv_io_unregister(kv_io *io, uint64_t address, uint64_t nbytes) { io->backend->memory(io, address, nbytes, 1); }

/* ---- starting */

static uint32_t kv_io_take_slot(kv_io *io, const kv_io_op *op, uint32_t batch, uint32_t index)
{
    uint32_t number = io->free_slot;
    kv_slot *slot = &io->slots[number];
    const kv_file *file = &io->files[op->file];
    io->free_slot = slot->next;
    io->free_slots--;
    memset(slot, 0, sizeof *slot);
    slot->op = *op;
    slot->batch = batch;
    slot->index = index;
    slot->fd = (int32_t)(file->fd_plus_one - 1);
    slot->direct = file->direct;
    slot->state = SLOT_WAITING;
    slot->ask_at_most = io->view.ask_at_most;
    slot->answer = op->kind == KV_SYNC ? io->view.sync_answer : io->view.transfer_answer;
    io->files[op->file].uses++;
    io->view.pending++;
    return number;
}

static uint32_t kv_io_take_batch(kv_io *io, int64_t *results, uint32_t count)
{
    uint32_t number = io->free_batch;
    io->free_batch = io->batches[number].next;
    io->batches[number].results = results;
    io->batches[number].left = count;
    return number;
}

/* Give what waits to the kernel, in order, while there is room for it. */
static void kv_io_start(kv_io *io)
{
    while (io->waiting.head != KV_NONE && io->given < io->given_max) {
        uint32_t number = io->waiting.head;
        kv_slot *slot = &io->slots[number];
        int32_t fenced = slot->op.kind == KV_READ ? 0 : io->files[slot->op.file].fenced;
        int nothing = slot->op.kind != KV_SYNC && slot->op.length == 0;
        int fits = slot->op.kind == KV_SYNC || !io->given || io->given_bytes + slot->op.length <= io->cap;
        if (!fenced && !nothing && !fits) break;
        kv_list_take(io->slots, &io->waiting);
        if (fenced || nothing) {
            kv_io_finish_later(io, number, -(int64_t)fenced);
            continue;
        }
        slot->state = SLOT_GIVEN;
        io->given++;
        io->given_bytes += slot->op.length;
        io->backend->give(io, number);
    }
    io->backend->flush(io);
}

static int kv_io_check(kv_io *io, const kv_io_op *op)
{
    if (!kv_io_knows(io, op->file)) return KV_UNKNOWN_FILE;
    const kv_file *file = &io->files[op->file];
    if (op->kind > KV_WRITE) return KV_UNKNOWN_KIND;
    if (op->offset > (uint64_t)INT64_MAX - op->length || op->address > UINT64_MAX - op->length) return KV_BEYOND;
    if (file->direct && ((op->address | op->offset | op->length) & (KV_ALIGNMENT - 1))) return KV_MISALIGNED;
    if (op->kind == KV_WRITE && file->fenced) {
        io->view.bad_errno = file->fenced;
        return KV_FENCED;
    }
    return 0;
}

/* Start n operations whose results go to results[n], which is kept until the batch is done. The batch's number, or why
 * nothing was started. */
static int kv_io_submit(kv_io *io, const kv_io_op *ops, uint32_t n, int64_t *results)
{
    if (n == 0 || n > io->max_ops) return KV_TOO_MANY;
    for (uint32_t i = 0; i < n; i++) {
        int refused = kv_io_check(io, &ops[i]);
        io->view.bad = i;
        if (refused) return refused;
    }
    if (io->free_slots < n + KV_SYNCS) return KV_BUSY;
    uint32_t batch = kv_io_take_batch(io, results, n);
    for (uint32_t i = 0; i < n; i++)
        kv_list_add(io->slots, &io->waiting, kv_io_take_slot(io, &ops[i], batch, i));
    kv_io_start(io);
    return (int)batch;
}

/* Start an fdatasync, before whatever waits: it covers only what is done. */
static int kv_io_sync(kv_io *io, uint32_t file, int64_t *results)
{
    if (!kv_io_knows(io, file)) return KV_UNKNOWN_FILE;
    if (io->files[file].fenced) {
        io->view.bad_errno = io->files[file].fenced;
        return KV_FENCED;
    }
    if (!io->free_slots) return KV_BUSY;
    kv_io_op op = {.file = (uint16_t)file, .kind = KV_SYNC};
    uint32_t batch = kv_io_take_batch(io, results, 1);
    uint32_t number = kv_io_take_slot(io, &op, batch, 0);
    if (io->waiting.head == KV_NONE) io->waiting.tail = number;
    io->slots[number].next = io->waiting.head;
    io->waiting.head = number;
    kv_io_start(io);
    return (int)batch;
}

/* ---- ending */

/* What the kernel's answer means: 1 the operation is over and has its result, 0 it must be asked again. */
static int kv_io_step(kv_slot *slot, int64_t got)
{
    if (slot->answer) got = slot->answer;
    slot->result = got;
    if (slot->op.kind == KV_SYNC) { /* a sync that failed, for whatever reason, is not asked again */
        if (got > 0) slot->result = 0;
        return 1;
    }
    if (got == -EINTR || got == -EAGAIN) return slot->tries++ >= KV_TRIES;
    if (got < 0) return 1;
    uint32_t total = slot->done + (uint32_t)got;
    slot->result = total;
    if (total >= slot->op.length) return 1;
    if (got == 0 && slot->op.kind == KV_READ) return 1; /* the end of the file */
    if (got == 0 && slot->tries++ >= KV_TRIES) {
        slot->result = -EIO;
        return 1;
    }
    /* A direct transfer goes on where it is aligned. When a read ends at the same odd place again, the file does. */
    if (slot->direct && total % KV_ALIGNMENT) {
        if (slot->op.kind == KV_READ && total == slot->seen) return 1;
        if (slot->tries++ >= KV_TRIES) {
            slot->result = -EIO;
            return 1;
        }
        slot->seen = total;
        total -= total % KV_ALIGNMENT;
    }
    slot->done = total;
    return 0;
}

static void kv_io_release(kv_io *io, uint32_t number)
{
    kv_slot *slot = &io->slots[number];
    kv_file *file = &io->files[slot->op.file];
    kv_batch *batch = &io->batches[slot->batch];
    file->uses--;
    io->view.pending--;
    if (slot->op.kind == KV_SYNC && slot->result < 0 && !file->fenced) file->fenced = (int32_t)-slot->result;
    batch->results[slot->index] = slot->result;
    if (--batch->left == 0) {
        io->view.done[io->done_count++] = slot->batch;
        batch->next = io->free_batch;
        io->free_batch = slot->batch;
    }
    slot->state = SLOT_FREE;
    slot->next = io->free_slot;
    io->free_slot = number;
    io->free_slots++;
}

/* The kernel is through with a slot that was given. During a drain only. */
static void kv_io_finish(kv_io *io, uint32_t number)
{
    io->given--;
    io->given_bytes -= io->slots[number].op.length;
    kv_io_release(io, number);
}

/* An operation that the kernel does not have ends with `result` at the next drain. */
static void kv_io_finish_later(kv_io *io, uint32_t number, int64_t result)
{
    kv_slot *slot = &io->slots[number];
    if (slot->state == SLOT_GIVEN) {
        io->given--;
        io->given_bytes -= slot->op.length;
    }
    slot->result = result;
    slot->state = SLOT_FINISHED;
    kv_list_add(io->slots, &io->finished, number);
    io->view.again = KV_SOON;
}

/* Take what the kernel has finished, go on with what is short, start what waits. How many batches are done; their
 * numbers are in view.done and may be given again by the next submit. */
static uint32_t kv_io_drain(kv_io *io)
{
    io->done_count = 0;
    io->view.again = KV_CALM;
    for (int pass = 0; pass < 4; pass++) {
        uint32_t answers = io->backend->reap(io);
        for (uint32_t number; (number = kv_list_take(io->slots, &io->finished)) != KV_NONE; answers++)
            kv_io_release(io, number);
        if (io->view.again == KV_SOON) io->view.again = KV_CALM;
        kv_io_start(io);
        if (!answers) break;
    }
    return io->done_count;
}

/* ---- opening */

static kv_io *kv_io_opened(kv_io *io, int failed, int32_t *error)
{
    *error = -failed;
    if (io && !failed) return io;
    if (io) kv_io_free(io);
    return NULL;
}

/* An engine on io_uring with room for `entries` operations in the kernel; NULL and an errno. */
static kv_io *kv_io_open_uring(uint32_t max_ops, uint64_t cap, uint32_t entries, int32_t *error)
{
    kv_io *io = kv_io_new(max_ops, cap);
    return kv_io_opened(io, io ? kv_ring_open(io, entries) : -ENOMEM, error);
}

/* An engine of at most `most` threads; NULL and an errno. */
static kv_io *kv_io_open_threads(uint32_t max_ops, uint64_t cap, uint32_t most, int32_t *error)
{
    kv_io *io = kv_io_new(max_ops, cap);
    return kv_io_opened(io, io ? kv_pool_open(io, most) : -ENOMEM, error);
}
