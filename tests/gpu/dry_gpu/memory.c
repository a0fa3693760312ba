/* Memory of the devices and pinned memory of the host; copies and fills.
 *
 * Device memory is reserved address space: it takes no room until something is written to it. The host cannot touch it, as
 * with a card: a host that follows a device pointer ends in a segmentation fault. With DRY_COPY=1 it is ordinary memory,
 * so that copies are done and another program can compute on it.
 */
#include "dry.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t used[MAX_DEVICES], most[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool dry_take_bytes(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    bool fits = bytes <= dry_total_bytes() - used[device];
    if (fits)
        used[device] += bytes;
    if (used[device] > most[device])
        most[device] = used[device];
    pthread_mutex_unlock(&lock);
    dry_trace("device %d: %zu bytes %s", device, bytes, fits ? "taken" : "refused");
    return fits;
}

void dry_give_bytes(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

size_t dry_free_bytes(int device) {
    pthread_mutex_lock(&lock);
    size_t left = dry_total_bytes() - used[device];
    pthread_mutex_unlock(&lock);
    return left;
}

/* For tests: bytes that a device holds now, and the most that it held. */
long long dry_used(int device) { return device >= 0 && device < MAX_DEVICES ? (long long)used[device] : -1; }
long long dry_most(int device) { return device >= 0 && device < MAX_DEVICES ? (long long)most[device] : -1; }

void *dry_reserve(size_t bytes, bool accessible) {
    int rights = accessible && dry_copies() ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *start = mmap(NULL, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

/* Parts of a reservation come and go; what is gone gives its pages back and reads as zeros when it comes again. */
void dry_access(void *start, size_t bytes, bool on) {
    if (!dry_copies())
        return;
    if (!on)
        madvise(start, bytes, MADV_DONTNEED);
    mprotect(start, bytes, on ? PROT_READ | PROT_WRITE : PROT_NONE);
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    COUNT();
    *total = dry_total_bytes();
    *free = dry_free_bytes(dry_current_device());
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    COUNT();
    *pointer = NULL;
    int code = dry_unsafe_in_capture(__func__);
    if (code)
        return (cudaError_t)code;
    if (!bytes)
        return cudaSuccess;
    int device = dry_current_device();
    if (!dry_take_bytes(device, bytes))
        return dry_error(cudaErrorMemoryAllocation);
    *pointer = dry_reserve(bytes, true);
    if (!*pointer) {
        dry_give_bytes(device, bytes);
        return dry_error(cudaErrorMemoryAllocation);
    }
    dry_range_add(*pointer, bytes, DEVICE, device);
    return cudaSuccess;
}

/* Frees what cudaMalloc or cudaMallocManaged gave. */
cudaError_t cudaFree(void *pointer) {
    COUNT();
    if (!pointer)
        return cudaSuccess;
    struct range range;
    if (!dry_range_at(pointer, &range) || range.start != pointer || (range.kind != DEVICE && range.kind != MANAGED)) {
        dry_misused_at(__func__, pointer, "no device memory begins here: freed twice, or never allocated");
        return dry_error(cudaErrorInvalidValue);
    }
    dry_range_take(pointer, &range);
    if (range.kind == DEVICE)
        dry_give_bytes(range.device, range.bytes);
    munmap(pointer, range.bytes);
    return cudaSuccess;
}

/* Memory that moves between host and device by itself; it does not count as the device's. */
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags) {
    COUNT();
    (void)flags;
    *pointer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*pointer == MAP_FAILED)
        return dry_error(cudaErrorMemoryAllocation);
    dry_range_add(*pointer, bytes, MANAGED, dry_current_device());
    return cudaSuccess;
}

cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation location, unsigned int flags,
                                 cudaStream_t stream) {
    COUNT();
    (void)location, (void)flags, (void)stream;
    struct range range;
    if (dry_range_at(pointer, &range) && range.kind == MANAGED && (char *)pointer + bytes <= range.start + range.bytes)
        return cudaSuccess;
    dry_misused_at(__func__, pointer, "not managed memory, or too long for it");
    return dry_error(cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    COUNT();
    (void)flags;
    int code = dry_unsafe_in_capture(__func__);
    if (code)
        return (cudaError_t)code;
    if (posix_memalign(pointer, 4096, bytes ? bytes : 1))
        return dry_error(cudaErrorMemoryAllocation);
    dry_range_add(*pointer, bytes ? bytes : 1, PINNED, dry_current_device());
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }

cudaError_t cudaFreeHost(void *pointer) {
    COUNT();
    if (!pointer)
        return cudaSuccess;
    struct range range;
    if (!dry_range_at(pointer, &range) || range.start != pointer || range.kind != PINNED) {
        dry_misused_at(__func__, pointer, "no pinned memory begins here: freed twice, or never allocated");
        return dry_error(cudaErrorInvalidValue);
    }
    dry_range_take(pointer, &range);
    free(pointer);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    COUNT();
    (void)flags;
    int code = dry_fails(__func__);
    if (code)
        return dry_error(code);
    if (!pointer || !bytes)
        return dry_error(cudaErrorInvalidValue);
    if (!dry_range_add(pointer, bytes, REGISTERED, dry_current_device())) {
        dry_misused_at(__func__, pointer, "registered already, or not ordinary host memory");
        return dry_error(cudaErrorHostMemoryAlreadyRegistered);
    }
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    COUNT();
    struct range range;
    if (!dry_range_at(pointer, &range) || range.start != pointer || range.kind != REGISTERED) {
        dry_misused_at(__func__, pointer, "not registered");
        return dry_error(cudaErrorHostMemoryNotRegistered);
    }
    dry_range_take(pointer, &range);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    COUNT();
    memset(attributes, 0, sizeof *attributes);
    struct range range;
    if (!dry_range_at(pointer, &range)) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = (void *)pointer;
        return cudaSuccess;
    }
    bool on_host = range.kind == PINNED || range.kind == REGISTERED;
    attributes->type = on_host ? cudaMemoryTypeHost : range.kind == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
    attributes->device = range.device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = attributes->type == cudaMemoryTypeDevice ? NULL : (void *)pointer;
    return cudaSuccess;
}

/* The memory that `bytes` from an address on lie in. Says so where they do not end in it. */
static struct range memory_of(const char *call, const void *address, size_t bytes) {
    struct range range = {(char *)address, bytes, PAGEABLE, -1};
    if (dry_range_at(address, &range) && (char *)address + bytes > range.start + range.bytes)
        dry_misused_at(call, address, "the copy runs past the end of its memory");
    if (range.kind == RESERVED)
        range.kind = DEVICE;
    return range;
}

/* Every copy comes here. Without DRY_COPY device memory has no contents: what is copied from it is zeros, but for a single
 * byte, which is 1. That is how the host reads the answer to a question (`x.isfinite().all()`): the device says yes.
 *
 * Queueing copies by stream, for a device that computes later, begins here: this is the only place that moves bytes.
 */
int dry_copy(const char *call, void *to, const void *from, size_t bytes) {
    struct range target = memory_of(call, to, bytes), source = memory_of(call, from, bytes);
    bool from_device = source.kind == DEVICE, to_device = target.kind == DEVICE;
    if (to_device && !from_device)
        TALLY("host_to_device_bytes", bytes);
    if (from_device && !to_device)
        TALLY("device_to_host_bytes", bytes);
    if (to_device && source.kind == PAGEABLE) {
        TALLY("pageable_copies", 1);
        TALLY("pageable_bytes", bytes);
        dry_trace("%s: %zu bytes to the device from pageable memory", call, bytes);
    }
    if (dry_copies() || (!from_device && !to_device))
        memmove(to, from, bytes);
    else if (!to_device)
        memset(to, bytes == 1, bytes);
    return cudaSuccess;
}

int dry_fill(const char *call, void *start, int value, size_t bytes) {
    struct range target = memory_of(call, start, bytes);
    if (dry_copies() || target.kind != DEVICE)
        memset(start, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    COUNT();
    SYNCHRONISES();
    (void)kind;
    int code = dry_unsafe_in_capture(__func__);
    return (cudaError_t)(code ? code : dry_copy(__func__, to, from, bytes));
}

/* A copy from the device to pageable memory has ended when the call returns, whatever its name says. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    COUNT();
    (void)kind;
    struct range range;
    bool pageable = !dry_range_at(from, &range) || !dry_range_at(to, &range);
    int code = dry_copied_in_capture(__func__, stream, pageable);
    if (code || dry_captures(stream))
        return (cudaError_t)code;
    if (dry_range_at(from, &range) && (range.kind == DEVICE || range.kind == RESERVED) && !dry_range_at(to, &range))
        SYNCHRONISES();
    return dry_copy(__func__, to, from, bytes);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    COUNT();
    (void)kind;
    int code = dry_queued(__func__, stream);
    if (code || dry_captures(stream))
        return (cudaError_t)code;
    for (size_t row = 0; row < height; row++)
        dry_copy(__func__, (char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream) {
    COUNT();
    (void)to_device, (void)from_device;
    int code = dry_queued(__func__, stream);
    return (cudaError_t)(code || dry_captures(stream) ? code : dry_copy(__func__, to, from, bytes));
}

cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    COUNT();
    int code = dry_queued(__func__, NULL);
    return (cudaError_t)(code ? code : dry_fill(__func__, start, value, bytes));
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    COUNT();
    int code = dry_queued(__func__, stream);
    return (cudaError_t)(code || dry_captures(stream) ? code : dry_fill(__func__, start, value, bytes));
}
