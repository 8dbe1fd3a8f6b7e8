/* Io engine on threads: workers that make plain system calls and never touch Python; one eventfd wakes the loop.
 *
 * Invariants:
 * - Workers take slots from `ready` and put them into `over`, both under the lock; in between a slot is its worker's.
 * - The eventfd is written when all that was given of a batch is in `over`, or anything while operations wait to be given,
 *   once until `over` is taken, and read before that. What lies in `over` without it has companions still to come.
 * - Threads are started when there is work for them, at most `most`, with all signals blocked; close joins them.
 */
#include "io.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

enum { KV_WORKERS = 64, KV_STACK_BYTES = 128 * 1024 };

#ifndef KV_SYS_PREAD /* the system calls; a test puts its own in their place */
#define KV_SYS_PREAD(fd, at, n, offset) pread(fd, at, n, offset)
#define KV_SYS_PWRITE(fd, at, n, offset) pwrite(fd, at, n, offset)
#define KV_SYS_FDATASYNC(fd) fdatasync(fd)
#endif

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    kv_slot *slots;
    kv_list ready, over;
    uint32_t ready_count, idle, started, most;
    uint32_t *left; /* by batch: given and not over */
    int event_fd, stop, hungry, signalled; /* hungry: operations wait to be given */
    uint64_t running_bytes, peak_bytes;
    kv_list given; /* the loop's own, until the next flush */
    uint32_t given_count;
    pthread_t threads[KV_WORKERS];
} kv_pool;

static int64_t kv_pool_ask(const kv_slot *slot)
{
    void *at = (void *)(uintptr_t)(slot->op.address + slot->done);
    off_t offset = (off_t)(slot->op.offset + slot->done);
    ssize_t got;
    if (slot->op.kind == KV_SYNC) got = slot->answer ? 0 : KV_SYS_FDATASYNC(slot->fd);
    else if (slot->op.kind == KV_READ) got = KV_SYS_PREAD(slot->fd, at, kv_io_ask(slot), offset);
    else got = KV_SYS_PWRITE(slot->fd, at, kv_io_ask(slot), offset);
    return got < 0 ? -(int64_t)errno : got;
}

static void *kv_pool_work(void *argument)
{
    kv_pool *pool = argument;
    uint64_t one = 1;
    pthread_mutex_lock(&pool->lock);
    pool->idle--; /* counted as idle since it was asked for */
    for (;;) {
        while (pool->ready.head == KV_NONE && !pool->stop) {
            pool->idle++;
            pthread_cond_wait(&pool->wake, &pool->lock);
            pool->idle--;
        }
        if (pool->ready.head == KV_NONE) break;
        uint32_t number = kv_list_take(pool->slots, &pool->ready);
        kv_slot *slot = &pool->slots[number];
        pool->ready_count--;
        pool->running_bytes += slot->op.length;
        if (pool->running_bytes > pool->peak_bytes) pool->peak_bytes = pool->running_bytes;
        pthread_mutex_unlock(&pool->lock);
        while (!kv_io_step(slot, kv_pool_ask(slot))) {}
        pthread_mutex_lock(&pool->lock);
        pool->running_bytes -= slot->op.length;
        kv_list_add(pool->slots, &pool->over, number);
        if (--pool->left[slot->batch] && !pool->hungry) continue;
        if (pool->signalled) continue;
        pool->signalled = 1;
        pthread_mutex_unlock(&pool->lock);
        while (write(pool->event_fd, &one, sizeof one) < 0 && errno == EINTR) {}
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* One more thread; 0 or an errno. Signals are the process's business, so that workers have them blocked. */
static int kv_pool_grow(kv_pool *pool)
{
    pthread_attr_t small;
    sigset_t all, before;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, KV_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t *fresh = &pool->threads[pool->started];
    int failed = pthread_create(fresh, &small, kv_pool_work, pool);
    if (failed == EINVAL) failed = pthread_create(fresh, NULL, kv_pool_work, pool); /* libraries want more stack */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    if (!failed) pool->started++, pool->idle++;
    return failed;
}

static void kv_pool_give(kv_io *io, uint32_t number)
{
    kv_pool *pool = io->state;
    kv_list_add(pool->slots, &pool->given, number);
    pool->given_count++;
}

static void kv_pool_flush(kv_io *io)
{
    kv_pool *pool = io->state;
    int failed = 0;
    int hungry = io->waiting.head != KV_NONE;
    if (!pool->given_count && hungry == pool->hungry) return; /* hungry is written by this thread alone */
    pthread_mutex_lock(&pool->lock);
    for (uint32_t number; (number = kv_list_take(pool->slots, &pool->given)) != KV_NONE;) {
        pool->left[pool->slots[number].batch]++;
        kv_list_add(pool->slots, &pool->ready, number);
    }
    if (hungry && !pool->hungry && pool->over.head != KV_NONE) io->view.again = KV_SOON;
    pool->hungry = hungry;
    pool->ready_count += pool->given_count;
    while (!failed && pool->started < pool->most && pool->ready_count > pool->idle) failed = kv_pool_grow(pool);
    io->view.workers = pool->started;
    for (uint32_t i = 0; i < pool->given_count && i < pool->idle; i++) pthread_cond_signal(&pool->wake);
    pool->given_count = 0;
    if (!pool->started) { /* nobody will ever take them */
        for (uint32_t number; (number = kv_list_take(pool->slots, &pool->ready)) != KV_NONE;) {
            pool->left[pool->slots[number].batch]--;
            kv_io_finish_later(io, number, -(int64_t)failed);
        }
        pool->ready_count = 0;
    }
    io->view.peak_bytes = pool->peak_bytes;
    pthread_mutex_unlock(&pool->lock);
    io->view.enters++;
}

static uint32_t kv_pool_reap(kv_io *io)
{
    kv_pool *pool = io->state;
    uint64_t count;
    uint32_t answers = 0;
    while (read(pool->event_fd, &count, sizeof count) < 0 && errno == EINTR) {}
    pthread_mutex_lock(&pool->lock);
    kv_list over = pool->over;
    pool->over.head = KV_NONE;
    pool->signalled = 0;
    io->view.peak_bytes = pool->peak_bytes;
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t number; (number = kv_list_take(pool->slots, &over)) != KV_NONE; answers++) kv_io_finish(io, number);
    return answers;
}

static int kv_pool_file(kv_io *io, uint32_t number, int fd)
{
    (void)io, (void)number, (void)fd;
    return 0;
}

static int kv_pool_memory(kv_io *io, uint64_t address, uint64_t nbytes, int forget)
{
    (void)io, (void)address, (void)nbytes, (void)forget;
    return 0;
}

static void kv_pool_close(kv_io *io)
{
    kv_pool *pool = io->state;
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    close(pool->event_fd);
    free(pool->left);
    free(pool);
}

static const kv_backend kv_pool_backend = {kv_pool_give, kv_pool_flush,  kv_pool_reap,
                                           kv_pool_file, kv_pool_memory, kv_pool_close};

/* 0, or -errno. */
static int kv_pool_open(kv_io *io, uint32_t most)
{
    kv_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return -ENOMEM;
    pool->left = calloc(io->slots_count, sizeof *pool->left);
    pool->event_fd = pool->left ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (pool->event_fd < 0) {
        int failed = pool->left ? -errno : -ENOMEM;
        free(pool->left);
        free(pool);
        return failed;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->slots = io->slots;
    pool->ready.head = pool->over.head = pool->given.head = KV_NONE;
    pool->most = most < KV_WORKERS ? most : KV_WORKERS;
    io->backend = &kv_pool_backend;
    io->state = pool;
    io->view.fd = pool->event_fd;
    io->given_max = io->slots_count;
    return 0;
}
