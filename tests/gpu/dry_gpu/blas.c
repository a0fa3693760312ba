/* cuBLAS and cuBLASLt: handles and descriptors are there, products are not computed (those that training does not need stand in succeed.c).
 *
 * The headers of cuBLAS need C++ headers that the wheel lacks: the few types stand here.
 */
#include "dry.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13 };

struct handle {
    enum { ALIVE = 0xb1a5, GONE = 0x60e1 } state;
    void *stream;
    int math_mode, pointer_mode;
};

static int usable(const char *call, struct handle *handle) {
    if (handle && handle->state == ALIVE)
        return SUCCESS;
    dry_misused_at(call, handle, "no handle of cuBLAS");
    return NOT_INITIALIZED;
}

int cublasCreate_v2(struct handle **handle) {
    COUNT();
    *handle = calloc(1, sizeof **handle);
    if (!*handle)
        return ALLOC_FAILED;
    (*handle)->state = ALIVE;
    return SUCCESS;
}

int cublasDestroy_v2(struct handle *handle) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        handle->state = GONE;
    return status;
}

int cublasSetStream_v2(struct handle *handle, void *stream) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        handle->stream = stream;
    return status;
}

/* The workspace comes from PyTorch, which sizes it by the compute capability. */
int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t bytes) {
    COUNT();
    (void)workspace;
    dry_trace("cuBLAS gets a workspace of %zu bytes", bytes);
    return usable(__func__, handle);
}

int cublasSetMathMode(struct handle *handle, int mode) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        handle->math_mode = mode;
    return status;
}

int cublasGetMathMode(struct handle *handle, int *mode) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        *mode = handle->math_mode;
    return status;
}

int cublasSetPointerMode_v2(struct handle *handle, int mode) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        handle->pointer_mode = mode;
    return status;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    COUNT();
    int status = usable(__func__, handle);
    if (status == SUCCESS)
        *mode = handle->pointer_mode;
    return status;
}

size_t cublasLtGetVersion(void) {
    COUNT();
    return 130000;
}

/* A descriptor is memory of its own, without contents: nobody reads it. */
static int describe(void **descriptor) {
    *descriptor = malloc(1);
    return *descriptor ? SUCCESS : ALLOC_FAILED;
}

static int forget(void *descriptor) {
    free(descriptor);
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void **descriptor) { return describe(descriptor); }
int cublasLtMatrixLayoutCreate(void **descriptor) { return describe(descriptor); }
int cublasLtMatmulPreferenceCreate(void **descriptor) { return describe(descriptor); }
int cublasLtMatmulDescDestroy(void *descriptor) { return forget(descriptor); }
int cublasLtMatrixLayoutDestroy(void *descriptor) { return forget(descriptor); }
int cublasLtMatmulPreferenceDestroy(void *descriptor) { return forget(descriptor); }

/* cublasLtMatmulHeuristicResult_t of cublasLt.h. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

/* Offers one algorithm that needs no workspace; PyTorch has allocated the workspace it allows by then. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct heuristic *found, int *count) {
    COUNT();
    (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
    if (wanted < 1)
        return INVALID_VALUE;
    memset(found, 0, sizeof *found);
    *count = 1;
    return SUCCESS;
}

/* Products, which go to their handle's stream. */
#define PRODUCT(name)                                                                 \
    int name(struct handle *handle) {                                                 \
        COUNT();                                                                      \
        return dry_queued(__func__, handle->stream) ? EXECUTION_FAILED : SUCCESS; \
    }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)

int cublasLtMatmul(void *handle, void *desc, void *alpha, void *a, void *la, void *b, void *lb, void *beta, void *c, void *lc,
                   void *d, void *ld, void *algo, void *workspace, size_t bytes, void *stream) {
    COUNT();
    (void)handle, (void)desc, (void)alpha, (void)a, (void)la, (void)b, (void)lb, (void)beta, (void)c, (void)lc, (void)d;
    (void)ld, (void)algo, (void)workspace, (void)bytes;
    return dry_queued(__func__, stream) ? EXECUTION_FAILED : SUCCESS;
}
