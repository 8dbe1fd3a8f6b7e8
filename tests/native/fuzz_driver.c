/* fuzz_driver.c: runs a fuzz target without libFuzzer: the corpus, then mutations of it, without coverage feedback.
 *
 *   TARGET FILE ...                   replays these inputs
 *   TARGET -seconds=N [-seed=S] [-crash=PATH] DIRECTORY ...
 *
 * An input that ends the process (run it with ASAN_OPTIONS=abort_on_error=1) or takes half a minute is left at PATH.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "fuzz_input.h"

enum { LARGEST = 4096, KEPT = 1024 };

static struct {
    size_t length;
    uint8_t bytes[LARGEST];
} corpus[KEPT], current, *const now = &current;
static unsigned corpus_count;
static uint64_t state;
static const char *crash;

static uint64_t next(void) { /* splitmix64 */
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

static void on_end(int signal_number) {
    int fd = crash == NULL ? -1 : open(crash, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd >= 0 && write(fd, now->bytes, now->length) == (ssize_t)now->length) close(fd);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static size_t load(const char *path, uint8_t *into) {
    FILE *f = fopen(path, "rb");
    if (f == NULL) return 0;
    size_t n = fread(into, 1, LARGEST, f);
    fclose(f);
    return n;
}

static void load_directory(const char *path) {
    DIR *d = opendir(path);
    if (d == NULL) return;
    for (struct dirent *e; (e = readdir(d)) != NULL && corpus_count < KEPT;) {
        char name[4096];
        if (e->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        corpus[corpus_count].length = load(name, corpus[corpus_count].bytes);
        corpus_count += corpus[corpus_count].length != 0;
    }
    closedir(d);
}

static void mutate(void) {
    unsigned picked = (unsigned)(next() % corpus_count), other = (unsigned)(next() % corpus_count);
    *now = corpus[picked];
    if (next() % 4 == 0) { /* the beginning of one, the end of another */
        size_t head = next() % (now->length + 1), from = next() % (corpus[other].length + 1);
        size_t tail = corpus[other].length - from;
        if (head + tail > LARGEST) tail = LARGEST - head;
        memcpy(now->bytes + head, corpus[other].bytes + from, tail);
        now->length = head + tail;
    }
    for (uint64_t left = 1 + next() % 6; left-- && now->length;) {
        size_t at = next() % now->length, run = 1 + next() % 8;
        if (run > now->length - at) run = now->length - at;
        switch (next() % 6) {
        case 0: now->bytes[at] ^= (uint8_t)(1u << next() % 8); break;
        case 1: now->bytes[at] = (uint8_t)next(); break;
        case 2: now->bytes[at] = (uint8_t)(now->bytes[at] + 1 - 2 * (next() & 1)); break;
        case 3: /* cut some out */
            memmove(now->bytes + at, now->bytes + at + run, now->length - at - run);
            now->length -= run;
            break;
        case 4: /* put some in */
            if (now->length + run > LARGEST) break;
            memmove(now->bytes + at + run, now->bytes + at, now->length - at);
            for (size_t i = 0; i < run; i++) now->bytes[at + i] = (uint8_t)next();
            now->length += run;
            break;
        case 5: memmove(now->bytes + at, now->bytes + next() % (now->length - run + 1), run); break;
        }
    }
}

static void run(const uint8_t *bytes, size_t n) {
    uint8_t *exact = malloc(n ? n : 1);
    CHECK(exact != NULL);
    memcpy(exact, bytes, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
}

int main(int argc, char **argv) {
    double seconds = 0;
    state = 1;
    static uint8_t one[LARGEST];
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-seconds=", 9)) seconds = atof(argv[i] + 9);
        else if (!strncmp(argv[i], "-seed=", 6)) state = strtoull(argv[i] + 6, NULL, 0);
        else if (!strncmp(argv[i], "-crash=", 7)) crash = argv[i] + 7;
        else if (seconds > 0) load_directory(argv[i]);
        else run(one, load(argv[i], one));
    }
    uint64_t runs = 0;
    if (seconds > 0) {
        CHECK(corpus_count != 0);
        signal(SIGABRT, on_end);
        signal(SIGALRM, on_end);
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (; runs < corpus_count; runs++) *now = corpus[runs], run(now->bytes, now->length);
        do {
            alarm(30);
            for (int i = 0; i < 256; i++, runs++) mutate(), run(now->bytes, now->length);
            clock_gettime(CLOCK_MONOTONIC, &end);
        } while ((double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec) < seconds);
        alarm(0);
        fuzz_summary();
        printf("stat::number_of_executed_units: %llu\n", (unsigned long long)runs);
    }
    return 0;
}
