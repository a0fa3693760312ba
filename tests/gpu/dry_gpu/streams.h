/* What stands behind a cudaStream_t and a cudaEvent_t. Freed ones stay, marked: a later use is found. */
#pragma once
#include <cuda_runtime_api.h>
#include <time.h>

#define MAX_CAPTURED 64 /* streams of one capture */

enum what { STREAM = 0x57e4, EVENT = 0xe7e4, GRAPH = 0x96af, EXECUTABLE = 0x96ae, GONE = 0x60e0 };

struct CUstream_st {
    enum what what;
    int device;
    int priority;
    bool blocking;           /* waits for the default stream */
    struct CUgraph_st *into; /* the capture that takes its work, or NULL */
    int number;              /* among the streams of that capture */
};

struct CUevent_st {
    enum what what;
    int device;
    bool recorded;
    struct timespec time;
    unsigned long long of;       /* the capture in which it was recorded last, or 0 */
    long long after[MAX_CAPTURED]; /* the nodes of each of its streams before the record */
};

/* The null, the legacy and the per-thread default stream are no pointers. */
static inline bool is_default(const void *stream) { return (size_t)stream <= 2; }

/* graphs.c: what a call means while a graph is captured; an error of the card, or 0. */

int dry_wait_in_capture(cudaStream_t stream, cudaEvent_t event);
void dry_record_in_capture(cudaEvent_t event, cudaStream_t stream);
int dry_host_waits(const char *call, cudaStream_t stream); /* for a stream, or asks for it */
int dry_host_waits_for_event(const char *call, cudaEvent_t event);
