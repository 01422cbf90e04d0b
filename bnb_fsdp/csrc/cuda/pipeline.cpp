// State in host memory: copied in, updated, copied out, a chunk at a time and three chunks at once.
#include <cuda_runtime.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../c_api.h"
#include "error.h"

using namespace bnb_fsdp;

// Of each staging buffer three events, recorded anew by every chunk that uses it: its states have come in, are
// updated, have gone out. Waiting for an event that was never recorded is waiting for nothing.
struct bnb_fsdp_cuda_pipeline {
  struct Buffer {
    cudaEvent_t in = nullptr, updated = nullptr, out = nullptr;
  };
  int device = 0;
  cudaStream_t to_device = nullptr, to_host = nullptr;
  cudaEvent_t followed = nullptr;
  std::vector<Buffer> buffers;

  ~bnb_fsdp_cuda_pipeline() {
    const DeviceScope scope(device);
    for (cudaStream_t stream : {to_device, to_host}) {
      if (stream == nullptr) continue;
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
    for (const Buffer& buffer : buffers)
      for (cudaEvent_t event : {buffer.in, buffer.updated, buffer.out})
        if (event != nullptr) cudaEventDestroy(event);
    if (followed != nullptr) cudaEventDestroy(followed);
    cudaGetLastError();  // at the end of a process there may be no context any more
  }
};

namespace bnb_fsdp {
namespace {

// The first error of a row of calls; those after it are not made.
class Calls {
 public:
  template <class Function, class... Arguments>
  Calls& operator()(Function function, Arguments... arguments) {
    if (error_ == cudaSuccess) error_ = function(arguments...);
    return *this;
  }
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_ = cudaSuccess;
};

cudaError_t wait(cudaStream_t stream, cudaEvent_t event) { return cudaStreamWaitEvent(stream, event, 0); }

cudaError_t copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream);
}

cudaError_t new_event(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }

int step_chunk(bnb_fsdp_cuda_pipeline& p, const bnb_fsdp_cuda_chunk& chunk, const bnb_fsdp_cuda_copy* copies,
               const void* const* gradients, const bnb_fsdp_hyper* hypers, const float* const* rates,
               cudaStream_t stream) {
  const auto& buffer = p.buffers[static_cast<size_t>(chunk.buffer)];
  Calls call;
  call(wait, p.to_device, buffer.out);
  for (int64_t i = 0; i < chunk.copies; ++i)
    call(copy, copies[i].device, copies[i].host, copies[i].bytes, cudaMemcpyHostToDevice, p.to_device);
  call(cudaEventRecord, buffer.in, p.to_device)(wait, stream, buffer.in);
  if (call.error() != cudaSuccess) return fail("state from host memory", call.error());
  if (bnb_fsdp_cuda_bucket_step(chunk.bucket, chunk.memory, gradients, hypers, rates, nullptr, stream) != 0)
    return 1;
  call(cudaEventRecord, buffer.updated, stream)(wait, p.to_host, buffer.updated);
  for (int64_t i = 0; i < chunk.copies; ++i)
    call(copy, copies[i].host, copies[i].device, copies[i].bytes, cudaMemcpyDeviceToHost, p.to_host);
  call(cudaEventRecord, buffer.out, p.to_host);
  return call.error() == cudaSuccess ? 0 : fail("state to host memory", call.error());
}

// Seconds between two events, both waited for.
double seconds(cudaEvent_t from, cudaEvent_t to, Calls& call) {
  float milliseconds = 0;
  call(cudaEventSynchronize, to)(cudaEventElapsedTime, &milliseconds, from, to);
  return milliseconds * 1e-3;
}

// Chunks of `bytes` that follow each other through the pipeline, without an update. `both`: out again as well.
double measured(bnb_fsdp_cuda_pipeline& p, char* host, char* device, int64_t bytes, int chunks, bool both,
                cudaEvent_t start, cudaEvent_t end, Calls& call) {
  call(cudaEventRecord, start, p.to_device)(wait, p.to_host, start);
  for (int i = 0; i < chunks; ++i) {
    const auto& buffer = p.buffers[static_cast<size_t>(i) % p.buffers.size()];
    const int64_t at = i * bytes;
    if (both) call(wait, p.to_device, buffer.out);
    call(copy, device + at, host + at, bytes, cudaMemcpyHostToDevice, p.to_device);
    call(cudaEventRecord, buffer.in, p.to_device);
    if (!both) continue;
    call(wait, p.to_host, buffer.in)(copy, host + at, device + at, bytes, cudaMemcpyDeviceToHost, p.to_host);
    call(cudaEventRecord, buffer.out, p.to_host);
  }
  call(wait, p.to_device, p.buffers[0].out);
  call(cudaEventRecord, p.followed, p.to_host)(wait, p.to_device, p.followed)(cudaEventRecord, end,
                                                                              p.to_device);
  return seconds(start, end, call);
}

}  // namespace
}  // namespace bnb_fsdp

extern "C" {

int bnb_fsdp_cuda_register(int device, void* memory, int64_t bytes) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
  const cudaError_t error = cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  return error == cudaSuccess ? 0
                              : fail("page-locking " + std::to_string(bytes) + " bytes of host memory", error);
}

int bnb_fsdp_cuda_unregister(int device, void* memory) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
  const cudaError_t error = cudaHostUnregister(memory);
  return error == cudaSuccess ? 0 : fail("making host memory ordinary again", error);
}

int bnb_fsdp_cuda_pipeline_create(int device, int64_t buffers, bnb_fsdp_cuda_pipeline** pipeline) {
  try {
    if (buffers < 1) return fail("a pipeline needs a buffer");
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
    auto p = std::make_unique<bnb_fsdp_cuda_pipeline>();
    p->device = device;
    p->buffers.resize(static_cast<size_t>(buffers));
    Calls call;
    for (cudaStream_t* stream : {&p->to_device, &p->to_host})
      call(cudaStreamCreateWithFlags, stream, cudaStreamNonBlocking);
    for (auto& buffer : p->buffers)
      for (cudaEvent_t* event : {&buffer.in, &buffer.updated, &buffer.out}) call(new_event, event);
    call(new_event, &p->followed);
    if (call.error() != cudaSuccess) return fail("streams of a pipeline", call.error());
    *pipeline = p.release();
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

void bnb_fsdp_cuda_pipeline_destroy(bnb_fsdp_cuda_pipeline* pipeline) { delete pipeline; }

int bnb_fsdp_cuda_pipeline_follow(bnb_fsdp_cuda_pipeline* pipeline, void* stream) {
  const DeviceScope scope(pipeline->device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
  Calls call;
  call(cudaEventRecord, pipeline->followed, static_cast<cudaStream_t>(stream));
  call(wait, pipeline->to_device, pipeline->followed)(wait, pipeline->to_host, pipeline->followed);
  return call.error() == cudaSuccess ? 0 : fail("the order of a pipeline's streams", call.error());
}

int bnb_fsdp_cuda_pipeline_step(bnb_fsdp_cuda_pipeline* pipeline, const bnb_fsdp_cuda_chunk* chunks,
                                int64_t count, const bnb_fsdp_cuda_copy* copies, const void* const* gradients,
                                const bnb_fsdp_hyper* hypers, const float* const* rates, void* stream) {
  try {
    const DeviceScope scope(pipeline->device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
    for (int64_t i = 0; i < count; ++i) {
      const bnb_fsdp_cuda_chunk& chunk = chunks[i];
      const void* const* own = gradients + chunk.first_gradient;
      if (std::all_of(own, own + chunk.gradients, [](const void* g) { return g == nullptr; })) continue;
      if (step_chunk(*pipeline, chunk, copies + chunk.first_copy, own, hypers, rates,
                     static_cast<cudaStream_t>(stream)) != 0)
        return 1;
    }
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_pipeline_wait(bnb_fsdp_cuda_pipeline* pipeline) {
  const DeviceScope scope(pipeline->device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
  const cudaError_t error = cudaStreamSynchronize(pipeline->to_host);
  return error == cudaSuccess ? 0 : fail("state to host memory", error);
}

int bnb_fsdp_cuda_pipeline_measure(bnb_fsdp_cuda_pipeline* pipeline, void* host, void* device, int64_t bytes,
                                   double* results) {
  const DeviceScope scope(pipeline->device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
  constexpr int kChunks = 16;
  cudaEvent_t start = nullptr, end = nullptr;
  Calls call;
  call(cudaEventCreateWithFlags, &start, cudaEventDefault)(cudaEventCreateWithFlags, &end, cudaEventDefault);
  auto* h = static_cast<char*>(host);
  auto* d = static_cast<char*>(device);
  const int64_t part = bytes / kChunks;
  double best[3] = {1e9, 1e9, 1e9};
  for (int round = 0; round < 3; ++round) {  // the first warms up
    const double times[3] = {measured(*pipeline, h, d, part, kChunks, false, start, end, call),
                             measured(*pipeline, h, d, part, kChunks, true, start, end, call),
                             measured(*pipeline, h, d, 256, kChunks, true, start, end, call)};
    for (int i = 0; i < 3 && round > 0; ++i) best[i] = std::min(best[i], times[i]);
  }
  for (cudaEvent_t event : {start, end})
    if (event != nullptr) cudaEventDestroy(event);
  if (call.error() != cudaSuccess) return fail("measuring copies", call.error());
  const double total = static_cast<double>(part * kChunks);
  // The first chunk has nothing going out beside it, the last nothing coming in.
  const double alone = static_cast<double>(part) / (total / best[0]);
  results[0] = total / best[0];
  results[1] = 2 * (total - part) / std::max(best[1] - 2 * alone, 1e-9);
  results[2] = best[2] / kChunks;
  return 0;
}

}  // extern "C"
