/* wire_fuzz.c: fuzzes the parsers of transport/wire.h.
 *
 * An input is: one byte that chooses the parser, two bytes of claimed payload length (in units that reach the bounds), then
 * the header. Checked for each: a header of exactly the input's bytes is read and not one more (the header lies in its own
 * allocation, so the sanitizer sees an overrun); what a parser accepts keeps every bound that its users rely on.
 */
#include "fuzz_input.h"
#include "wire.h"

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
    if (n - 3 >= 24) { /* which of some connections a fragment takes */
        uint64_t v[3];
        memcpy(v, header, sizeof v);
        uint32_t connections = 1 + bytes[1] % 8;
        CHECK(kv_turn(connections, v[0], bytes[2], (uint32_t)v[1], v[2], v[1], v[0] >> 32) < connections);
    }
    if (n - 3 >= 24) { /* regions as a hostile table would name them */
        uint64_t v[3];
        memcpy(v, header, sizeof v);
        if (kv_in_region(v[0], v[1], v[2])) CHECK(v[0] <= v[2] && v[1] <= v[2] && v[0] + v[1] >= v[0] && v[0] + v[1] <= v[2]);
    }
    free(header);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n) {
    check_input(bytes, n);
    return 0;
}

void fuzz_summary(void) {
    fprintf(stderr, "wire: accepted");
    for (int i = 0; i < 6; i++) fprintf(stderr, " %llu", (unsigned long long)accepted[i]);
    fprintf(stderr, "\n");
    for (int i = 0; i < 6; i++) CHECK(accepted[i] != 0); /* a fuzzer that never passes a parser tests nothing */
}
