// The plain C interface of the native libraries. No torch types: tensors are pointers, sizes and dtype tags.
#pragma once
#include <stdint.h>

#if defined(__GNUC__)
#define BNB_FSDP_API __attribute__((visibility("default")))
#else
#define BNB_FSDP_API
#endif

// Raised whenever a struct or a signature below changes.
#define BNB_FSDP_ABI_VERSION 6
#define BNB_FSDP_MAX_STATES 3

#ifdef __cplusplus
extern "C" {
#endif

enum bnb_fsdp_dtype { BNB_FSDP_FLOAT32 = 0, BNB_FSDP_BFLOAT16 = 1, BNB_FSDP_FLOAT16 = 2 };

// SKIP_ZEROS: an element whose gradient is 0 keeps parameter and states, in the rules that honour it.
// PUBLISHED: the papers' formulas of LAMB ("adam") and LARS ("momentum"), in which `scales` is a factor of the
// learning rate.
enum bnb_fsdp_flags { BNB_FSDP_SKIP_ZEROS = 1, BNB_FSDP_PUBLISHED = 2 };

// Hyperparameters of one parameter group.
typedef struct {
  float lr, beta1, beta2, beta3, alpha, eps, weight_decay;
  int32_t flags;
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

// Steps every tensor whose gradient is not NULL, on up to `threads` threads. All share rule ("adam", "lion",
// "momentum", "rmsprop", "adagrad", "ademamix"), bits (8 or 32) and dtypes; use_openmp allows the OpenMP team
// that torch has in the process, if it is there. tensor.group indexes `hypers`; `scales` has one factor of the
// update for each tensor ("adam" and "momentum", for LAMB and LARS), NULL for 1. An empty tensor's gradient may
// be any non-NULL pointer.
BNB_FSDP_API int bnb_fsdp_cpu_step(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                   const bnb_fsdp_tensor* tensors, const void* const* gradients, int64_t count,
                                   const bnb_fsdp_hyper* hypers, int64_t groups, const float* scales,
                                   int threads, int use_openmp);
// Writes to sums[2 * i], sums[2 * i + 1] the sum of squares of tensor i's coming update and of its parameter, 0
// without a gradient; nothing is stepped. PUBLISHED: of LAMB's update with its weight decay, of LARS' gradient.
// The sums do not depend on the number of threads. Rules "adam" and "momentum".
BNB_FSDP_API int bnb_fsdp_cpu_norms(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                    const bnb_fsdp_tensor* tensors, const void* const* gradients, int64_t count,
                                    const bnb_fsdp_hyper* hypers, int64_t groups, float* sums, int threads,
                                    int use_openmp);

// ---- libbnb_fsdp_cuda. It exports the four general functions above as well. ----
//
// Launches go to `stream` (a cudaStream_t of `device`) and to no other; nothing waits for the device, and no
// device memory is allocated. The current device is the caller's again afterwards.

// 0 if there are kernels for the device's architecture.
BNB_FSDP_API int bnb_fsdp_cuda_check(int device);
// "auto": the best kernels each device can run; "portable": those that every device can. For kernels found
// later.
BNB_FSDP_API int bnb_fsdp_cuda_set_kernels(const char* name);

// Device memory with what bnb_fsdp_cuda_maps() writes is what 8-bit launches read: all of a device share it.
BNB_FSDP_API int64_t bnb_fsdp_cuda_maps_bytes(void);
BNB_FSDP_API int bnb_fsdp_cuda_maps(void* memory);

// A bucket: tensors that share rule, bits and dtypes, stepped by one launch. tensors[].step are counters on the
// host, or, with steps_on_device, on the device, where the step then advances them. maps: NULL for 32 bits.
typedef struct bnb_fsdp_cuda_bucket bnb_fsdp_cuda_bucket;
BNB_FSDP_API int bnb_fsdp_cuda_bucket_create(const char* rule, int bits, int parameter_dtype,
                                             int gradient_dtype, const bnb_fsdp_tensor* tensors, int64_t count,
                                             int64_t groups, int steps_on_device, const void* maps, int device,
                                             bnb_fsdp_cuda_bucket** bucket);
BNB_FSDP_API void bnb_fsdp_cuda_bucket_destroy(bnb_fsdp_cuda_bucket* bucket);
// What the caller copies to device memory (aligned to 128 bytes) before the first step, and its size.
BNB_FSDP_API const void* bnb_fsdp_cuda_bucket_image(const bnb_fsdp_cuda_bucket* bucket, int64_t* bytes);
BNB_FSDP_API int64_t bnb_fsdp_cuda_bucket_tiles(const bnb_fsdp_cuda_bucket* bucket);
// Steps every tensor whose gradient is not NULL. `memory` is the image on the device. rates[group], where it is
// not NULL, is a learning rate in device memory that replaces the one in `hypers`; `scales` has one float a
// tensor in device memory (LAMB, LARS); both may be NULL.
BNB_FSDP_API int bnb_fsdp_cuda_bucket_step(bnb_fsdp_cuda_bucket* bucket, void* memory,
                                           const void* const* gradients, const bnb_fsdp_hyper* hypers,
                                           const float* const* rates, const float* scales, void* stream);
// Writes to sums[2 * i], sums[2 * i + 1] the sum of squares of tensor i's coming update and of its parameter.
// workspace: two floats a tile. Rules "adam" and "momentum".
BNB_FSDP_API int bnb_fsdp_cuda_bucket_norms(bnb_fsdp_cuda_bucket* bucket, void* memory,
                                            const void* const* gradients, const bnb_fsdp_hyper* hypers,
                                            float* workspace, float* sums, void* stream);

// One tensor without a bucket. tensor->step must not be NULL but is not advanced: `step` counts the steps, this
// one included. tickets: two zeros in device memory that no other launch uses at the time, needed by tensors of
// more tiles than the device has multiprocessors; scale: one float on the device, or NULL.
BNB_FSDP_API int64_t bnb_fsdp_cuda_tiles(int64_t numel);
BNB_FSDP_API int bnb_fsdp_cuda_step(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                    const bnb_fsdp_tensor* tensor, const void* gradient,
                                    const bnb_fsdp_hyper* hyper, float step, const float* scale,
                                    const void* maps, void* tickets, int device, void* stream);
BNB_FSDP_API int bnb_fsdp_cuda_norms(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                     const bnb_fsdp_tensor* tensor, const void* gradient,
                                     const bnb_fsdp_hyper* hyper, float step, const void* maps,
                                     float* workspace, float* sums, int device, void* stream);

// Host memory: makes a range page-locked for the device's copies, and ordinary again.
BNB_FSDP_API int bnb_fsdp_cuda_register(int device, void* memory, int64_t bytes);
BNB_FSDP_API int bnb_fsdp_cuda_unregister(int device, void* memory);

// A pipeline: two streams of its own, on which state in host memory is copied to `buffers` staging buffers and
// back while the update of another buffer runs on the caller's stream.
typedef struct bnb_fsdp_cuda_pipeline bnb_fsdp_cuda_pipeline;

// `rows` of `bytes` each, which lie a pitch apart; pitches are not looked at if there is one row.
typedef struct {
  void* host;
  void* device;
  int64_t bytes;
  int64_t rows, host_pitch, device_pitch;
} bnb_fsdp_cuda_copy;

// A bucket whose states lie in one staging buffer, and the copies that bring them there and back.
typedef struct {
  bnb_fsdp_cuda_bucket* bucket;
  void* memory;
  int64_t buffer;
  int64_t first_copy, copies;
  int64_t first_gradient, gradients;
} bnb_fsdp_cuda_chunk;

BNB_FSDP_API int bnb_fsdp_cuda_pipeline_create(int device, int64_t buffers, bnb_fsdp_cuda_pipeline** pipeline);
// Waits for all copies first.
BNB_FSDP_API void bnb_fsdp_cuda_pipeline_destroy(bnb_fsdp_cuda_pipeline* pipeline);
// The pipeline's copies, from now on, come after what is queued on `stream`.
BNB_FSDP_API int bnb_fsdp_cuda_pipeline_follow(bnb_fsdp_cuda_pipeline* pipeline, void* stream);
// Copies the state of the first `count` of these chunks in, no more than there are buffers, ahead of the step
// with the same `ticket`, a number above 0 that each table of chunks has for itself. It is for nothing if
// another step comes first, or a wait.
BNB_FSDP_API int bnb_fsdp_cuda_pipeline_begin(bnb_fsdp_cuda_pipeline* pipeline,
                                              const bnb_fsdp_cuda_chunk* chunks, int64_t count,
                                              const bnb_fsdp_cuda_copy* copies, int64_t ticket);
// Steps the chunks in order, those without any gradient apart: state in, update on `stream`, state out.
// `stream` waits for state that comes in, never for state that goes out. After a failure some chunks may have
// been stepped.
BNB_FSDP_API int bnb_fsdp_cuda_pipeline_step(bnb_fsdp_cuda_pipeline* pipeline,
                                             const bnb_fsdp_cuda_chunk* chunks, int64_t count,
                                             const bnb_fsdp_cuda_copy* copies, const void* const* gradients,
                                             const bnb_fsdp_hyper* hypers, const float* const* rates,
                                             int64_t ticket, void* stream);
// Blocks the calling thread until host memory holds the states of every step so far, and nothing is copied any
// more.
BNB_FSDP_API int bnb_fsdp_cuda_pipeline_wait(bnb_fsdp_cuda_pipeline* pipeline);
// Measures copies between page-locked `host` and `device` memory of `bytes`: bytes a second to the device alone
// and of both directions together, seconds that a chunk of no size would take, and that one more copy each way
// would add. Blocks for some milliseconds.
BNB_FSDP_API int bnb_fsdp_cuda_pipeline_measure(bnb_fsdp_cuda_pipeline* pipeline, void* host, void* device,
                                                int64_t bytes, double* results);

#ifdef __cplusplus
}
#endif
