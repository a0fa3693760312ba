/* The CUDA runtime but for memory and streams: devices, properties, errors, and kernels that are not run. */
#include "dry.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define VERSION 13000

static __thread int current_device;
static __thread int last_error;

int dry_current_device(void) { return current_device; }

int dry_error(int code) {
    if (code)
        last_error = code;
    return code;
}

cudaError_t cudaGetLastError(void) {
    COUNT();
    int code = last_error;
    last_error = 0;
    return code;
}

cudaError_t cudaPeekAtLastError(void) {
    COUNT();
    return last_error;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "invalid capture end: another stream began it"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported (dry_gpu does not simulate it)"},
};

static int row_of(cudaError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == (int)code)
            return (int)i;
    return -1;
}

const char *cudaGetErrorName(cudaError_t code) {
    int row = row_of(code);
    return row < 0 ? "cudaErrorUnknown" : errors[row].name;
}

const char *cudaGetErrorString(cudaError_t code) {
    int row = row_of(code);
    return row < 0 ? "unknown error" : errors[row].text;
}

cudaError_t cudaDriverGetVersion(int *version) {
    COUNT();
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceCount(int *count) {
    COUNT();
    *count = dry_visible_devices();
    return *count ? cudaSuccess : dry_error(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    COUNT();
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    COUNT();
    if (device < 0 || device >= dry_visible_devices())
        return dry_error(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    COUNT();
    if (device < 0 || device >= dry_visible_devices())
        return dry_error(cudaErrorInvalidDevice);
    const struct card *card = dry_card();
    *properties = (struct cudaDeviceProp){
        .major = card->capability / 10,
        .minor = card->capability % 10,
        .totalGlobalMem = dry_total_bytes(),
        .multiProcessorCount = card->processors,
        .maxThreadsPerMultiProcessor = card->threads,
        .maxBlocksPerMultiProcessor = card->blocks,
        .sharedMemPerBlock = 48 << 10,
        .sharedMemPerMultiprocessor = (size_t)card->shared_kib << 10,
        /* From sm_80 on the system keeps 1 KiB of each block; sm_75 has no such share. */
        .sharedMemPerBlockOptin = (size_t)(card->shared_kib - (card->capability >= 80)) << 10,
        .reservedSharedMemPerBlock = card->capability >= 80 ? 1 << 10 : 0,
        .l2CacheSize = card->l2_kib << 10,
        .memoryBusWidth = card->bus_bits,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .memPitch = 2147483647,
        .totalConstMem = 65536,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .unifiedAddressing = 1,
        .managedMemory = 1,
        .concurrentManagedAccess = 1,
        .concurrentKernels = 1,
        .cooperativeLaunch = 1,
        .asyncEngineCount = 2,
        .canMapHostMemory = 1,
        .hostRegisterSupported = 1,
        .streamPrioritiesSupported = 1,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .pciBusID = device + 1,
    };
    snprintf(properties->name, sizeof properties->name, "%s", card->name);
    memcpy(properties->uuid.bytes, "dry_gpu", 7);
    properties->uuid.bytes[15] = (char)device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    COUNT();
    struct cudaDeviceProp properties;
    cudaError_t status = cudaGetDeviceProperties(&properties, device);
    if (status)
        return status;
    const struct {
        enum cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrMaxThreadsPerBlock, properties.maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, properties.maxThreadsDim[0]},
        {cudaDevAttrMaxBlockDimY, properties.maxThreadsDim[1]},
        {cudaDevAttrMaxBlockDimZ, properties.maxThreadsDim[2]},
        {cudaDevAttrMaxGridDimX, properties.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, properties.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, properties.maxGridSize[2]},
        {cudaDevAttrMaxSharedMemoryPerBlock, (int)properties.sharedMemPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)properties.sharedMemPerBlockOptin},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)properties.sharedMemPerMultiprocessor},
        {cudaDevAttrReservedSharedMemoryPerBlock, (int)properties.reservedSharedMemPerBlock},
        {cudaDevAttrTotalConstantMemory, (int)properties.totalConstMem},
        {cudaDevAttrWarpSize, properties.warpSize},
        {cudaDevAttrMaxPitch, (int)properties.memPitch},
        {cudaDevAttrMaxRegistersPerBlock, properties.regsPerBlock},
        {cudaDevAttrMaxRegistersPerMultiprocessor, properties.regsPerMultiprocessor},
        {cudaDevAttrMultiProcessorCount, properties.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, properties.maxThreadsPerMultiProcessor},
        {cudaDevAttrMaxBlocksPerMultiprocessor, properties.maxBlocksPerMultiProcessor},
        {cudaDevAttrL2CacheSize, properties.l2CacheSize},
        {cudaDevAttrGlobalMemoryBusWidth, properties.memoryBusWidth},
        {cudaDevAttrClockRate, 1500000},      /* kHz; the same for all cards, for nothing is timed */
        {cudaDevAttrMemoryClockRate, 6000000}, /* kHz */
        {cudaDevAttrComputeCapabilityMajor, properties.major},
        {cudaDevAttrComputeCapabilityMinor, properties.minor},
        {cudaDevAttrPciBusId, properties.pciBusID},
        {cudaDevAttrConcurrentKernels, 1},
        {cudaDevAttrAsyncEngineCount, properties.asyncEngineCount},
        {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrCanMapHostMemory, 1},
        {cudaDevAttrManagedMemory, 1},
        {cudaDevAttrConcurrentManagedAccess, 1},
        {cudaDevAttrCooperativeLaunch, 1},
        {cudaDevAttrHostRegisterSupported, 1},
        {cudaDevAttrStreamPrioritiesSupported, 1},
        {102, 1}, /* of the driver alone: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    };
    *value = 0; /* the rest: peers, fabrics, pools, textures */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    COUNT();
    snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

/* Devices of this stub have no link to each other: copies between them go through the host. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    COUNT();
    (void)device, (void)peer;
    *can = 0;
    return cudaSuccess;
}

/* Kernels: the compiler's own calls, which no header declares. The library is registered and nothing is loaded. */

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[1];
    (void)binary;
    return handle;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} configured;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configured.grid, *block = configured.block, *shared = configured.shared;
    *(cudaStream_t *)stream = configured.stream;
    return cudaSuccess;
}

/* A launch does nothing; one that a card would refuse is refused. */
static cudaError_t launch(dim3 grid, dim3 block, size_t shared) {
    size_t threads = (size_t)block.x * block.y * block.z;
    size_t most_shared = (size_t)dry_card()->shared_kib << 10;
    bool fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && grid.x <= 2147483647u;
    if (fits && threads && threads <= 1024 && block.z <= 64 && shared <= most_shared)
        return cudaSuccess;
    dry_misuse("launch of %u x %u x %u blocks of %u x %u x %u threads with %zu bytes of shared memory: a card refuses it",
               grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
    return dry_error(cudaErrorInvalidConfiguration);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared, cudaStream_t stream) {
    COUNT();
    (void)function, (void)values;
    int code = dry_queued(__func__, stream);
    return code ? (cudaError_t)code : launch(grid, block, shared);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **values, size_t shared,
                               cudaStream_t stream) {
    return cudaLaunchKernel((const void *)kernel, grid, block, values, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **values, size_t shared,
                                        cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, values, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **values) {
    return cudaLaunchKernel(function, config->gridDim, config->blockDim, values, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    COUNT();
    (void)function;
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .binaryVersion = dry_card()->capability,
        .ptxVersion = dry_card()->capability,
    };
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned int flags) {
    COUNT();
    (void)function, (void)shared, (void)flags;
    int fit = dry_card()->threads / (threads > 0 ? threads : 1);
    *blocks = fit < 1 ? 1 : fit < dry_card()->blocks ? fit : dry_card()->blocks;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

/* A variable of a kernel's file: writable memory that nobody reads. */
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    COUNT();
    static char memory[1 << 20];
    (void)symbol;
    *address = memory;
    return cudaSuccess;
}
