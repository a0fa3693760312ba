/* Graphs: a capture counts what is queued on its streams, and a replay does nothing, as a launch does.
 *
 * What a card refuses while it captures is refused with the card's code and counted as misuse; the capture is then
 * invalid, and ends without a graph. One capture at a time. An executable graph takes NODE_BYTES of the device's memory
 * for each node.
 */
#include "dry.h"
#include "streams.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NODE_BYTES = 10240 }; /* of the driver: reported in github.com/NVIDIA/cccl/issues/3768 */

struct CUgraph_st {
    enum what what;
    unsigned long long id;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool invalid;
    int streams; /* the first is the one that began */
    cudaStream_t joined[MAX_CAPTURED];
    long long nodes[MAX_CAPTURED];              /* of each stream */
    long long after[MAX_CAPTURED][MAX_CAPTURED]; /* how many nodes of the others each stream's next one waits for */
};

struct CUgraphExec_st {
    enum what what;
    int device;
    long long nodes;
    size_t bytes;
};

static struct CUgraph_st *capturing;
static unsigned long long captures;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static struct CUgraph_st *capture_of(const void *stream) { return is_default(stream) ? NULL : ((cudaStream_t)stream)->into; }

bool dry_captures(const void *stream) { return capture_of(stream) != NULL; }

static int refuse(const char *call, const char *why, cudaError_t code) {
    dry_misuse("%s while a graph is captured: %s", call, why);
    if (capturing)
        capturing->invalid = true;
    return dry_error(code);
}

/* Work is queued on a stream. */
int dry_queued(const char *call, const void *stream) {
    struct CUgraph_st *graph = capture_of(stream);
    if (graph) {
        if (graph->invalid)
            return dry_error(cudaErrorStreamCaptureInvalidated);
        graph->nodes[((cudaStream_t)stream)->number]++;
        return cudaSuccess;
    }
    if (!capturing || !is_default(stream))
        return cudaSuccess;
    if (capturing->joined[0]->blocking)
        return refuse(call, "work on the default stream, for which that of the capture waits", cudaErrorStreamCaptureImplicit);
    if (pthread_equal(capturing->thread, pthread_self())) /* a card does it at once, outside of the graph */
        dry_misuse("%s on the default stream while this thread captures a graph, which then lacks it", call);
    return cudaSuccess;
}

/* A call that may wait, such as an allocation: refused in the thread that captures, or in all, as the modes say. */
int dry_unsafe_in_capture(const char *call) {
    if (!capturing || thread_mode == cudaStreamCaptureModeRelaxed || capturing->mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    if (capturing->mode == cudaStreamCaptureModeThreadLocal && !pthread_equal(capturing->thread, pthread_self()))
        return cudaSuccess;
    return refuse(call, "it may wait for the device", cudaErrorStreamCaptureUnsupported);
}

int dry_copied_in_capture(const char *call, const void *stream, bool pageable) {
    if (pageable && capture_of(stream))
        return refuse(call, "a graph cannot copy pageable memory", cudaErrorStreamCaptureUnsupported);
    return dry_queued(call, stream);
}

int dry_host_waits(const char *call, cudaStream_t stream) {
    if (capture_of(stream))
        return refuse(call, "the host waits for a stream that captures", cudaErrorStreamCaptureUnsupported);
    return is_default(stream) ? dry_unsafe_in_capture(call) : cudaSuccess;
}

int dry_host_waits_for_event(const char *call, cudaEvent_t event) {
    if (capturing && event->of == capturing->id)
        return refuse(call, "the host waits for an event of the graph", cudaErrorCapturedEvent);
    return cudaSuccess;
}

static void join(struct CUgraph_st *graph, cudaStream_t stream) {
    if (graph->streams == MAX_CAPTURED)
        abort();
    stream->into = graph;
    stream->number = graph->streams;
    graph->joined[graph->streams++] = stream;
}

int dry_wait_in_capture(cudaStream_t stream, cudaEvent_t event) {
    struct CUgraph_st *graph = capture_of(stream);
    if (graph && event->of != graph->id)
        return refuse("cudaStreamWaitEvent", "the event is not of this graph", cudaErrorStreamCaptureIsolation);
    if (!capturing || event->of != capturing->id)
        return cudaSuccess;
    if (is_default(stream))
        return refuse("cudaStreamWaitEvent", "the default stream cannot join", cudaErrorStreamCaptureImplicit);
    if (!graph)
        join(capturing, stream);
    for (int i = 0; i < capturing->streams; i++)
        if (capturing->after[stream->number][i] < event->after[i])
            capturing->after[stream->number][i] = event->after[i];
    return cudaSuccess;
}

void dry_record_in_capture(cudaEvent_t event, cudaStream_t stream) {
    struct CUgraph_st *graph = capture_of(stream);
    event->of = graph ? graph->id : 0;
    if (!graph)
        return;
    memcpy(event->after, graph->after[stream->number], sizeof event->after);
    event->after[stream->number] = graph->nodes[stream->number];
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    COUNT();
    if (is_default(stream) || stream->what != STREAM)
        return refuse(__func__, "not a stream that can be captured", cudaErrorStreamCaptureUnsupported);
    if (capturing)
        return refuse(__func__, "another capture is not over", cudaErrorIllegalState);
    capturing = calloc(1, sizeof *capturing);
    *capturing = (struct CUgraph_st){.what = GRAPH, .id = ++captures, .mode = mode, .thread = pthread_self()};
    join(capturing, stream);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    COUNT();
    *graph = NULL;
    if (!capturing || capturing->joined[0] != stream) {
        dry_misuse("%s: this stream began no capture", __func__);
        return dry_error(cudaErrorStreamCaptureUnmatched);
    }
    if (capturing->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(capturing->thread, pthread_self()))
        return refuse(__func__, "another thread began it", cudaErrorStreamCaptureWrongThread);
    struct CUgraph_st *done = capturing;
    cudaError_t code = done->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    for (int i = 0; i < done->streams; i++) {
        if (i && done->after[0][i] < done->nodes[i] && !code) {
            dry_misuse("%s: a stream of the graph has not joined the one that began it", __func__);
            code = cudaErrorStreamCaptureUnjoined;
        }
        done->joined[i]->into = NULL;
    }
    capturing = NULL;
    if (code) {
        done->what = GONE;
        return dry_error(code);
    }
    *graph = done;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    COUNT();
    struct CUgraph_st *graph = capture_of(stream);
    *status = !graph           ? cudaStreamCaptureStatusNone
              : graph->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    (void)dependencies, (void)edges;
    struct CUgraph_st *into = capture_of(stream);
    if (id)
        *id = into ? into->id : 0;
    if (graph)
        *graph = into;
    if (count)
        *count = 0;
    return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    COUNT();
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

static long long nodes_of(const struct CUgraph_st *graph) {
    long long nodes = 0;
    for (int i = 0; i < graph->streams; i++)
        nodes += graph->nodes[i];
    return nodes;
}

static bool usable_graph(const char *call, cudaGraph_t graph) {
    if (graph && graph->what == GRAPH && graph != capturing)
        return true;
    dry_misused_at(call, graph, "the graph is destroyed, or its capture not over");
    return false;
}

static bool usable_executable(const char *call, cudaGraphExec_t exec) {
    if (exec && exec->what == EXECUTABLE)
        return true;
    dry_misused_at(call, exec, "the executable graph is destroyed");
    return false;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    COUNT();
    (void)flags;
    int code = dry_fails(__func__);
    if (code || !usable_graph(__func__, graph))
        return dry_error(code ? code : cudaErrorInvalidValue);
    size_t bytes = (size_t)nodes_of(graph) * NODE_BYTES;
    if (!dry_take_bytes(dry_current_device(), bytes))
        return dry_error(cudaErrorMemoryAllocation);
    *exec = malloc(sizeof **exec);
    **exec = (struct CUgraphExec_st){EXECUTABLE, dry_current_device(), nodes_of(graph), bytes};
    TALLY("graph_bytes", (long long)bytes);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    COUNT();
    if (!usable_graph(__func__, graph))
        return dry_error(cudaErrorInvalidValue);
    if (!nodes)
        *count = (size_t)nodes_of(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    COUNT();
    if (!usable_graph(__func__, graph))
        return dry_error(cudaErrorInvalidValue);
    graph->what = GONE;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    COUNT();
    if (!usable_executable(__func__, exec))
        return dry_error(cudaErrorInvalidValue);
    exec->what = GONE;
    dry_give_bytes(exec->device, exec->bytes);
    TALLY("graph_bytes", -(long long)exec->bytes);
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    COUNT();
    (void)stream;
    return usable_executable(__func__, exec) ? cudaSuccess : dry_error(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    COUNT();
    if (!usable_executable(__func__, exec))
        return dry_error(cudaErrorInvalidValue);
    if (capture_of(stream))
        return refuse(__func__, "a graph within a graph is not simulated", cudaErrorStreamCaptureUnsupported);
    TALLY("replayed_nodes", exec->nodes);
    return cudaSuccess;
}
