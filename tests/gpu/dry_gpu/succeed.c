/* Entry points that do nothing and succeed: they would have the device compute, or prepare it for that.
 *
 * Each counts its calls. The prototypes do not matter: the values are not looked at.
 */
#include "dry.h"

#define X(name)            \
    int name(void) {       \
        COUNT();           \
        return 0;          \
    }

/* Registering, preparing and launching kernels. */
#define KERNELS \
    X(__cudaInitModule) X(__cudaRegisterFatBinaryEnd) X(__cudaRegisterFunction) X(__cudaRegisterVar) \
    X(__cudaUnregisterFatBinary) X(cuCtxSetLimit) X(cuFuncSetAttribute) X(cuFuncSetCacheConfig) \
    X(cuLaunchCooperativeKernel) X(cuLogsRegisterCallback) \
    X(cuLogsUnregisterCallback) X(cuModuleUnload) X(cudaFuncSetAttribute) \
    X(cudaKernelSetAttributeForDevice) X(cudaMemcpyToSymbol) X(cudaProfilerStart) X(cudaProfilerStop)

/* Products and their descriptors; systems of equations, which OFT solves. */
#define PRODUCTS \
    X(cublasCdotc_v2) X(cublasCdotu_v2) X(cublasCgemmStridedBatched) X(cublasCgemm_v2) X(cublasCgemv_v2) \
    X(cublasCtrsmBatched) X(cublasCtrsm_v2) X(cublasDdot_v2) X(cublasDgemmStridedBatched) X(cublasDgemm_v2) \
    X(cublasDgemv_v2) X(cublasDotEx) X(cublasDtrsmBatched) X(cublasDtrsm_v2) \
    X(cublasLtMatmulDescSetAttribute) \
    X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatrixLayoutSetAttribute) X(cublasSdot_v2) \
    X(cublasSetSmCountTarget) X(cublasSgemmEx) X(cublasSgemv_v2) X(cublasSgetrfBatched) X(cublasSgetrsBatched) \
    X(cublasStrsmBatched) X(cublasStrsm_v2) X(cublasZdotc_v2) X(cublasZdotu_v2) X(cublasZgemmStridedBatched) \
    X(cublasZgemm_v2) X(cublasZgemv_v2) X(cublasZtrsmBatched) X(cublasZtrsm_v2)

KERNELS
PRODUCTS
