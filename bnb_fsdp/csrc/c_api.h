// The plain C interface of the native libraries. No torch types: tensors are pointers, sizes and dtype tags.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define BNB_FSDP_API __attribute__((visibility("default")))
#else
#define BNB_FSDP_API
#endif

// Raised whenever a struct or a signature below changes.
#define BNB_FSDP_ABI_VERSION 2
#define BNB_FSDP_MAX_STATES 3

#ifdef __cplusplus
extern "C" {
#endif

enum bnb_fsdp_dtype { BNB_FSDP_FLOAT32 = 0, BNB_FSDP_BFLOAT16 = 1, BNB_FSDP_FLOAT16 = 2 };

// Hyperparameters of one parameter group.
typedef struct {
  float lr, beta1, beta2, beta3, alpha, eps, weight_decay, reserved;
} bnb_fsdp_hyper;

// One dense local tensor. states: uint8 codes (8-bit) or float32; absmax: ceil(numel / 256) floats, 8-bit only.
// step: float32 count of steps taken so far, advanced by the call.
typedef struct {
  void* parameter;
  void* state[BNB_FSDP_MAX_STATES];
  float* absmax[BNB_FSDP_MAX_STATES];
  float* step;
  int64_t numel;
  int64_t group;
} bnb_fsdp_tensor;

// Every function returns 0 or, after a failure that changed nothing, another value; the reason is then here.
BNB_FSDP_API const char* bnb_fsdp_last_error(void);
BNB_FSDP_API int bnb_fsdp_abi_version(void);
// Compiler, flags and instruction sets, for people.
BNB_FSDP_API const char* bnb_fsdp_build_info(void);
// The 256 values of the signed (1) or unsigned (0) dynamic map.
BNB_FSDP_API int bnb_fsdp_codebook(int is_signed, float* values);

// Instruction set in use; the names of those this processor can run, comma-separated, best first.
BNB_FSDP_API const char* bnb_fsdp_cpu_isa(void);
BNB_FSDP_API const char* bnb_fsdp_cpu_isas(void);
BNB_FSDP_API int bnb_fsdp_cpu_set_isa(const char* name);

// Steps every tensor whose gradient is not NULL, on up to `threads` threads. All share rule ("adam", "lion"),
// bits (8 or 32) and dtypes; use_openmp allows the OpenMP team that torch has in the process, if it is there.
// tensor.group indexes `hypers`. An empty tensor's gradient may be any non-NULL
// pointer.
BNB_FSDP_API int bnb_fsdp_cpu_step(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                   const bnb_fsdp_tensor* tensors, const void* const* gradients, int64_t count,
                                   const bnb_fsdp_hyper* hypers, int64_t groups, int threads, int use_openmp);

#ifdef __cplusplus
}
#endif
