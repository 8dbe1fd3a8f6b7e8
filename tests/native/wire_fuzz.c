/* wire_fuzz.c: fuzzes the parsers of transport/wire.h.
 *
 * An input is: one byte that chooses the parser, two bytes of claimed payload length (in units that reach the bounds), then
 * the header. Checked for each: a header of exactly the input's bytes is read and not one more (the header lies in its own
 * allocation, so the sanitizer sees an overrun); what a parser accepts keeps every bound that its users rely on.
 *
 * With clang: libFuzzer (-DWITH_LIBFUZZER). Without: a deterministic driver, `wire_fuzz SEED SECONDS [corpus file ...]`,
 * which runs the corpus, then mutations of it and random inputs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "wire.h"

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "wire_fuzz: line %d: %s does not hold\n", __LINE__, #condition); \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

static uint64_t accepted[7];

static void check_one(unsigned which, const void *header, size_t n, size_t payload) {
    kv_ask ask;
    kv_many many;
    kv_data data;
    kv_write write;
    kv_written written;
    switch (which % 6) {
    case 0:
        if (!kv_parse_ask(header, n, payload, &ask)) return;
        CHECK(ask.count >= 1 && ask.count <= KV_MAX_KEYS && payload == (size_t)ask.count * KV_KEY_BYTES);
        break;
    case 1:
        if (!kv_parse_found(header, n, payload, &many)) return;
        CHECK(many.count >= 1 && many.count <= KV_MAX_KEYS && payload == many.count * sizeof(kv_found));
        break;
    case 2:
        if (!kv_parse_outcomes(header, n, payload, &many)) return;
        CHECK(many.count >= 1 && many.count <= KV_MAX_KEYS && payload == many.count * sizeof(kv_outcome));
        break;
    case 3:
        if (!kv_parse_data(header, n, payload, &data)) return;
        CHECK(data.length <= KV_MAX_VALUE && data.at <= data.length && payload <= data.length - data.at);
        CHECK(payload != 0 || data.length == 0); /* a read always comes to its end */
        break;
    case 4:
        if (!kv_parse_write(header, n, payload, &write)) return;
        CHECK(payload != 0 && payload <= KV_MAX_VALUE && write.at + payload <= KV_MAX_VALUE);
        CHECK(write.offset + write.at + payload >= write.offset); /* no wrap: the address is computed from them */
        for (uint64_t capacity = 1; capacity <= KV_MAX_VALUE; capacity *= 2)
            if (kv_write_fits(&write, payload, capacity)) CHECK(write.at + payload <= capacity);
        break;
    case 5:
        if (!kv_parse_written(header, n, payload, &written)) return;
        CHECK(payload == 0);
        break;
    }
    accepted[which % 6]++;
}

static void check_input(const uint8_t *bytes, size_t n) {
    if (n < 3) return;
    size_t units = bytes[1] | (size_t)bytes[2] << 8;
    static const size_t scale[] = {1, 16, 24, 40, 1 << 15, KV_MAX_VALUE / 65535 + 1};
    uint8_t *header = malloc(n - 3 ? n - 3 : 1);
    CHECK(header != NULL);
    memcpy(header, bytes + 3, n - 3);
    for (size_t i = 0; i < sizeof scale / sizeof *scale; i++) check_one(bytes[0], header, n - 3, units * scale[i]);
    if (n - 3 >= 24) { /* regions as a hostile table would name them */
        uint64_t v[3];
        memcpy(v, header, sizeof v);
        if (kv_in_region(v[0], v[1], v[2])) CHECK(v[0] <= v[2] && v[1] <= v[2] && v[0] + v[1] >= v[0] && v[0] + v[1] <= v[2]);
    }
    free(header);
}

#ifdef WITH_LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    check_input(bytes, n);
    return 0;
}
#else
static uint64_t state;

static uint64_t next(void) { /* splitmix64 */
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

static size_t random_input(uint8_t *out) {
    static const uint8_t sizes[] = {24, 16, 16, 48, 40, 16};
    static const uint64_t edges[] = {0, 1, 4095, 4096, 4097, (1ull << 30) - 1, 1ull << 30, (1ull << 30) + 1, ~0ull};
    out[0] = (uint8_t)next();
    out[1] = (uint8_t)next();
    out[2] = next() % 4 ? 0 : (uint8_t)next();
    size_t n = next() % 8 ? sizes[out[0] % 6] : next() % 85;
    for (size_t i = 0; i < n; i++) out[3 + i] = next() % 2 ? 0 : (uint8_t)next();
    for (size_t at = 0; at + 8 <= n; at += 8)
        if (next() % 3 == 0) memcpy(out + 3 + at, &edges[next() % (sizeof edges / sizeof *edges)], 8);
    if (n >= 20 && next() % 2) { /* a count that fits */
        uint32_t count = out[1] | (uint32_t)out[2] << 8;
        memcpy(out + 3 + (out[0] % 6 == 0 ? 16 : 8), &count, 4);
    }
    return n + 3;
}

int main(int argc, char **argv) {
    state = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    double seconds = argc > 2 ? atof(argv[2]) : 10;
    uint8_t input[256], saved[64][256];
    size_t lengths[64], corpus = 0;
    for (int i = 3; i < argc && corpus < 64; i++) {
        FILE *f = fopen(argv[i], "rb");
        if (f == NULL) continue;
        lengths[corpus] = fread(saved[corpus], 1, 200, f);
        fclose(f);
        check_input(saved[corpus], lengths[corpus]);
        corpus++;
    }
    uint64_t runs = 0;
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        for (int i = 0; i < 100000; i++, runs++) {
            size_t n;
            if (corpus != 0 && next() % 2) {
                size_t pick = next() % corpus;
                n = lengths[pick];
                memcpy(input, saved[pick], n);
                for (uint64_t flips = 1 + next() % 4; flips-- && n; ) input[next() % n] = (uint8_t)next();
                if (next() % 8 == 0 && n) n -= next() % n;
            } else {
                n = random_input(input);
            }
            check_input(input, n);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - begin.tv_nsec) < seconds);
    printf("wire_fuzz: %llu inputs, accepted ask %llu found %llu outcomes %llu data %llu write %llu written %llu\n",
           (unsigned long long)runs, (unsigned long long)accepted[0], (unsigned long long)accepted[1],
           (unsigned long long)accepted[2], (unsigned long long)accepted[3], (unsigned long long)accepted[4],
           (unsigned long long)accepted[5]);
    for (int i = 0; i < 6; i++) CHECK(accepted[i] != 0); /* a fuzzer that never passes a parser tests nothing */
    return 0;
}
#endif
