/* The time of a GPU in software: every stream is a queue, and a seed decides when its work is done.
 *
 * Preloaded before the stub of ../dry_gpu, whose calls it takes over where they queue work, wait for it or ask for it.
 * Work that needs values, the operators of PyTorch, is a number that is handed to a function of Python (soft_serve);
 * copies, fills, host functions and events are done here. A stream's work is done in order and after the events that it
 * waits for. Nothing else is promised: work is done at the latest when the host waits for it, and at the earliest when it
 * is queued, as the seed says. Addresses are raw and hold nothing alive, as on a card.
 *
 * One thread of Python serves all queues (soft_serve). A thread that waits gives up the GIL first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, NOT_READY = 600, NOT_SUPPORTED = 801, STREAM_CAPTURE_UNSUPPORTED = 900 };
enum place { PAGEABLE, PINNED, DEVICE, MANAGED };
enum what { OPERATOR, COPY, FILL, CALL, RECORD, WAIT };

/* A point in a stream's queue that a record made; events point at their last one. */
struct mark {
    struct stream *on;
    bool done;
    double at; /* ms */
    struct mark *again; /* of a record in a graph: that of the last replay */
};

struct item {
    enum what what;
    long number;            /* OPERATOR */
    char *to, *from, *own;  /* COPY, FILL; own: a staged source, freed afterwards */
    size_t bytes;
    int value;
    void (*call)(void *);
    void *data;
    struct mark *mark;
    void *where; /* in a graph: the stream */
    struct item *next;
};

struct stream {
    void *handle;
    int device;
    struct item *head, *tail;
    bool drawn, busy;
    double eager; /* 0: only when it must; 1: as soon as it can */
    struct stream *next;
};

struct event {
    void *handle;
    struct mark *last;
    struct event *next;
};

#define BUCKETS 4096
static struct stream *streams;
static struct event *events[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   /* the queues */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;   /* one request at a time */
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, answered = PTHREAD_COND_INITIALIZER;
static bool queued;                                        /* false: everything is done at once */
static uint64_t state = 1;
static __thread int muted, last_error;
static __thread long read_back;
static void (*operate)(long), (*forget)(long);

#define NEXT(name) ({ static void *found_; if (!found_) found_ = dlsym(RTLD_NEXT, name); found_; })

/* Random numbers: xorshift64*. */

static double draw(void) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (double)((state * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

/* What the stub says of an address and of the current device. */

static enum place place_of(const void *address) {
    struct { int type, device; void *on_device, *on_host; long reserved[8]; } found = {0};
    int (*ask)(void *, const void *) = NEXT("cudaPointerGetAttributes");
    return ask && ask(&found, address) == OK ? (enum place)found.type : PAGEABLE;
}

static int current_device(void) {
    int device = 0, (*ask)(int *) = NEXT("cudaGetDevice");
    return ask && ask(&device) == OK ? device : 0;
}

/* The following need the lock. */

static struct stream *stream_of(void *handle) {
    int device = (size_t)handle > 2 ? -1 : current_device();
    if ((size_t)handle <= 2)
        handle = NULL; /* the null, the legacy and the per-thread default stream are one */
    struct stream *stream = streams;
    while (stream && (stream->handle != handle || stream->device != device))
        stream = stream->next;
    if (!stream) {
        stream = calloc(1, sizeof *stream);
        *stream = (struct stream){.handle = handle, .device = device, .next = streams};
        streams = stream;
    }
    if (!stream->drawn) {
        double luck = draw();
        stream->eager = luck < 0.35 ? 0 : luck < 0.7 ? 1 : draw();
        stream->drawn = true;
    }
    return stream;
}

static struct event *event_of(void *handle) {
    struct event **place = &events[((size_t)handle >> 4) % BUCKETS];
    while (*place && (*place)->handle != handle)
        place = &(*place)->next;
    if (!*place) {
        *place = calloc(1, sizeof **place);
        (*place)->handle = handle;
    }
    return *place;
}

static bool ready(const struct stream *stream) {
    return stream->head && !stream->busy && (stream->head->what != WAIT || stream->head->mark->done);
}

static void do_item(struct item *item) {
    switch (item->what) {
    case OPERATOR: operate(item->number); break;
    case COPY: memmove(item->to, item->from, item->bytes); break;
    case FILL: memset(item->to, item->value, item->bytes); break;
    case CALL: item->call(item->data); break;
    case RECORD: item->mark->at = now(), item->mark->done = true; break;
    case WAIT: break;
    }
    free(item->own);
}

/* Does the first item of a stream; gives up the lock meanwhile. */
static void do_first(struct stream *stream) {
    struct item *item = stream->head;
    stream->busy = true;
    pthread_mutex_unlock(&lock);
    do_item(item);
    pthread_mutex_lock(&lock);
    stream->head = item->next;
    if (!stream->head)
        stream->tail = NULL;
    stream->busy = false;
    free(item);
}

/* Lets the adversary do what it likes: each stream goes on while its luck lasts. */
static void stroll(void) {
    for (bool moved = true; moved;) {
        moved = false;
        for (struct stream *stream = streams; stream; stream = stream->next)
            while (ready(stream) && stream->eager > 0 && draw() < stream->eager) {
                do_first(stream);
                moved = true;
            }
    }
}

/* Does the next item that a stream's progress needs, which may be another stream's. */
static void advance(struct stream *stream) {
    while (stream->head && stream->head->what == WAIT && !stream->head->mark->done)
        stream = stream->head->mark->on;
    if (stream->head && !stream->busy)
        do_first(stream);
}

static void reach(struct mark *mark) {
    while (!mark->done) {
        stroll();
        if (!mark->done)
            advance(mark->on);
    }
}

static void finish(struct stream *stream) {
    if (!stream->tail)
        return;
    struct item *last = stream->tail;
    for (bool in = true; in;) {
        in = false;
        for (struct item *item = stream->head; item; item = item->next)
            in |= item == last;
        if (in) {
            advance(stream);
            stroll();
        }
    }
}

/* Streams of a device; the handle of the others' device is not kept, so that they all count. */
static void finish_all(void) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        finish(stream);
}

/* Requests to the serving thread. */

static struct {
    bool open, over;
    struct mark *mark;
    struct stream *stream;
    bool all;
} request;
static pthread_t server;
static bool serving;

void soft_serve(void (*function)(long)) {
    operate = function;
    pthread_mutex_lock(&lock);
    server = pthread_self(), serving = true;
    while (serving) {
        while (serving && !(request.open && !request.over))
            pthread_cond_wait(&asked, &lock);
        if (!serving)
            break;
        if (request.mark)
            reach(request.mark);
        else if (request.stream)
            finish(request.stream);
        else if (request.all)
            finish_all();
        else
            stroll();
        request.over = true;
        pthread_cond_broadcast(&answered);
    }
    pthread_mutex_unlock(&lock);
}

int soft_is_serving(void) { return serving; }

void soft_stop(void) {
    pthread_mutex_lock(&lock);
    serving = queued = false;
    request.over = true;
    pthread_cond_broadcast(&asked);
    pthread_cond_broadcast(&answered);
    pthread_mutex_unlock(&lock);
}

/* Waits until the server has done it. Without the lock; a thread that holds the GIL gives it up. */
static void ask_for(struct mark *mark, struct stream *stream, bool all) {
    if (!serving || !queued || pthread_equal(pthread_self(), server))
        return;
    int (*holds)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    void *(*save)(void) = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    void (*restore)(void *) = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    void *thread = holds && holds() ? save() : NULL;
    pthread_mutex_lock(&turn);
    pthread_mutex_lock(&lock);
    request.mark = mark, request.stream = stream, request.all = all;
    request.open = true, request.over = false;
    pthread_cond_broadcast(&asked);
    while (!request.over)
        pthread_cond_wait(&answered, &lock);
    request.open = false;
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&turn);
    if (thread)
        restore(thread);
}

static bool any_eager(void) {
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->eager > 0 && ready(stream))
            return true;
    return false;
}

/* Graphs. What is queued on a stream that captures, by the stub's word, is recorded; a replay queues it anew. Branches of a
 * graph are queues of their own then, which wait for nothing but what the capture has recorded. */

#define BRANCHES 64
struct graph {
    void *handle; /* of the graph, later of what is made of it to be launched */
    struct item *head, *tail;
    void *captured[BRANCHES]; /* streams; the first is the one that began */
    int branches;
    struct graph *next;
};
static struct graph *recording, *graphs;

static bool captures(void *handle) {
    if (!recording || (size_t)handle <= 2)
        return false;
    int status = 0, (*ask)(void *, int *) = NEXT("cudaStreamIsCapturing");
    return ask && ask(handle, &status) == OK && status == 1;
}

static void keep(void *handle, struct item given) {
    struct item *item = malloc(sizeof *item);
    *item = given;
    item->where = handle, item->next = NULL;
    if (recording->tail)
        recording->tail->next = item;
    else
        recording->head = item;
    recording->tail = item;
}

static int branch_of(struct graph *graph, void *stream) {
    for (int i = 0; i < graph->branches; i++)
        if (graph->captured[i] == stream)
            return i;
    if (graph->branches == BRANCHES)
        abort();
    graph->captured[graph->branches] = stream;
    return graph->branches++;
}

/* Its numbers are forgotten, and with them what Python computes for them. */
static void free_graph(struct graph *graph) {
    for (struct item *item = graph->head, *next; item; item = next) {
        next = item->next;
        if (item->what == OPERATOR && forget)
            forget(item->number);
        free(item);
    }
    free(graph);
}

static struct graph *graph_of(void *handle) {
    struct graph *found = graphs;
    while (found && found->handle != handle)
        found = found->next;
    return found;
}

static void drop_graph(void *handle) {
    for (struct graph **place = &graphs; *place; place = &(*place)->next)
        if ((*place)->handle == handle) {
            struct graph *dropped = *place;
            *place = dropped->next;
            free_graph(dropped);
            return;
        }
}

static void enqueue(void *handle, struct item given) {
    if (captures(handle)) {
        keep(handle, given);
        return;
    }
    if (!queued) {
        do_item(&given);
        return;
    }
    struct item *item = malloc(sizeof *item);
    *item = given;
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    if (item->what == RECORD)
        item->mark->on = stream;
    if (stream->tail)
        stream->tail->next = item;
    else
        stream->head = item;
    stream->tail = item;
    bool strolls = any_eager();
    pthread_mutex_unlock(&lock);
    if (strolls)
        ask_for(NULL, NULL, false);
}

static void finish_stream(void *handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    bool rests = stream->head;
    pthread_mutex_unlock(&lock);
    if (rests)
        ask_for(NULL, stream, false);
}

/* For Python (ctypes). */

void soft_seed(long seed) { /* below 0: everything is done at once, in the host's order */
    ask_for(NULL, NULL, true);
    pthread_mutex_lock(&lock);
    queued = seed >= 0;
    state = (uint64_t)(seed < 0 ? 0 : seed) * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
    for (int i = 0; i < 8; i++)
        draw();
    for (struct stream *stream = streams; stream; stream = stream->next)
        stream->drawn = false;
    pthread_mutex_unlock(&lock);
}

void soft_push(void *stream, long number) { enqueue(stream, (struct item){.what = OPERATOR, .number = number}); }
void soft_finish(void *stream) { finish_stream(stream); }
int soft_is_queued(void) { return queued; }
int soft_captures(void *stream) { return captures(stream); }
void soft_on_forget(void (*function)(long)) { forget = function; } /* of a graph's operators that are gone with it */
int soft_place(void *address) { return place_of(address); }

/* While an operator of PyTorch runs for its outputs, its launches and copies do nothing: Python computes the values. */
void soft_mute(int more) {
    if (muted == 0)
        read_back = 0;
    muted += more;
}
long soft_read_back(void) { return read_back; } /* copies to the host inside of the operator */

/* Launches. One that no operator accounts for has nobody to compute its values. */

struct kernel { const void *host; char *name; struct kernel *next; };
static struct kernel *kernels[BUCKETS];

void __cudaRegisterFunction(void **module, const char *host, char *device, const char *name, int limit, void *a, void *b,
                            void *c, void *d, int *e) {
    struct kernel *kernel = malloc(sizeof *kernel), **place = &kernels[((size_t)host >> 4) % BUCKETS];
    *kernel = (struct kernel){host, strdup(name), *place};
    *place = kernel;
    void (*next)() = NEXT("__cudaRegisterFunction");
    if (next)
        next(module, host, device, name, limit, a, b, c, d, e);
}

static int launch(const void *function, const char *name) {
    if (muted || !operate)
        return OK;
    for (struct kernel *kernel = kernels[((size_t)function >> 4) % BUCKETS]; kernel && !name; kernel = kernel->next)
        if (kernel->host == function)
            name = kernel->name;
    if (!last_error)
        fprintf(stderr, "softgpu: %s was launched outside of every operator that has values here\n", name ? name : "?");
    last_error = NOT_SUPPORTED;
    return NOT_SUPPORTED;
}

/* PyTorch asks after every launch, and raises. */
int cudaGetLastError(void) {
    int error = last_error, (*next)(void) = NEXT("cudaGetLastError");
    last_error = OK;
    return error ? error : next ? next() : OK;
}
int cudaPeekAtLastError(void) {
    int (*next)(void) = NEXT("cudaPeekAtLastError");
    return last_error ? last_error : next ? next() : OK;
}

int __cudaLaunchKernel(void *kernel) { return launch(kernel, NULL); }
int cudaLaunchKernel(const void *function) { return launch(function, NULL); }
int cudaLaunchKernelExC(void *config, const void *function) { return launch(function, NULL); }
int cudaLaunchCooperativeKernel(const void *function) { return launch(function, NULL); }
int cuLaunchKernel(void *function) { return launch(function, "(by the driver)"); }
int cuLaunchKernelEx(void *config, void *function) { return launch(function, "(by the driver)"); }
#define PRODUCT(name) int name() { return launch(NULL, #name) == OK ? 0 : 15; }
PRODUCT(cublasLtMatmul)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)

/* Copies and fills. */

static int copy(void *to, const void *from, size_t bytes, void *stream, bool waits) {
    enum place source = place_of(from), target = place_of(to);
    if (muted) {
        read_back += target != DEVICE && source == DEVICE;
        return OK;
    }
    if (captures(stream) && (source == PAGEABLE || target == PAGEABLE || waits))
        return STREAM_CAPTURE_UNSUPPORTED;
    struct item item = {.what = COPY, .to = to, .from = (char *)from, .bytes = bytes};
    if (source == PAGEABLE && queued) { /* staged before the call returns */
        item.own = item.from = malloc(bytes ? bytes : 1);
        memcpy(item.own, from, bytes);
    }
    enqueue(stream, item);
    if (waits || target == PAGEABLE)
        finish_stream(stream);
    return OK;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return copy(to, from, bytes, stream, false);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return copy(to, from, bytes, NULL, true); }
int cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, void *stream) {
    return copy(to, from, bytes, stream, false);
}
int cudaMemsetAsync(void *start, int value, size_t bytes, void *stream) {
    if (!muted)
        enqueue(stream, (struct item){.what = FILL, .to = start, .value = value, .bytes = bytes});
    return OK;
}
int cudaMemset(void *start, int value, size_t bytes) { return cudaMemsetAsync(start, value, bytes, NULL); }
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    enqueue(stream, (struct item){.what = CALL, .call = function, .data = data});
    return OK;
}

/* Events, waits, questions. Each asks the stub first, which finds misuse. */

#define ASK(name, ...)                       \
    do {                                     \
        int (*next_)() = NEXT(name);         \
        int code_ = next_ ? next_(__VA_ARGS__) : OK; \
        if (code_ != OK)                     \
            return code_;                    \
    } while (0)

static int record(void *event, void *stream) {
    struct mark *mark = calloc(1, sizeof *mark);
    pthread_mutex_lock(&lock);
    event_of(event)->last = mark;
    pthread_mutex_unlock(&lock);
    enqueue(stream, (struct item){.what = RECORD, .mark = mark});
    return OK;
}
int cudaEventRecord(void *event, void *stream) {
    ASK("cudaEventRecordWithFlags", event, stream, 0);
    return record(event, stream);
}
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    ASK("cudaEventRecordWithFlags", event, stream, flags);
    return record(event, stream);
}

static struct mark *last_mark(void *event) {
    pthread_mutex_lock(&lock);
    struct mark *mark = event_of(event)->last;
    pthread_mutex_unlock(&lock);
    return mark;
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ASK("cudaStreamWaitEvent", stream, event, flags);
    struct mark *mark = last_mark(event);
    if (mark && !mark->done)
        enqueue(stream, (struct item){.what = WAIT, .mark = mark});
    return OK;
}
int cudaEventSynchronize(void *event) {
    ASK("cudaEventSynchronize", event);
    struct mark *mark = last_mark(event);
    if (mark && !mark->done)
        ask_for(mark, NULL, false);
    return OK;
}
int cudaEventQuery(void *event) {
    ASK("cudaEventQuery", event);
    struct mark *mark = last_mark(event);
    return mark && !mark->done ? NOT_READY : OK;
}
int cudaEventDestroy(void *event) {
    pthread_mutex_lock(&lock);
    event_of(event)->last = NULL;
    pthread_mutex_unlock(&lock);
    ASK("cudaEventDestroy", event);
    return OK;
}
int cudaEventElapsedTime(float *ms, void *start, void *end) {
    ASK("cudaEventElapsedTime", ms, start, end);
    struct mark *from = last_mark(start), *to = last_mark(end);
    if (!from || !to || !from->done || !to->done)
        return NOT_READY;
    *ms = to->at - from->at > 1e-3 ? (float)(to->at - from->at) : 1e-3f;
    return OK;
}
int cudaStreamSynchronize(void *stream) {
    ASK("cudaStreamSynchronize", stream);
    finish_stream(stream);
    return OK;
}
int cudaDeviceSynchronize(void) {
    ASK("cudaDeviceSynchronize");
    ask_for(NULL, NULL, true);
    return OK;
}
int cudaStreamQuery(void *handle) {
    ASK("cudaStreamQuery", handle);
    pthread_mutex_lock(&lock);
    bool rests = stream_of(handle)->head;
    pthread_mutex_unlock(&lock);
    return rests ? NOT_READY : OK;
}

/* Memory is given back only when nothing is queued any more: these wait on a card, too. */
int cudaFree(void *start) {
    ask_for(NULL, NULL, true);
    ASK("cudaFree", start);
    return OK;
}
int cudaFreeHost(void *start) {
    ask_for(NULL, NULL, true);
    ASK("cudaFreeHost", start);
    return OK;
}
int cudaHostUnregister(void *start) {
    ask_for(NULL, NULL, true);
    ASK("cudaHostUnregister", start);
    return OK;
}
int cuMemUnmap(void *start, size_t bytes) {
    ask_for(NULL, NULL, true);
    ASK("cuMemUnmap", start, bytes);
    return OK;
}

/* Graphs. */

int cudaStreamBeginCapture(void *stream, int mode) {
    ASK("cudaStreamBeginCapture", stream, mode);
    recording = calloc(1, sizeof *recording);
    branch_of(recording, stream);
    return OK;
}
int cudaStreamEndCapture(void *stream, void **graph) {
    int (*next)(void *, void **) = NEXT("cudaStreamEndCapture"), code = next(stream, graph);
    struct graph *done = recording;
    recording = NULL;
    if (code != OK) {
        free_graph(done);
        return code;
    }
    done->handle = *graph, done->next = graphs;
    graphs = done;
    return OK;
}
int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    struct graph *found = graph_of(graph);
    if (!nodes && found) {
        *count = 0;
        for (struct item *item = found->head; item; item = item->next)
            *count += item->what != RECORD && item->what != WAIT;
    }
    return OK;
}
int cudaGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
    ASK("cudaGraphInstantiateWithFlags", made, graph, flags);
    graph_of(graph)->handle = *made;
    return OK;
}
int cudaGraphInstantiate(void **made, void *graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}
int cudaGraphLaunch(void *made, void *stream) {
    ASK("cudaGraphLaunch", made, stream);
    struct graph *graph = graph_of(made);
    for (struct item *item = graph->head; item; item = item->next) {
        struct item again = *item;
        if (again.what == RECORD)
            again.mark = item->mark->again = calloc(1, sizeof *again.mark);
        if (again.what == WAIT)
            again.mark = item->mark->again;
        int branch = branch_of(graph, item->where);
        again.next = NULL;
        enqueue(branch ? &graph->captured[branch] : stream, again);
    }
    return OK;
}
int cudaGraphDestroy(void *graph) {
    ASK("cudaGraphDestroy", graph);
    drop_graph(graph);
    return OK;
}
int cudaGraphExecDestroy(void *made) {
    ask_for(NULL, NULL, true); /* a replay may be in progress */
    ASK("cudaGraphExecDestroy", made);
    drop_graph(made);
    return OK;
}
