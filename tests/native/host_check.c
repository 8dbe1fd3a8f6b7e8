/* Checks tiers/host.c and tiers/xxh3.h under sanitizers: every buffer has exactly its length on the heap, so that one
 * byte too many is caught. Prints one line and exits 0, or says what differed and exits 1.
 *
 * usage: host_check [seed [rounds]]
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "../../tiers/host.c"

static uint64_t rng_state;

static uint64_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}

static void expect(int holds, const char *what, size_t n)
{
    if (holds) return;
    fprintf(stderr, "host_check: %s differs at %zu bytes\n", what, n);
    exit(1);
}

/* A buffer of exactly n bytes that starts `shift` bytes into its own allocation. */
static uint8_t *exact(size_t n, size_t shift, uint8_t **owner)
{
    *owner = malloc(n + shift + (n + shift == 0));
    if (!*owner) exit(2);
    return *owner + shift;
}

static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(i * 131 + (i >> 8) * 7 + 13);
}

static size_t some_length(void)
{
    switch (rng() % 4) {
    case 0: return rng() % 300;
    case 1: return rng() % 5000;
    case 2: return (rng() % 40) * 64 + rng() % 3;
    default: return rng() % 700000;
    }
}

/* Sums from the public xxhash package 0.8 over the bytes of fill(). */
static void check_vectors(void)
{
    static const struct { size_t n; uint64_t sum; } known[] = {
        {0, 0x2d06800538d394c2ull}, {1, 0x8a21d78b1538b1c0ull}, {3, 0x5c5f8d20600076e7ull},
        {4, 0x48a5630afd247c1dull}, {8, 0xc2f9d364c63df827ull}, {9, 0xafe67ba437ba0d4bull},
        {16, 0xb3971349a3145d9dull}, {17, 0x0c6656a0d2938a0full},
        {64, 0x10daa188b07bbc2full}, {65, 0x1d98b4aad2d39a49ull}, {128, 0x4799a2ecb1afc409ull},
        {129, 0x2859e931becac906ull}, {240, 0x655491fd302aece3ull}, {241, 0x6484cb6839a76c4dull},
        {256, 0x2339a60164486ee7ull}, {1024, 0xd39cb6d5c268876full}, {1025, 0xff903ad3e0c3f4ddull},
        {2048, 0xe9285cd4fbd10ee2ull}, {4999, 0xab5b71abd0423357ull},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint8_t *from_owner, *to_owner;
        size_t n = known[i].n;
        uint8_t *from = exact(n, i % 9, &from_owner), *to = exact(n, 0, &to_owner);
        fill(from, n);
        expect(kvx_sum(from, n) == known[i].sum, "sum of a known vector", n);
        expect(kvx_copy_sum(to, from, n) == known[i].sum, "copy_sum of a known vector", n);
        free(from_owner);
        free(to_owner);
    }
}

typedef void (*run_fn)(kvx_lanes *, uint8_t *, const uint8_t *, size_t);

/* Every kernel of this machine leaves the same lanes and the same copy as the scalar one, in two unequal calls. */
static void check_kernels(void)
{
    run_fn kernels[3] = {kvx_run_scalar};
    size_t count = 1;
#ifdef KVX_X86
    kernels[count++] = kvx_run_sse2;
    if (__builtin_cpu_supports("avx2")) kernels[count++] = kvx_run_avx2;
#endif
    size_t first = 1 + rng() % 40, second = 1 + rng() % 40, n = (first + second) * KVX_STRIPE;
    uint8_t *from_owner, *to_owner, *from = exact(n, rng() % 64, &from_owner), *to = exact(n, rng() % 64, &to_owner);
    for (size_t i = 0; i < n; i++) from[i] = (uint8_t)rng();
    kvx_lanes want = KVX_LANES_START;
    kvx_run_scalar(&want, NULL, from, first + second);
    for (size_t k = 0; k < count; k++) {
        for (int copy = 0; copy < 2; copy++) {
            kvx_lanes lanes = KVX_LANES_START;
            memset(to, 0xAA, n);
            kernels[k](&lanes, copy ? to : NULL, from, first);
            kernels[k](&lanes, copy ? to + first * KVX_STRIPE : NULL, from + first * KVX_STRIPE, second);
            expect(lanes.at == want.at && !memcmp(lanes.acc, want.acc, sizeof want.acc), "a kernel's lanes", n);
            expect(!copy || !memcmp(from, to, n), "a kernel's copy", n);
        }
    }
    free(from_owner);
    free(to_owner);
}

enum { BLOCKS = 4, PIECES = 7 };

/* Random blocks of random pieces, each piece and each block in its own exact allocation. */
static void check_gather(void)
{
    kv_iov iov[BLOCKS * PIECES];
    uint8_t *owners[BLOCKS * PIECES], *to_owner[BLOCKS], *whole[BLOCKS];
    uint64_t dst[BLOCKS], sums[BLOCKS], lengths[BLOCKS], pieces = 0;
    uint32_t first[BLOCKS + 1] = {0};
    int copy = rng() % 3 != 0;
    for (size_t b = 0; b < BLOCKS; b++) {
        lengths[b] = 0;
        for (size_t p = rng() % (PIECES + 1); p > 0; p--, pieces++) {
            size_t n = some_length();
            uint8_t *piece = exact(n, rng() % 16, &owners[pieces]);
            for (size_t i = 0; i < n; i++) piece[i] = (uint8_t)rng();
            iov[pieces] = (kv_iov){(uint64_t)(uintptr_t)piece, n};
            lengths[b] += n;
        }
        first[b + 1] = (uint32_t)pieces;
        uint8_t *to = exact(lengths[b], rng() % 16, &to_owner[b]);
        dst[b] = copy ? (uint64_t)(uintptr_t)to : 0;
        whole[b] = malloc(lengths[b] + 1);
        size_t at = 0;
        for (uint32_t p = first[b]; p < first[b + 1]; at += iov[p++].len)
            if (iov[p].len) memcpy(whole[b] + at, (void *)(uintptr_t)iov[p].addr, iov[p].len);
    }
    int32_t cancel = 0;
    size_t done = kv_gather(BLOCKS, (uintptr_t)first, (uintptr_t)iov, (uintptr_t)dst, (uintptr_t)sums,
                            (uintptr_t)&cancel);
    expect(done == BLOCKS, "the number of blocks gathered", done);
    for (size_t b = 0; b < BLOCKS; b++) {
        expect(sums[b] == kv_sum((uintptr_t)whole[b], lengths[b]), "a gathered sum", lengths[b]);
        expect(!copy || !memcmp((void *)(uintptr_t)dst[b], whole[b], lengths[b]), "a gathered block", lengths[b]);
    }
    cancel = 1;
    done = kv_gather(BLOCKS, (uintptr_t)first, (uintptr_t)iov, (uintptr_t)dst, (uintptr_t)sums, (uintptr_t)&cancel);
    expect(done == 0, "the number of blocks after a cancel", done);
    for (size_t p = 0; p < pieces; p++) free(owners[p]);
    for (size_t b = 0; b < BLOCKS; b++) {
        free(to_owner[b]);
        free(whole[b]);
    }
}

typedef struct { uint64_t *words; size_t count; int32_t stop; } racing;

static void *rewrite(void *arg)
{
    racing *shared = arg;
    for (uint64_t round = 1; !kv_is_cancelled(&shared->stop); round++)
        for (size_t i = 0; i < shared->count; i++)
            __atomic_store_n(&shared->words[i], round * KVX_P64_1, __ATOMIC_RELAXED);
    return NULL;
}

/* A value that its owner rewrites during the copy: the sum is that of the bytes copied, and TSan is content. */
static void check_racing_source(unsigned rounds)
{
    enum { WORDS = 8192 };
    racing shared = {calloc(WORDS, 8), WORDS, 0};
    uint8_t *to = malloc(WORDS * 8);
    pthread_t writer;
    if (!shared.words || !to || pthread_create(&writer, NULL, rewrite, &shared)) exit(2);
    for (unsigned r = 0; r < rounds; r++) {
        size_t n = r % 2 ? rng() % 600 : rng() % (WORDS * 8), cut = n ? rng() % n : 0;
        const uint8_t *from = (const uint8_t *)shared.words;
        expect(kvx_copy_sum(to, from, n) == kvx_sum(to, n), "the sum of a torn copy", n);
        kvx_state s;
        kvx_begin(&s);
        kvx_copy(&s, to, from, cut);
        kvx_copy(&s, to + cut, from + cut, n - cut);
        expect(kvx_end(&s) == kvx_sum(to, n), "the sum of a torn copy in pieces", n);
    }
    __atomic_store_n(&shared.stop, 1, __ATOMIC_RELAXED);
    pthread_join(writer, NULL);
    free(shared.words);
    free(to);
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : kv_now_ns();
    unsigned rounds = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 0) : 200;
    rng_state = seed * 2 + 1;
    fprintf(stderr, "host_check: seed %llu, %u rounds\n", (unsigned long long)seed, rounds);
    check_vectors();
    for (unsigned r = 0; r < rounds; r++) {
        check_kernels();
        check_gather();
    }
    check_racing_source(rounds * 10);
    uint64_t ns[4], place[2][64] = {{0}};
    (void)kv_copy_times((uintptr_t)place[0], (uintptr_t)place[1], sizeof place[0], 100, 4, (uintptr_t)ns, 1);
    expect(kv_copy_sum((uintptr_t)place[0], (uintptr_t)place[1], 512) == kvx_sum(place[1], 512), "copy_sum", 512);
    puts("host_check: ok");
    return 0;
}
