/* Counters, readable from a test in the same process: dry_count("cudaDeviceSynchronize"), dry_reset().
 *
 * Every entry point counts its calls under its name. Besides:
 *   synchronisations     calls after which the host has waited for the device: cudaDeviceSynchronize, cudaStreamSynchronize,
 *                        cudaEventSynchronize, and copies that return when they are done
 *   pageable_copies      copies to the device from host memory that is not pinned; pageable_bytes, their size
 *   host_to_device_bytes, device_to_host_bytes
 *   misuses              what dry_misuse reported
 */
#include "dry.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_COUNTERS 1024

struct counter {
    const char *name;
    long long value;
};

static struct counter counters[MAX_COUNTERS];
static int known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct counter *find(const char *name) {
    for (int i = 0; i < known; i++)
        if (strcmp(counters[i].name, name) == 0)
            return &counters[i];
    return NULL;
}

/* Called once for each place that counts; the place remembers the answer. */
struct counter *dry_counter(const char *name) {
    pthread_mutex_lock(&lock);
    struct counter *counter = find(name);
    if (!counter) {
        if (known == MAX_COUNTERS)
            abort();
        counter = &counters[known++];
        counter->name = name;
    }
    pthread_mutex_unlock(&lock);
    return counter;
}

void dry_add(struct counter *counter, long long amount) { __atomic_add_fetch(&counter->value, amount, __ATOMIC_RELAXED); }

/* The count of a name; 0 for one that nothing has counted yet. */
long long dry_count(const char *name) {
    pthread_mutex_lock(&lock);
    struct counter *counter = find(name);
    long long value = counter ? __atomic_load_n(&counter->value, __ATOMIC_RELAXED) : 0;
    pthread_mutex_unlock(&lock);
    return value;
}

void dry_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < known; i++)
        __atomic_store_n(&counters[i].value, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

/* DRY_FAIL="cuMemSetAccess=999": calls that say MAY_FAIL return that code. Read at each call, so a test may change it. */
int dry_fails(const char *call) {
    const char *wanted = getenv("DRY_FAIL");
    size_t length = strlen(call);
    return wanted && strncmp(wanted, call, length) == 0 && wanted[length] == '=' ? atoi(wanted + length + 1) : 0;
}

static void say(const char *format, va_list values) {
    char text[512];
    vsnprintf(text, sizeof text, format, values);
    fprintf(stderr, "dry_gpu: %s\n", text);
}

void dry_trace(const char *format, ...) {
    if (!dry_traces())
        return;
    va_list values;
    va_start(values, format);
    say(format, values);
    va_end(values);
}

/* Says what a caller did wrong. With DRY_STRICT=1 the process ends, and a core or a debugger shows where. */
void dry_misuse(const char *format, ...) {
    TALLY("misuses", 1);
    va_list values;
    va_start(values, format);
    say(format, values);
    va_end(values);
    if (dry_strict())
        abort();
}

void dry_misused_at(const char *call, const void *address, const char *why) {
    dry_misuse("%s(%p): %s", call, address, why);
}
