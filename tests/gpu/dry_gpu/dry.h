/* What the files of the stub share. README.md says what the stub is. */
#pragma once
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>

#define MAX_DEVICES 16

/* cards.c: the simulated card, from the environment. */

struct card {
    int capability;              /* 89: sm_89 */
    const char *name;            /* as the driver reports it */
    int processors;              /* streaming multiprocessors */
    int threads;                 /* resident on one multiprocessor */
    int blocks;                  /* resident on one multiprocessor */
    int shared_kib;              /* shared memory of one multiprocessor */
    int l2_kib;
    int bus_bits;
};

const struct card *dry_card(void);
size_t dry_total_bytes(void);    /* memory of each device */
int dry_devices(void);           /* DRY_DEVICES */
int dry_visible_devices(void);   /* of these, cut by CUDA_VISIBLE_DEVICES */
bool dry_copies(void);           /* DRY_COPY=1: copies and fills are done */
bool dry_traces(void);           /* DRY_TRACE=1 */
bool dry_strict(void);           /* DRY_STRICT=1: misuse ends the process */

/* counts.c: how often each entry point was called, and totals of another kind. */

struct counter;
struct counter *dry_counter(const char *name);
void dry_add(struct counter *counter, long long amount);
void dry_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
int dry_fails(const char *call); /* the code that DRY_FAIL names for a call, or 0 */
void dry_misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
void dry_misused_at(const char *call, const void *address, const char *why);

#define TALLY(name, amount)                       \
    do {                                          \
        static struct counter *counter_;          \
        if (!counter_)                            \
            counter_ = dry_counter(name);         \
        dry_add(counter_, amount);                \
    } while (0)
#define COUNT() TALLY(__func__, 1)
#define MAY_FAIL()                                \
    do {                                          \
        int code_ = dry_fails(__func__);          \
        if (code_)                                \
            return code_;                         \
    } while (0)
#define SYNCHRONISES() TALLY("synchronisations", 1)

/* ranges.c: address ranges by address. */

enum kind { PAGEABLE, PINNED, REGISTERED, DEVICE, MANAGED, RESERVED };

struct range {
    char *start;
    size_t bytes;
    enum kind kind;
    int device;
};

bool dry_range_add(void *start, size_t bytes, enum kind kind, int device);
bool dry_range_take(void *start, struct range *taken);
bool dry_range_at(const void *address, struct range *found);

/* memory.c: the memory of each device. */

bool dry_take_bytes(int device, size_t bytes);   /* false: the device has too little left */
void dry_give_bytes(int device, size_t bytes);
size_t dry_free_bytes(int device);
void *dry_reserve(size_t bytes, bool accessible);
void dry_access(void *start, size_t bytes, bool on);
int dry_copy(const char *call, void *to, const void *from, size_t bytes);
int dry_fill(const char *call, void *start, int value, size_t bytes);

/* runtime.c: the calling thread's device and its last error. */

int dry_current_device(void);
int dry_error(int code);         /* remembers the code for cudaGetLastError and returns it */

/* graphs.c: what a call means while a graph is captured; an error of the card, or 0. */

int dry_queued(const char *call, const void *stream);
int dry_copied_in_capture(const char *call, const void *stream, bool pageable);
int dry_unsafe_in_capture(const char *call);
bool dry_captures(const void *stream); /* what is queued on it is not done, but becomes a node */
