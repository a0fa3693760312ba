/* NVML: how many devices there are, what PyTorch asks when memory runs out, and "not supported". */
#include "dry.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

static char handles[MAX_DEVICES];

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == SUCCESS ? "no error" : "not simulated by dry_gpu"; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

/* NVML does not know CUDA_VISIBLE_DEVICES. PyTorch applies it to this count. */
int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = (unsigned int)dry_devices();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = handles + index;
    return (int)index < dry_devices() ? SUCCESS : INVALID_ARGUMENT;
}

/* "0000:01:00.0" is device 0: see cudaDeviceGetPCIBusId. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
    unsigned int bus = 0;
    if (sscanf(text, "%*x:%x", &bus) != 1 || bus < 1)
        return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned int length) {
    snprintf(text, length, "GPU-dry-gpu-%d", (int)((char *)device - handles));
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    memory->total = dry_total_bytes();
    memory->free = dry_free_bytes((int)((char *)device - handles));
    memory->used = memory->total - memory->free;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned int *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

/* Leaves what the caller put there, which is "no fabric". */
int nvmlDeviceGetGpuFabricInfoV(void) { return SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
