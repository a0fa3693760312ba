/* Streams and events. Nothing runs on the device, so that every stream is idle; an event holds the host's time. */
#include "dry.h"
#include "streams.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static bool usable_stream(const char *call, cudaStream_t stream) {
    if (is_default(stream) || stream->what == STREAM)
        return true;
    dry_misused_at(call, stream, "the stream is destroyed");
    return false;
}

static bool usable_event(const char *call, cudaEvent_t event) {
    if (event && event->what == EVENT)
        return true;
    dry_misused_at(call, event, "the event is destroyed");
    return false;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
    COUNT();
    *stream = malloc(sizeof **stream);
    if (!*stream)
        return dry_error(cudaErrorMemoryAllocation);
    **stream = (struct CUstream_st){
        .what = STREAM, .device = dry_current_device(), .priority = priority, .blocking = !(flags & cudaStreamNonBlocking)};
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    COUNT();
    if (is_default(stream) || !usable_stream(__func__, stream))
        return dry_error(cudaErrorInvalidResourceHandle);
    stream->what = GONE;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    COUNT();
    *priority = is_default(stream) ? 0 : stream->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    COUNT();
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    COUNT();
    return usable_stream(__func__, stream) ? dry_host_waits(__func__, stream) : dry_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    COUNT();
    (void)flags;
    bool usable = usable_stream(__func__, stream) && usable_event(__func__, event);
    return usable ? dry_wait_in_capture(stream, event) : dry_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    COUNT();
    SYNCHRONISES();
    dry_trace("%s", __func__);
    return usable_stream(__func__, stream) ? dry_host_waits(__func__, stream) : dry_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaDeviceSynchronize(void) {
    COUNT();
    SYNCHRONISES();
    dry_trace("%s", __func__);
    return (cudaError_t)dry_unsafe_in_capture(__func__);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    COUNT();
    int code = dry_queued(__func__, stream);
    if (!code)
        function(data);
    return (cudaError_t)code;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned int flags) {
    COUNT();
    (void)flags;
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    COUNT();
    (void)flags;
    *event = calloc(1, sizeof **event);
    if (!*event)
        return dry_error(cudaErrorMemoryAllocation);
    **event = (struct CUevent_st){.what = EVENT, .device = dry_current_device()};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    COUNT();
    if (!usable_event(__func__, event))
        return dry_error(cudaErrorInvalidResourceHandle);
    event->what = GONE;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
    COUNT();
    (void)flags;
    if (!usable_stream(__func__, stream) || !usable_event(__func__, event))
        return dry_error(cudaErrorInvalidResourceHandle);
    if (!is_default(stream) && stream->device != event->device) {
        dry_misused_at(__func__, event, "the event and the stream belong to different devices");
        return dry_error(cudaErrorInvalidResourceHandle);
    }
    dry_record_in_capture(event, stream);
    event->recorded = true;
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
    COUNT();
    return usable_event(__func__, event) ? dry_host_waits_for_event(__func__, event) : dry_error(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    COUNT();
    SYNCHRONISES();
    dry_trace("%s", __func__);
    return usable_event(__func__, event) ? dry_host_waits_for_event(__func__, event) : dry_error(cudaErrorInvalidResourceHandle);
}

/* Milliseconds of the host between two records; at least a microsecond, for rates are computed from it. */
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    COUNT();
    if (!usable_event(__func__, start) || !usable_event(__func__, end) || !start->recorded || !end->recorded)
        return dry_error(cudaErrorInvalidResourceHandle);
    double passed = 1e3 * (double)(end->time.tv_sec - start->time.tv_sec) + 1e-6 * (double)(end->time.tv_nsec - start->time.tv_nsec);
    *milliseconds = passed > 1e-3 ? (float)passed : 1e-3f;
    return cudaSuccess;
}
