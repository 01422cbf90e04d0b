// The copies of a chunk between host memory and the device, in as few operations as the runtime has.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "../c_api.h"

#ifndef BNB_FSDP_LEAST_IN_BATCH
#define BNB_FSDP_LEAST_IN_BATCH (24 << 10)
#endif

namespace bnb_fsdp {

// Bytes of the smallest copy to the device that is put in a batch. With smaller ones the call may keep the host
// as long as the copies before it take, which no document says: seen with CUDA 13.0 on an H200, always with
// pieces of 7.5 KiB, now and then with up to 23 KiB, never with more (docs/paged.md).
// cudaMemcpySrcAccessOrderAny does not wait, and would race with the step before.
constexpr int64_t kLeastInBatch = BNB_FSDP_LEAST_IN_BATCH;

class Copies {
 public:
  // Queues the copies of a chunk on `stream`, all in one direction. On an H200 each copy behind another leaves
  // the engine idle for 5 us; in a batch, whose copies may run in any order, it is 1.
  cudaError_t queue(const bnb_fsdp_cuda_copy* copies, int64_t count, cudaMemcpyKind kind, cudaStream_t stream) {
    const bool in = kind == cudaMemcpyHostToDevice;
#if CUDART_VERSION >= 13000
    if (batches_ && (count > 1 || (count == 1 && copies[0].rows > 1)) && (!in || are_large(copies, count))) {
      const cudaError_t error = batch(copies, count, in, stream);
      if (error != cudaErrorNotSupported) return error;
      cudaGetLastError();
      batches_ = false;
    }
#endif
    for (int64_t i = 0; i < count; ++i) {
      const bnb_fsdp_cuda_copy& c = copies[i];
      void* to = in ? c.device : c.host;
      const void* from = in ? c.host : c.device;
      const auto bytes = static_cast<size_t>(c.bytes);
      const cudaError_t error =
          c.rows == 1 ? cudaMemcpyAsync(to, from, bytes, kind, stream)
                      : cudaMemcpy2DAsync(to, static_cast<size_t>(in ? c.device_pitch : c.host_pitch), from,
                                          static_cast<size_t>(in ? c.host_pitch : c.device_pitch), bytes,
                                          static_cast<size_t>(c.rows), kind, stream);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
#if CUDART_VERSION >= 13000
  static bool are_large(const bnb_fsdp_cuda_copy* copies, int64_t count) {
    return std::all_of(copies, copies + count,
                       [](const bnb_fsdp_cuda_copy& c) { return c.bytes >= kLeastInBatch; });
  }

  cudaError_t batch(const bnb_fsdp_cuda_copy* copies, int64_t count, bool in, cudaStream_t stream) {
    to_.clear();
    from_.clear();
    sizes_.clear();
    for (int64_t i = 0; i < count; ++i) {
      const bnb_fsdp_cuda_copy& c = copies[i];
      for (int64_t row = 0; row < c.rows; ++row) {
        char* host = static_cast<char*>(c.host) + row * c.host_pitch;
        char* device = static_cast<char*>(c.device) + row * c.device_pitch;
        to_.push_back(in ? device : host);
        from_.push_back(in ? host : device);
        sizes_.push_back(static_cast<size_t>(c.bytes));
      }
    }
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1,
                                stream);
  }

  bool batches_ = true;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
#endif
};

}  // namespace bnb_fsdp
