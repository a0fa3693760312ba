/* The driver: devices and contexts, virtual memory (what PyTorch's expandable segments are made of), names of its own. */
#include "dry.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULARITY ((size_t)2 << 20)

CUresult cuInit(unsigned int flags) {
    COUNT();
    (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    cudaDriverGetVersion(version);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    COUNT();
    *device = ordinal;
    return ordinal >= 0 && ordinal < dry_visible_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
    COUNT();
    *count = dry_visible_devices();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); /* the numbers are the same */
}

/* Each device has one context, its primary one. */
static char contexts[MAX_DEVICES];

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    COUNT();
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    COUNT();
    *context = (CUcontext)(contexts + device);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    COUNT();
    *context = (CUcontext)(contexts + dry_current_device());
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    COUNT();
    *device = dry_current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    COUNT();
    return context ? (CUresult)cudaSetDevice((int)((char *)context - contexts)) : CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    COUNT();
    *value = limit == CU_LIMIT_PRINTF_FIFO_SIZE ? 1 << 20 : 0;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = cudaGetErrorString((cudaError_t)code); /* the first numbers are the runtime's */
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    COUNT();
    struct range range;
    if (!dry_range_at((void *)pointer, &range))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = pointer;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = range.device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = (CUcontext)(contexts + range.device);
        return CUDA_SUCCESS;
    default:
        dry_misuse("%s: attribute %d is not simulated", __func__, attribute);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* Virtual memory: addresses are reserved; physical memory is created, mapped, unmapped and released. Physical memory is
 * only an amount, by which the device's free memory falls until its release. (A card keeps what is released and still
 * mapped; PyTorch unmaps first.) */

struct physical {
    enum { CREATED = 0xc4ea, RELEASED = 0x4e1ea } state;
    int device;
    size_t bytes;
};

static bool reserved(const char *call, CUdeviceptr pointer, size_t bytes) {
    struct range range;
    if (dry_range_at((void *)pointer, &range) && range.kind == RESERVED &&
        (char *)pointer + bytes <= range.start + range.bytes)
        return true;
    dry_misused_at(call, (void *)pointer, "not inside of a reservation");
    return false;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
                                       CUmemAllocationGranularity_flags option) {
    COUNT();
    (void)wanted, (void)option;
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    COUNT();
    (void)alignment, (void)wanted, (void)flags;
    void *start = dry_reserve(bytes, false);
    if (!start)
        return CUDA_ERROR_OUT_OF_MEMORY;
    dry_range_add(start, bytes, RESERVED, dry_current_device());
    *pointer = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    COUNT();
    struct range range;
    if (!dry_range_at((void *)pointer, &range) || (CUdeviceptr)range.start != pointer || range.kind != RESERVED ||
        range.bytes != bytes) {
        dry_misused_at(__func__, (void *)pointer, "not a reservation of this size");
        return CUDA_ERROR_INVALID_VALUE;
    }
    dry_range_take((void *)pointer, &range);
    munmap((void *)pointer, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *wanted,
                     unsigned long long flags) {
    COUNT();
    (void)flags;
    int device = wanted->location.id;
    if (bytes % GRANULARITY || device < 0 || device >= dry_visible_devices())
        return CUDA_ERROR_INVALID_VALUE;
    if (!dry_take_bytes(device, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct physical *physical = malloc(sizeof *physical);
    if (!physical)
        abort();
    *physical = (struct physical){CREATED, device, bytes};
    *handle = (CUmemGenericAllocationHandle)physical;
    return CUDA_SUCCESS;
}

/* The struct stays, so that a second release is found. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    COUNT();
    struct physical *physical = (struct physical *)handle;
    if (physical->state != CREATED) {
        dry_misused_at(__func__, physical, "released twice");
        return CUDA_ERROR_INVALID_VALUE;
    }
    physical->state = RELEASED;
    dry_give_bytes(physical->device, physical->bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    COUNT();
    (void)flags;
    struct physical *physical = (struct physical *)handle;
    if (physical->state != CREATED || offset + bytes > physical->bytes) {
        dry_misused_at(__func__, physical, "released, or smaller than what is to be mapped");
        return CUDA_ERROR_INVALID_VALUE;
    }
    return reserved(__func__, pointer, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count) {
    COUNT();
    MAY_FAIL();
    (void)access, (void)count;
    if (!reserved(__func__, pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    dry_access((void *)pointer, bytes, true);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    COUNT();
    if (!reserved(__func__, pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    dry_access((void *)pointer, bytes, false);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr pointer, unsigned int value, size_t count, CUstream stream) {
    COUNT();
    int code = dry_queued(__func__, stream);
    if (code || dry_captures(stream))
        return (CUresult)code;
    return (CUresult)dry_fill(__func__, (void *)pointer, (int)value, 4 * count); /* right for bytes that are equal */
}

/* Kernels that come as a module (Triton's, those compiled at run time). */

static char a_module, a_function;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    COUNT();
    MAY_FAIL();
    (void)image;
    int code = dry_unsafe_in_capture(__func__);
    if (code)
        return (CUresult)code;
    *module = (CUmodule)&a_module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *file) { return cuModuleLoadData(module, file); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    COUNT();
    (void)module;
    dry_trace("kernel %s", name);
    *function = (CUfunction)&a_function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    COUNT();
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS              ? 32
             : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                    : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    COUNT();
    (void)function, (void)config;
    *clusters = dry_card()->processors;
    return CUDA_SUCCESS;
}

/* Triton 3.9 asks before it launches; the numbers are the runtime's. */
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return (CUresult)cudaStreamIsCapturing((cudaStream_t)stream, (enum cudaStreamCaptureStatus *)status);
}

/* The runtime hands out the driver's functions by name: those of this library, and for others one that says no. */

static CUresult absent(void) {
    dry_misuse("a function of the driver was called that is not simulated (DRY_TRACE=1 lists their names as they are asked for)");
    return CUDA_ERROR_NOT_SUPPORTED;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    COUNT();
    (void)version, (void)flags;
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) {
        dry_trace("driver function %s is not simulated", name);
        *function = (void *)absent;
    }
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

/* Their launches. */

CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned shared,
                        CUstream stream, void **values, void **extra) {
    COUNT();
    (void)f, (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)shared, (void)values, (void)extra;
    return (CUresult)dry_queued(__func__, stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **values, void **extra) {
    COUNT();
    (void)f, (void)values, (void)extra;
    return (CUresult)dry_queued(__func__, config->hStream);
}
