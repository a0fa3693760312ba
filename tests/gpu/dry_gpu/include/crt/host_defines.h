/* The CUDA wheel has the runtime's headers, and not the compiler's, of which they need these words. */
#pragma once
#define CUDARTAPI
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __host__
#define __inline__ inline
#define __location__(where)
#define __specialization_static static
