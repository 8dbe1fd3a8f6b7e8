/* killed_check.c: peers that die or stop in the middle, under sanitizers: `killed_check SEED ROUNDS`.
 *
 * This process serves; each round a child process (this program again) reads and writes as fast as it can over TCP until it
 * is killed, or stopped. Killed: the service says that the session is lost, its close is clean, and what it was granted is
 * this process's again. Stopped: the close is clean all the same, and when the child goes on, nothing of what it had on its
 * way lands any more. Memory that was never granted keeps its bytes throughout.
 */
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "service_calls.h"

enum { EXTENTS = 16, SLOT = 1 << 16, BLOCK = 40000, GUARD = 4096, ADDRESS = 16384 };
extern char **environ;
static uint8_t *segment;
static uint64_t block_sum;

typedef struct { /* what the parent tells the child; the child's answer is an address of the same shape, token 0 */
    uint64_t token, length;
    uint8_t address[ADDRESS];
} a_letter;

static ucp_context_h open_context(void) {
    const char *names[] = {"TLS", "TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"}, *values[] = {"tcp,self", "256k", "256k"};
    ucp_context_h context;
    uint32_t unknown;
    CHECK(kv_context_open(names, values, 3, 1, &context, &unknown) == 0 && unknown == 0);
    return context;
}

static void transfer(int fd, int is_write, void *at, size_t n) {
    for (uint8_t *p = at; n != 0;) {
        ssize_t done = is_write ? write(fd, p, n) : read(fd, p, n);
        CHECK(done > 0);
        p += done;
        n -= (size_t)done;
    }
}

/* ---- the child ---- */

static int peer(void) {
    static a_letter letter;
    static uint8_t data[EXTENTS][SLOT], read_back[BLOCK];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    kv_worker *w;
    kv_fetcher *f;
    kv_endpoint *e;
    CHECK(kv_worker_open(open_context(), 1024, 1, &w) == 0 && kv_fetcher_open(w, &f) == 0);
    letter.length = (uint64_t)kv_worker_address(w, letter.address, ADDRESS);
    transfer(STDOUT_FILENO, 1, &letter, sizeof letter);
    transfer(STDIN_FILENO, 0, &letter, sizeof letter);
    CHECK(kv_endpoint_from_address(w, letter.address, 1, &e) == 0);
    memset(data, 0x99, sizeof data);
    for (uint64_t id = 1;; id += 2) { /* until it is killed; what was announced as failed is asked again */
        uint8_t status[EXTENTS], key[16] = {0};
        uint16_t region[EXTENTS] = {0};
        uint32_t first[EXTENTS + 1] = {0}, begin[2] = {0, 1}, receives;
        uint64_t addr[EXTENTS], len[EXTENTS], offset[EXTENTS], into = (uint64_t)(uintptr_t)read_back, size = BLOCK;
        for (uint32_t i = 0; i < EXTENTS; i++) {
            addr[i] = (uint64_t)(uintptr_t)data[i];
            len[i] = SLOT - i;
            offset[i] = GUARD + i * (uint64_t)(SLOT + GUARD);
            first[i + 1] = i + 1;
        }
        if (kv_fetch_write(f, e, letter.token, id, EXTENTS, first, addr, len, region, offset, 4096, NULL, 200000) < 0) break;
        if (kv_fetch_read(f, e, letter.token, 1, id + 1, 1, key, begin, &into, &size, 4096, 1, NULL, 200000) < 0) break;
        uint64_t until = kv_now_ns() + 1000000000u;
        int has_moved;
        while (w->inflight && kv_now_ns() < until) {
            kv_progress(w, 100000, 100000, &has_moved);
            kv_ring_release(w, w->head - w->tail);
        }
        kv_fetch_take(f, id, status, NULL, NULL, NULL, &receives);
        kv_fetch_take(f, id + 1, status, NULL, NULL, NULL, &receives);
    }
    pause();
    return 0;
}

/* ---- this process ---- */

static size_t resolve(void *ctx, size_t n, const uint8_t *keys, kv_found *out, uint32_t *epoch) {
    (void)ctx, (void)keys;
    *epoch = 1;
    for (size_t i = 0; i < n; i++)
        out[i] = (kv_found){.addr = (uint64_t)(uintptr_t)segment + EXTENTS * (uint64_t)(SLOT + GUARD) + GUARD,
                            .length = BLOCK, .sum = block_sum, .generation = 1, .status = KV_HIT};
    return n;
}

/* Waits for the result of this ticket, 0 being the news that the session is lost; its status. */
static int32_t wait_for(kv_service *service, uint64_t ticket, uint64_t token) {
    uint64_t until = kv_now_ns() + 60000000000ull, tickets[8], tokens[8];
    int32_t statuses[8];
    for (;;) {
        size_t n = kv_service_results(service, 8, tickets, tokens, statuses);
        for (size_t i = 0; i < n; i++)
            if (tickets[i] == ticket && tokens[i] == token) return statuses[i];
        CHECK(kv_now_ns() < until);
        struct pollfd fd = {.fd = kv_service_result_fd(service), .events = POLLIN};
        poll(&fd, 1, 100);
    }
}

static uint64_t counter(kv_service *service, int which) {
    uint64_t counters[16];
    kv_service_counters(service, counters);
    return counters[which];
}

static void check_guards(void) {
    for (uint32_t i = 0; i <= EXTENTS; i++)
        for (uint32_t k = 0; k < GUARD; k++) CHECK(segment[i * (uint64_t)(SLOT + GUARD) + k] == 0x11);
}

static pid_t start(const char *program, int *to, int *from) {
    int in[2], out[2];
    pid_t pid;
    posix_spawn_file_actions_t actions;
    CHECK(pipe(in) == 0 && pipe(out) == 0 && posix_spawn_file_actions_init(&actions) == 0);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, in[1]);
    posix_spawn_file_actions_addclose(&actions, out[0]);
    char *const arguments[] = {(char *)(uintptr_t)program, "--peer", NULL};
    CHECK(posix_spawn(&pid, program, &actions, NULL, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    *to = in[1];
    *from = out[0];
    return pid;
}

static void one_round(kv_service *service, const char *program, uint64_t ticket, int is_stopped) {
    static a_letter letter;
    uint16_t region[EXTENTS] = {0};
    uint64_t offset[EXTENTS], capacity[EXTENTS], token = next() | 1, written = counter(service, 6);
    uint8_t out[EXTENTS];
    int to, from;
    pid_t pid = start(program, &to, &from);
    transfer(from, 0, &letter, sizeof letter);
    CHECK(kv_service_command(service, KV_OPEN_SESSION, ticket, token, letter.address, letter.length, 1, 1, 1) == 0);
    CHECK(wait_for(service, ticket, token) == 0);
    for (uint32_t i = 0; i < EXTENTS; i++) {
        offset[i] = GUARD + i * (uint64_t)(SLOT + GUARD);
        capacity[i] = SLOT;
    }
    kv_service_grant(service, token, EXTENTS, region, offset, capacity, out);
    for (uint32_t i = 0; i < EXTENTS; i++) CHECK(out[i] == KV_GRANT_OK);
    letter.token = token;
    letter.length = kv_service_address(service, letter.address, ADDRESS);
    transfer(to, 1, &letter, sizeof letter);
    uint64_t until = kv_now_ns() + 30000000000ull;
    while (counter(service, 6) == written && kv_now_ns() < until) usleep(1000);
    CHECK(counter(service, 6) != written); /* it writes */
    usleep((useconds_t)(next() % 30000));
    kill(pid, is_stopped ? SIGSTOP : SIGKILL);
    if (!is_stopped) CHECK(wait_for(service, 0, token) < 0);
    CHECK(kv_service_command(service, KV_CLOSE_SESSION, ticket + 1, token, NULL, 0, 0, 0, 1) == 0);
    CHECK(wait_for(service, ticket + 1, token) == KV_CLOSED_CLEAN);
    CHECK(counter(service, 14) == 0);
    for (uint32_t i = 0; i < EXTENTS; i++) memset(segment + offset[i], 0x55, SLOT); /* they are ours */
    if (is_stopped) {
        kill(pid, SIGCONT);
        usleep(100000);
        kill(pid, SIGKILL);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    for (uint32_t i = 0; i < EXTENTS; i++)
        for (uint32_t k = 0; k < SLOT; k++) CHECK(segment[offset[i] + k] == 0x55);
    check_guards();
    close(to);
    close(from);
    until = kv_now_ns() + 30000000000ull;
    while (counter(service, 12) != 0 && kv_now_ns() < until) usleep(1000);
    CHECK(counter(service, 12) == 0); /* nothing of it is left */
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--peer") == 0) return peer();
    state = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    long rounds = argc > 2 ? atol(argv[2]) : 4;
    signal(SIGPIPE, SIG_IGN);
    size_t size = (size_t)EXTENTS * (SLOT + GUARD) + GUARD + BLOCK;
    segment = malloc(size);
    memset(segment, 0x11, size);
    block_sum = kvx_sum(segment + size - BLOCK, BLOCK);
    ucp_context_h context = open_context();
    ucp_mem_h memh;
    uint64_t base;
    kv_service *service;
    CHECK(kv_memory_map(context, (uint64_t)(uintptr_t)segment, size, &memh, &base) == 0);
    CHECK(kv_service_open(context, (uint64_t)(uintptr_t)resolve, 0, 50000, &service) == 0);
    CHECK(kv_service_lend(service, 0, base, size, memh) == 0);
    for (long i = 0; i < rounds; i++) one_round(service, argv[0], 1 + 2 * (uint64_t)i, i % 2);
    printf("killed_check: %ld peers, %llu writes, %llu bytes read\n", rounds, (unsigned long long)counter(service, 6),
           (unsigned long long)counter(service, 5));
    kv_service_close(service);
    kv_memory_unmap(context, memh);
    kv_context_close(context);
    free(segment);
    return 0;
}
