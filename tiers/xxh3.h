/* XXH3, 64 bits, seed 0, default secret; and a copy that sums the bytes it moves, in one pass over memory.
 *
 * Invariants:
 *  - kvx_sum, kvx_copy_sum and the streaming form agree with each other and with the public XXH3_64bits for every
 *    length and every split into pieces, on every kernel (AVX2, SSE2, scalar).
 *  - The sum is over the bytes that went into `dst`, also while another process rewrites `src`: each byte is loaded
 *    once, and what was loaded is both stored and summed; short values and last stripes are summed in `dst`.
 *  - No alignment is needed; source and destination must not overlap; nothing past the given lengths is touched.
 *
 * Source: the XXH3 algorithm description, xxHash specification (Cyan4973/xxHash: doc/xxhash_spec.md), section XXH3.
 * Little endian only. All functions are static: include it where it is used.
 */
#ifndef UCXKV_XXH3_H
#define UCXKV_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "ucxkv keeps its sums and slots little endian; this machine is not"
#endif

/* KVX_KERNEL, for tests: 0 scalar, 1 SSE2, 2 AVX2; left undefined the best one is taken at run time. */
#if defined(__x86_64__) && (!defined(KVX_KERNEL) || KVX_KERNEL > 0)
#define KVX_X86 1
#include <immintrin.h>
#endif

#define KVX_INLINE static inline __attribute__((always_inline, unused))
/* The source may be rewritten by its owner while it is read (the slot's version and the sum tell); TSan need not. */
#define KVX_RACY __attribute__((no_sanitize("thread")))

enum {
    KVX_STRIPE = 64,           /* bytes that one step takes in */
    KVX_BLOCK_STRIPES = 16,    /* stripes between two scrambles */
    KVX_SHORT_MAX = 240,       /* longest value without the striped accumulators */
    KVX_HELD_MAX = 256,        /* bytes a stream may hold back */
    KVX_SECRET_BYTES = 192,
    /* Prefetch distance in bytes; past the end it is harmless. Measured on Zen 3: 5-10 % from 64 KiB up. Non-temporal
     * stores were tried: 10 % better when nobody reads the copy soon, up to 45 % worse when dst is in the cache. */
    KVX_AHEAD = 1024,
};

#define KVX_P32_1 0x9E3779B1u
#define KVX_P32_2 0x85EBCA77u
#define KVX_P32_3 0xC2B2AE3Du
#define KVX_P64_1 0x9E3779B185EBCA87ull
#define KVX_P64_2 0xC2B2AE3D27D4EB4Full
#define KVX_P64_3 0x165667B19E3779F9ull
#define KVX_P64_4 0x85EBCA77C2B2AE63ull
#define KVX_P64_5 0x27D4EB2F165667C5ull
#define KVX_MX1 0x165667919E3779F9ull
#define KVX_MX2 0x9FB21C651E98DF25ull

static const uint8_t kvx_secret[KVX_SECRET_BYTES] __attribute__((aligned(64), unused)) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

KVX_INLINE uint32_t kvx_r32(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
KVX_INLINE uint64_t kvx_r64(const uint8_t *p) { uint64_t v; memcpy(&v, p, sizeof v); return v; }
KVX_INLINE uint64_t kvx_rotl(uint64_t v, unsigned by) { return (v << by) | (v >> (64 - by)); }

KVX_INLINE uint64_t kvx_mul_fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

KVX_INLINE uint64_t kvx_avalanche(uint64_t h)
{
    h = (h ^ (h >> 37)) * KVX_MX1;
    return h ^ (h >> 32);
}

KVX_INLINE uint64_t kvx_avalanche_xxh64(uint64_t h)
{
    h = (h ^ (h >> 33)) * KVX_P64_2;
    h = (h ^ (h >> 29)) * KVX_P64_3;
    return h ^ (h >> 32);
}

KVX_INLINE uint64_t kvx_mix16(const uint8_t *p, const uint8_t *key)
{
    return kvx_mul_fold(kvx_r64(p) ^ kvx_r64(key), kvx_r64(p + 8) ^ kvx_r64(key + 8));
}

/* ---- values of 0 to 240 bytes ---- */

static inline __attribute__((unused)) uint64_t kvx_sum_to_16(const uint8_t *p, size_t n)
{
    const uint8_t *s = kvx_secret;
    if (n > 8) {
        uint64_t low = kvx_r64(p) ^ (kvx_r64(s + 24) ^ kvx_r64(s + 32));
        uint64_t high = kvx_r64(p + n - 8) ^ (kvx_r64(s + 40) ^ kvx_r64(s + 48));
        return kvx_avalanche(n + __builtin_bswap64(low) + high + kvx_mul_fold(low, high));
    }
    if (n >= 4) {
        uint64_t both = kvx_r32(p + n - 4) + ((uint64_t)kvx_r32(p) << 32);
        uint64_t h = both ^ (kvx_r64(s + 8) ^ kvx_r64(s + 16));
        h ^= kvx_rotl(h, 49) ^ kvx_rotl(h, 24);
        h *= KVX_MX2;
        h ^= (h >> 35) + n;
        h *= KVX_MX2;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        uint32_t all = ((uint32_t)p[0] << 16) | ((uint32_t)p[n >> 1] << 24) | p[n - 1] | ((uint32_t)n << 8);
        return kvx_avalanche_xxh64(all ^ (uint64_t)(kvx_r32(s) ^ kvx_r32(s + 4)));
    }
    return kvx_avalanche_xxh64(kvx_r64(s + 56) ^ kvx_r64(s + 64));
}

static inline __attribute__((unused)) uint64_t kvx_sum_to_240(const uint8_t *p, size_t n)
{
    const uint8_t *s = kvx_secret;
    uint64_t acc = n * KVX_P64_1;
    if (n <= 128) {
        /* Pairs from both ends towards the middle, 32 bytes of secret a pair. */
        for (size_t pair = (n - 1) / 32 + 1; pair-- > 0;) {
            acc += kvx_mix16(p + 16 * pair, s + 32 * pair);
            acc += kvx_mix16(p + n - 16 * (pair + 1), s + 32 * pair + 16);
        }
        return kvx_avalanche(acc);
    }
    for (size_t i = 0; i < 8; i++) acc += kvx_mix16(p + 16 * i, s + 16 * i);
    acc = kvx_avalanche(acc);
    for (size_t i = 8; i < n / 16; i++) acc += kvx_mix16(p + 16 * i, s + 16 * (i - 8) + 3);
    acc += kvx_mix16(p + n - 16, s + 136 - 17);
    return kvx_avalanche(acc);
}

static inline __attribute__((unused)) uint64_t kvx_sum_short(const uint8_t *p, size_t n)
{
    return n <= 16 ? kvx_sum_to_16(p, n) : kvx_sum_to_240(p, n);
}

/* Copies up to KVX_HELD_MAX bytes by words, so that TSan's memcpy does not see the deliberate race. */
KVX_RACY static inline __attribute__((unused)) void kvx_copy_short(uint8_t *dst, const uint8_t *src, size_t n)
{
    size_t at = 0;
    for (; at + 8 <= n; at += 8) {
        uint64_t word = kvx_r64(src + at);
        memcpy(dst + at, &word, sizeof word);
    }
    for (; at < n; at++) dst[at] = ((const volatile uint8_t *)src)[at];
}

/* ---- the striped kernels: take `stripes` whole stripes in, storing each to dst when copying ---- */

typedef struct {
    uint64_t acc[8];
    uint32_t at;       /* stripes taken since the last scramble, 0..15 */
} kvx_lanes;

#define KVX_LANES_START                                                                                                \
    { { KVX_P32_3, KVX_P64_1, KVX_P64_2, KVX_P64_3, KVX_P64_4, KVX_P32_2, KVX_P64_5, KVX_P32_1 }, 0 }

KVX_RACY KVX_INLINE void
kvx_stripe_scalar(uint64_t acc[8], const uint8_t *key, uint8_t *dst, const uint8_t *src, int copy)
{
    for (unsigned i = 0; i < 8; i++) {
        uint64_t word = kvx_r64(src + 8 * i), keyed = word ^ kvx_r64(key + 8 * i);
        if (copy) memcpy(dst + 8 * i, &word, sizeof word);
        acc[i ^ 1] += word;
        acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
}

KVX_RACY static inline __attribute__((unused)) void
kvx_run_scalar(kvx_lanes *lanes, uint8_t *dst, const uint8_t *src, size_t stripes)
{
    const uint8_t *last = kvx_secret + KVX_SECRET_BYTES - KVX_STRIPE;
    for (; stripes > 0; stripes--, src += KVX_STRIPE) {
        kvx_stripe_scalar(lanes->acc, kvx_secret + 8 * lanes->at, dst, src, dst != NULL);
        if (dst) dst += KVX_STRIPE;
        if (++lanes->at < KVX_BLOCK_STRIPES) continue;
        lanes->at = 0;
        for (unsigned i = 0; i < 8; i++) {
            uint64_t a = lanes->acc[i];
            lanes->acc[i] = (a ^ (a >> 47) ^ kvx_r64(last + 8 * i)) * KVX_P32_1;
        }
    }
}

#ifdef KVX_X86
/* LOAD and STORE take the r-th register's worth at any address. */
#define KVX_LOAD128(p, r) _mm_loadu_si128((const __m128i *)(const void *)(p) + (r))
#define KVX_LOAD256(p, r) _mm256_loadu_si256((const __m256i *)(const void *)(p) + (r))
#define KVX_STORE128(p, r, v) _mm_storeu_si128((__m128i *)(void *)(p) + (r), v)
#define KVX_STORE256(p, r, v) _mm256_storeu_si256((__m256i *)(void *)(p) + (r), v)

/* One body for both register widths; the names of the intrinsics differ only in prefix and suffix. */
#define KVX_DEFINE_RUN(NAME, TARGET, VEC, BITS, PRE, LOAD, STORE)                                                      \
    TARGET KVX_RACY KVX_INLINE void NAME##_body(kvx_lanes *lanes, uint8_t *dst, const uint8_t *src, size_t stripes,    \
                                                int copy)                                                              \
    {                                                                                                                  \
        enum { REGS = KVX_STRIPE / sizeof(VEC) };                                                                      \
        const uint8_t *last = kvx_secret + KVX_SECRET_BYTES - KVX_STRIPE;                                              \
        VEC acc[REGS];                                                                                                 \
        for (int r = 0; r < REGS; r++) acc[r] = LOAD(lanes->acc, r);                                                   \
        unsigned at = lanes->at;                                                                                       \
        while (stripes > 0) {                                                                                          \
            size_t run = KVX_BLOCK_STRIPES - at;                                                                       \
            if (run > stripes) run = stripes;                                                                          \
            stripes -= run;                                                                                            \
            const uint8_t *key = kvx_secret + 8 * at;                                                                  \
            at += (unsigned)run;                                                                                       \
            for (; run > 0; run--, key += 8, src += KVX_STRIPE) {                                                      \
                _mm_prefetch((const char *)((uintptr_t)src + KVX_AHEAD), _MM_HINT_T0);                                 \
                for (int r = 0; r < REGS; r++) {                                                                       \
                    VEC word = LOAD(src, r);                                                                           \
                    VEC keyed = PRE##_xor_si##BITS(word, LOAD(key, r));                                                \
                    if (copy) STORE(dst, r, word);                                                                     \
                    acc[r] = PRE##_add_epi64(acc[r], PRE##_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2)));              \
                    acc[r] = PRE##_add_epi64(acc[r], PRE##_mul_epu32(keyed, PRE##_srli_epi64(keyed, 32)));             \
                }                                                                                                      \
                if (copy) dst += KVX_STRIPE;                                                                           \
            }                                                                                                          \
            if (at < KVX_BLOCK_STRIPES) break;                                                                         \
            at = 0;                                                                                                    \
            VEC prime = PRE##_set1_epi32((int)KVX_P32_1);                                                              \
            for (int r = 0; r < REGS; r++) {                                                                           \
                VEC mixed = PRE##_xor_si##BITS(acc[r], PRE##_srli_epi64(acc[r], 47));                                  \
                mixed = PRE##_xor_si##BITS(mixed, LOAD(last, r));                                                      \
                VEC high = PRE##_mul_epu32(PRE##_srli_epi64(mixed, 32), prime);                                        \
                acc[r] = PRE##_add_epi64(PRE##_mul_epu32(mixed, prime), PRE##_slli_epi64(high, 32));                   \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < REGS; r++) STORE(lanes->acc, r, acc[r]);                                                   \
        lanes->at = at;                                                                                                \
    }                                                                                                                  \
    TARGET KVX_RACY static inline __attribute__((unused)) void                                                         \
    NAME(kvx_lanes *lanes, uint8_t *dst, const uint8_t *src, size_t stripes)                                           \
    {                                                                                                                  \
        if (dst) NAME##_body(lanes, dst, src, stripes, 1);                                                             \
        else NAME##_body(lanes, NULL, src, stripes, 0);                                                                \
    }

KVX_DEFINE_RUN(kvx_run_sse2, , __m128i, 128, _mm, KVX_LOAD128, KVX_STORE128)
#if !defined(KVX_KERNEL) || KVX_KERNEL == 2
KVX_DEFINE_RUN(kvx_run_avx2, __attribute__((target("avx2"))), __m256i, 256, _mm256, KVX_LOAD256, KVX_STORE256)
#endif
#endif /* KVX_X86 */

KVX_INLINE void kvx_run(kvx_lanes *lanes, uint8_t *dst, const uint8_t *src, size_t stripes)
{
    if (stripes == 0) return;
#if !defined(KVX_X86)
    kvx_run_scalar(lanes, dst, src, stripes);
#elif defined(KVX_KERNEL) && KVX_KERNEL == 1
    kvx_run_sse2(lanes, dst, src, stripes);
#else
    if (__builtin_cpu_supports("avx2")) kvx_run_avx2(lanes, dst, src, stripes);
    else kvx_run_sse2(lanes, dst, src, stripes);
#endif
}

/* The last 64 bytes (already summed in part, that is how XXH3 pads) and the mix of the eight lanes. */
KVX_INLINE uint64_t kvx_finish(kvx_lanes *lanes, const uint8_t *last_stripe, uint64_t total)
{
    kvx_stripe_scalar(lanes->acc, kvx_secret + KVX_SECRET_BYTES - KVX_STRIPE - 7, NULL, last_stripe, 0);
    uint64_t h = total * KVX_P64_1;
    for (unsigned i = 0; i < 8; i += 2)
        h += kvx_mul_fold(lanes->acc[i] ^ kvx_r64(kvx_secret + 11 + 8 * i),
                          lanes->acc[i + 1] ^ kvx_r64(kvx_secret + 19 + 8 * i));
    return kvx_avalanche(h);
}

/* ---- the public functions ---- */

/* XXH3_64bits of the n bytes at p. p may be NULL when n is 0. */
static inline __attribute__((unused)) uint64_t kvx_sum(const void *p, size_t n)
{
    const uint8_t *src = p;
    if (n <= KVX_SHORT_MAX) return kvx_sum_short(src, n);
    kvx_lanes lanes = KVX_LANES_START;
    kvx_run(&lanes, NULL, src, (n - 1) / KVX_STRIPE);
    return kvx_finish(&lanes, src + n - KVX_STRIPE, n);
}

/* Copies n bytes and returns the XXH3_64bits of what it wrote. */
KVX_RACY static inline __attribute__((unused)) uint64_t kvx_copy_sum(void *to, const void *from, size_t n)
{
    uint8_t *dst = to;
    const uint8_t *src = from;
    if (n <= KVX_SHORT_MAX) {
        kvx_copy_short(dst, src, n);
        return kvx_sum_short(dst, n);
    }
    kvx_lanes lanes = KVX_LANES_START;
    size_t stripes = (n - 1) / KVX_STRIPE;
    kvx_run(&lanes, dst, src, stripes);
    kvx_copy_short(dst + stripes * KVX_STRIPE, src + stripes * KVX_STRIPE, n - stripes * KVX_STRIPE);
    return kvx_finish(&lanes, dst + n - KVX_STRIPE, n);
}

/* One value in several pieces. window: the 64 bytes before the held ones, then the held ones (1..256 once any came). */
typedef struct {
    kvx_lanes lanes;
    uint32_t held;
    uint64_t total;
    uint8_t window[KVX_STRIPE + KVX_HELD_MAX];
} kvx_state;

static inline __attribute__((unused)) void kvx_begin(kvx_state *s)
{
    kvx_lanes start = KVX_LANES_START;
    s->lanes = start;
    s->held = 0;
    s->total = 0;
}

/* Takes the next n bytes of the value in, and copies them to `to` unless that is NULL. from may be NULL when n is 0. */
KVX_RACY static inline __attribute__((unused)) void kvx_copy(kvx_state *s, void *to, const void *from, size_t n)
{
    uint8_t *dst = to, *held = s->window + KVX_STRIPE;
    const uint8_t *src = from;
    s->total += n;
    size_t room = KVX_HELD_MAX - s->held, part = n < room ? n : room;
    if (n <= room || s->held > 0) {
        kvx_copy_short(held + s->held, src, part);
        if (dst) kvx_copy_short(dst, held + s->held, part);
        s->held += (uint32_t)part;
        if (n <= room) return;
        kvx_run(&s->lanes, NULL, held, KVX_HELD_MAX / KVX_STRIPE);
        memcpy(s->window, held + KVX_HELD_MAX - KVX_STRIPE, KVX_STRIPE);
        src += part;
        n -= part;
        if (dst) dst += part;
    }
    /* Nothing is held and 1 byte or more is left: whole stripes go straight through, 1..64 bytes stay. */
    size_t stripes = (n - 1) / KVX_STRIPE, whole = stripes * KVX_STRIPE;
    kvx_run(&s->lanes, dst, src, stripes);
    if (stripes > 0) memcpy(s->window, (dst ? dst : src) + whole - KVX_STRIPE, KVX_STRIPE);
    kvx_copy_short(held, src + whole, n - whole);
    if (dst) kvx_copy_short(dst + whole, held, n - whole);
    s->held = (uint32_t)(n - whole);
}

/* The XXH3_64bits of everything taken in. The state is used up: kvx_begin before the next value. */
static inline __attribute__((unused)) uint64_t kvx_end(kvx_state *s)
{
    const uint8_t *held = s->window + KVX_STRIPE;
    if (s->total <= KVX_SHORT_MAX) return kvx_sum_short(held, (size_t)s->total);
    kvx_run(&s->lanes, NULL, held, (s->held - 1) / KVX_STRIPE);
    return kvx_finish(&s->lanes, s->window + s->held, s->total);
}

#endif /* UCXKV_XXH3_H */
