/* Entry points that say "not supported" and are counted as misuse: a program that meets one of them leaves what this stub
 * simulates, and should not take a success for granted.
 */
#include "dry.h"

enum { CUDA_NOT_SUPPORTED = 801, CUBLAS_NOT_SUPPORTED = 15 };

#define REFUSE(name, code)                          \
    int name(void) {                                \
        COUNT();                                    \
        dry_misuse("%s is not simulated", __func__); \
        return code;                                \
    }

/* Graphs that are not captured, memory of other processes, the runtime's own pools, peers, modules that are linked at run time. */
#define X(name) REFUSE(name, CUDA_NOT_SUPPORTED)
#define RUNTIME \
    X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2) X(cuTensorMapEncodeIm2col) \
    X(cuTensorMapEncodeTiled) \
    X(cudaDeviceEnablePeerAccess) X(cudaDeviceGetDefaultMemPool) X(cudaFreeAsync) X(cudaGraphAddNode) \
    X(cudaGraphConditionalHandleCreate) X(cudaGraphDebugDotPrint) \
    X(cudaGraphNodeGetDependencies) \
    X(cudaIpcCloseMemHandle) X(cudaIpcGetEventHandle) X(cudaIpcGetMemHandle) X(cudaIpcOpenEventHandle) \
    X(cudaIpcOpenMemHandle) X(cudaLibraryGetKernel) X(cudaLibraryLoadData) X(cudaLibraryUnload) X(cudaMallocAsync) \
    X(cudaMemPoolGetAttribute) X(cudaMemPoolSetAccess) X(cudaMemPoolSetAttribute) X(cudaMemPoolTrimTo) \
    X(cudaStreamBeginCaptureToGraph) \
    X(cudaStreamUpdateCaptureDependencies)
RUNTIME

/* What torch 2.14 or 2.15 imports and 2.13 does not. */
#define NEWER_RUNTIME \
    X(cudaDeviceGetGraphMemAttribute) X(cudaDeviceSetGraphMemAttribute) \
    X(cudaGraphRetainUserObject) X(cudaLibraryGetGlobal) X(cudaLibraryGetKernelCount) X(cudaLibraryGetManaged) \
    X(cudaLibraryGetUnifiedFunction) X(cudaLibraryLoadFromFile) X(cudaUserObjectCreate) X(cudaUserObjectRelease)
NEWER_RUNTIME
#undef X

/* Factorisations of cuBLAS, and what PyTorch's library of linear algebra takes of it. */
#define X(name) REFUSE(name, CUBLAS_NOT_SUPPORTED)
#define LINEAR_ALGEBRA \
    X(cublasCaxpy_v2) X(cublasCcopy_v2) X(cublasCgelsBatched) X(cublasCgemmBatched) X(cublasCgeqrfBatched) \
    X(cublasCgerc_v2) X(cublasCgeru_v2) X(cublasCgetrfBatched) X(cublasCgetrsBatched) X(cublasChemm_v2) \
    X(cublasChemv_v2) X(cublasCher2_v2) X(cublasCher2k_v2) X(cublasCher_v2) X(cublasCherk_v2) X(cublasCrot_v2) \
    X(cublasCrotg_v2) X(cublasCscal_v2) X(cublasCsrot_v2) X(cublasCsscal_v2) X(cublasCswap_v2) X(cublasCsymm_v2) \
    X(cublasCsymv_v2) X(cublasCsyr2_v2) X(cublasCsyr2k_v2) X(cublasCsyr_v2) X(cublasCsyrk_v2) X(cublasCtrmm_v2) \
    X(cublasCtrmv_v2) X(cublasCtrsv_v2) X(cublasDasum_v2) X(cublasDaxpy_v2) X(cublasDcopy_v2) X(cublasDgelsBatched) \
    X(cublasDgemmBatched) X(cublasDgeqrfBatched) X(cublasDger_v2) X(cublasDgetrfBatched) X(cublasDgetrsBatched) \
    X(cublasDnrm2_v2) X(cublasDrot_v2) X(cublasDrotg_v2) X(cublasDrotm_v2) X(cublasDrotmg_v2) X(cublasDscal_v2) \
    X(cublasDswap_v2) X(cublasDsymm_v2) X(cublasDsymv_v2) X(cublasDsyr2_v2) X(cublasDsyr2k_v2) X(cublasDsyr_v2) \
    X(cublasDsyrk_v2) X(cublasDtrmm_v2) X(cublasDtrmv_v2) X(cublasDtrsv_v2) X(cublasDzasum_v2) X(cublasDznrm2_v2) \
    X(cublasGetMatrixAsync) X(cublasGetVectorAsync) X(cublasIcamax_v2) X(cublasIcamin_v2) X(cublasIdamax_v2) \
    X(cublasIdamin_v2) X(cublasIsamax_v2) X(cublasIsamin_v2) X(cublasIzamax_v2) X(cublasIzamin_v2) X(cublasSasum_v2) \
    X(cublasSaxpy_v2) X(cublasScasum_v2) X(cublasScnrm2_v2) X(cublasScopy_v2) X(cublasSetMatrixAsync) \
    X(cublasSetVectorAsync) X(cublasSgelsBatched) X(cublasSgemmBatched) X(cublasSgeqrfBatched) X(cublasSger_v2) \
    X(cublasSnrm2_v2) X(cublasSrot_v2) X(cublasSrotg_v2) \
    X(cublasSrotm_v2) X(cublasSrotmg_v2) X(cublasSscal_v2) X(cublasSswap_v2) X(cublasSsymm_v2) X(cublasSsymv_v2) \
    X(cublasSsyr2_v2) X(cublasSsyr2k_v2) X(cublasSsyr_v2) X(cublasSsyrk_v2) X(cublasStrmm_v2) X(cublasStrmv_v2) \
    X(cublasStrsv_v2) X(cublasZaxpy_v2) X(cublasZcopy_v2) X(cublasZdrot_v2) X(cublasZdscal_v2) X(cublasZgelsBatched) \
    X(cublasZgemmBatched) X(cublasZgeqrfBatched) X(cublasZgerc_v2) X(cublasZgeru_v2) X(cublasZgetrfBatched) \
    X(cublasZgetrsBatched) X(cublasZhemm_v2) X(cublasZhemv_v2) X(cublasZher2_v2) X(cublasZher2k_v2) X(cublasZher_v2) \
    X(cublasZherk_v2) X(cublasZrot_v2) X(cublasZrotg_v2) X(cublasZscal_v2) X(cublasZswap_v2) X(cublasZsymm_v2) \
    X(cublasZsymv_v2) X(cublasZsyr2_v2) X(cublasZsyr2k_v2) X(cublasZsyr_v2) X(cublasZsyrk_v2) X(cublasZtrmm_v2) \
    X(cublasZtrmv_v2) X(cublasZtrsv_v2)
LINEAR_ALGEBRA

/* Products by an algorithm that the program chooses itself, which torch imports from 2.14 on. */
#define ALGORITHMS \
    X(cublasLtMatmulAlgoCheck) X(cublasLtMatmulAlgoConfigGetAttribute) X(cublasLtMatmulAlgoConfigSetAttribute) \
    X(cublasLtMatmulAlgoInit)
ALGORITHMS
