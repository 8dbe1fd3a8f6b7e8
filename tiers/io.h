/* What the parts of the io engines share: io.c keeps the operations, uring.c or workers.c gives them to the kernel.
 *
 * Invariants:
 * - One thread, the event loop's, makes every call; a worker touches only the slot that it was given, until it hands it
 *   back under the pool's lock.
 * - A slot is in one place: free, waiting, with the kernel (SLOT_GIVEN), or finished. An operation's memory is touched
 *   only while its slot is given.
 * - At most `cap` bytes are given at a time, or one operation alone; the others wait in order.
 */
#ifndef KV_IO_H
#define KV_IO_H

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KV_READ = 0, KV_WRITE = 1, KV_SYNC = 2 };
enum { KV_FILES = 65535, KV_SYNCS = 256, KV_TRIES = 64, KV_STALLS = 4000, KV_ALIGNMENT = 4096, KV_NONE = 0x7fffffff };


/* An operation as the caller gives it: OP_DTYPE of io.py. */
typedef struct { uint64_t address, offset; uint32_t length; uint16_t file, kind; } kv_io_op;

/* Why a call was refused. `bad` of the view names the operation, `bad_errno` what fenced its file. */
enum {
    KV_BUSY = -1, KV_UNKNOWN_FILE = -2, KV_UNKNOWN_KIND = -3, KV_MISALIGNED = -4, KV_BEYOND = -5, KV_FENCED = -6,
    KV_TOO_MANY = -7
};

/* Ask for a drain although the descriptor may not become readable: soon, or after a pause. */
enum { KV_CALM = 0, KV_SOON = 1, KV_LATER = 2 };

/* What Python reads in place. The last three are for tests: how much of a transfer is asked for at a time (0: all), and
 * answers (-errno) that stand in for the kernel's. */
typedef struct {
    uint32_t *done;       /* batches that the last drain finished */
    int32_t fd, again;    /* readable when there is something to drain; KV_CALM, KV_SOON or KV_LATER */
    uint32_t pending, bad;
    int32_t bad_errno;
    uint32_t workers;     /* threads started */
    uint64_t peak_bytes;  /* most that was with the kernel at a time, counted where it is given */
    uint64_t enters;      /* system calls that gave operations to the kernel */
    uint32_t ask_at_most;
    int32_t sync_answer, transfer_answer;
} kv_io_view;

enum { SLOT_FREE, SLOT_WAITING, SLOT_GIVEN, SLOT_FINISHED };

typedef struct {
    kv_io_op op;
    int64_t result;
    uint32_t done, seen;      /* bytes moved and kept; direct files: where an end was seen that is not aligned */
    uint32_t batch, index;    /* where the result goes */
    uint32_t next;            /* in the list that the slot is in */
    uint32_t ask_at_most;
    int32_t answer;           /* a test's, in place of the kernel's */
    int32_t fd;               /* copied: files may come and go meanwhile */
    uint16_t tries;
    uint8_t state, direct;
} kv_slot;

typedef struct { uint32_t head, tail; } kv_list; /* of slots, by `next` */

typedef struct { int64_t *results; uint32_t left, next; } kv_batch;

typedef struct {
    uint32_t fd_plus_one; /* 0: no file */
    uint32_t uses;        /* operations not done */
    int32_t fenced;       /* errno of the sync that failed */
    uint8_t direct, registered;
} kv_file;

typedef struct kv_io kv_io;

typedef struct {
    void (*give)(kv_io *io, uint32_t slot); /* take one operation; it reaches the kernel at the next flush */
    void (*flush)(kv_io *io);
    uint32_t (*reap)(kv_io *io); /* hand finished slots to kv_io_finish; how many answers there were */
    int (*file)(kv_io *io, uint32_t number, int fd); /* -1: forget it; 1 if registered */
    int (*memory)(kv_io *io, uint64_t address, uint64_t nbytes, int forget); /* 1 if registered */
    void (*close)(kv_io *io);
} kv_backend;

struct kv_io {
    kv_io_view view;
    const kv_backend *backend;
    void *state; /* the backend's */
    kv_slot *slots;
    kv_batch *batches;
    kv_file *files;
    uint32_t max_ops, slots_count, free_slots, files_top, done_count;
    uint32_t given, given_max;
    uint64_t given_bytes, cap;
    uint32_t free_slot, free_batch;
    kv_list waiting, finished; /* finished: without the backend's doing */
};

static void kv_io_finish(kv_io *io, uint32_t number);
static void kv_io_finish_later(kv_io *io, uint32_t number, int64_t result);
static int kv_io_step(kv_slot *slot, int64_t got);

/* What is left to ask of an operation, at most what one system call takes. */
static uint32_t kv_io_ask(const kv_slot *slot)
{
    uint32_t left = slot->op.length - slot->done;
    if (slot->ask_at_most && left > slot->ask_at_most) left = slot->ask_at_most;
    return left > 0x7ffff000u ? 0x7ffff000u : left;
}

static void kv_list_add(kv_slot *slots, kv_list *list, uint32_t number)
{
    slots[number].next = KV_NONE;
    if (list->head == KV_NONE) list->head = number;
    else slots[list->tail].next = number;
    list->tail = number;
}

static uint32_t kv_list_take(kv_slot *slots, kv_list *list)
{
    uint32_t number = list->head;
    if (number != KV_NONE) list->head = slots[number].next;
    return number;
}
#endif
