// State in host memory: copied in, updated, copied out, a chunk at a time and three chunks at once.
#include <cuda_runtime.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "../c_api.h"
#include "copies.h"
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
  bnb_fsdp::Copies copies;
  int64_t begun = 0, begun_chunks = 0;  // the ticket of the step whose first chunks are coming in, how many

  bnb_fsdp_cuda_pipeline() = default;
  bnb_fsdp_cuda_pipeline(const bnb_fsdp_cuda_pipeline&) = delete;
  bnb_fsdp_cuda_pipeline& operator=(const bnb_fsdp_cuda_pipeline&) = delete;
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

cudaError_t queue(bnb_fsdp_cuda_pipeline* p, const bnb_fsdp_cuda_copy* copies, int64_t count,
                  cudaMemcpyKind kind, cudaStream_t stream) {
  return p->copies.queue(copies, count, kind, stream);
}

cudaError_t new_event(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDisableTiming); }

int bring_in(bnb_fsdp_cuda_pipeline& p, const bnb_fsdp_cuda_chunk& chunk, const bnb_fsdp_cuda_copy* copies) {
  const auto& buffer = p.buffers[static_cast<size_t>(chunk.buffer)];
  Calls call;
  call(wait, p.to_device, buffer.out);
  call(queue, &p, copies, chunk.copies, cudaMemcpyHostToDevice, p.to_device);
  call(cudaEventRecord, buffer.in, p.to_device);
  return call.error() == cudaSuccess ? 0 : fail("state from host memory", call.error());
}

// A chunk that was brought in.
int step_chunk(bnb_fsdp_cuda_pipeline& p, const bnb_fsdp_cuda_chunk& chunk, const bnb_fsdp_cuda_copy* copies,
               const void* const* gradients, const bnb_fsdp_hyper* hypers, const float* const* rates,
               cudaStream_t stream) {
  const auto& buffer = p.buffers[static_cast<size_t>(chunk.buffer)];
  Calls call;
  call(wait, stream, buffer.in);
  if (call.error() != cudaSuccess) return fail("state from host memory", call.error());
  if (bnb_fsdp_cuda_bucket_step(chunk.bucket, chunk.memory, gradients, hypers, rates, nullptr, stream) != 0)
    return 1;
  call(cudaEventRecord, buffer.updated, stream)(wait, p.to_host, buffer.updated);
  call(queue, &p, copies, chunk.copies, cudaMemcpyDeviceToHost, p.to_host);
  call(cudaEventRecord, buffer.out, p.to_host);
  return call.error() == cudaSuccess ? 0 : fail("state to host memory", call.error());
}

// Measures what is queued between its construction and `seconds`, on both streams.
class Stopwatch {
 public:
  Stopwatch(bnb_fsdp_cuda_pipeline& p, cudaEvent_t start, cudaEvent_t end, Calls& call)
      : p_(p), start_(start), end_(end), call_(call) {
    call(cudaEventRecord, start, p.to_device)(wait, p.to_host, start);
  }

  double seconds() {
    call_(cudaEventRecord, p_.followed, p_.to_host)(wait, p_.to_device, p_.followed);
    call_(cudaEventRecord, end_, p_.to_device)(cudaEventSynchronize, end_);
    float milliseconds = 0;
    call_(cudaEventElapsedTime, &milliseconds, start_, end_);
    return milliseconds * 1e-3;
  }

 private:
  bnb_fsdp_cuda_pipeline& p_;
  cudaEvent_t start_, end_;
  Calls& call_;
};

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

int bnb_fsdp_cuda_pipeline_begin(bnb_fsdp_cuda_pipeline* pipeline, const bnb_fsdp_cuda_chunk* chunks,
                                 int64_t count, const bnb_fsdp_cuda_copy* copies, int64_t ticket) {
  try {
    const DeviceScope scope(pipeline->device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
    pipeline->begun = 0;
    for (int64_t i = 0; i < count; ++i)
      if (bring_in(*pipeline, chunks[i], copies + chunks[i].first_copy) != 0) return 1;
    pipeline->begun = ticket;
    pipeline->begun_chunks = count;
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_pipeline_step(bnb_fsdp_cuda_pipeline* pipeline, const bnb_fsdp_cuda_chunk* chunks,
                                int64_t count, const bnb_fsdp_cuda_copy* copies, const void* const* gradients,
                                const bnb_fsdp_hyper* hypers, const float* const* rates, int64_t ticket,
                                void* stream) {
  try {
    const DeviceScope scope(pipeline->device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
    const int64_t there = pipeline->begun == ticket ? pipeline->begun_chunks : 0;
    pipeline->begun = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bnb_fsdp_cuda_chunk& chunk = chunks[i];
      const void* const* own = gradients + chunk.first_gradient;
      if (std::all_of(own, own + chunk.gradients, [](const void* g) { return g == nullptr; })) continue;
      const bnb_fsdp_cuda_copy* its = copies + chunk.first_copy;
      if (i >= there && bring_in(*pipeline, chunk, its) != 0) return 1;
      if (step_chunk(*pipeline, chunk, its, own, hypers, rates, static_cast<cudaStream_t>(stream)) != 0)
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
  Calls call;
  call(cudaStreamSynchronize, pipeline->to_host)(cudaStreamSynchronize, pipeline->to_device);
  pipeline->begun = 0;
  return call.error() == cudaSuccess ? 0 : fail("state to host memory", call.error());
}

int bnb_fsdp_cuda_pipeline_measure(bnb_fsdp_cuda_pipeline* pipeline, void* host, void* device, int64_t bytes,
                                   double* results) {
  const DeviceScope scope(pipeline->device);
  if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(pipeline->device), scope.error());
  constexpr int kChunks = 16;
  cudaEvent_t start = nullptr, end = nullptr;
  Calls call;
  call(cudaEventCreateWithFlags, &start, cudaEventDefault)(cudaEventCreateWithFlags, &end, cudaEventDefault);
  auto& p = *pipeline;
  auto* h = static_cast<char*>(host);
  auto* d = static_cast<char*>(device);
  const int64_t half = bytes / 2;
  const int64_t least = std::min(half, kLeastInBatch);
  const bnb_fsdp_cuda_copy small[2] = {{h, d, least, 1, 0, 0}, {h + half, d + half, least, 1, 0, 0}};
  double best[4] = {1e9, 1e9, 1e9, 1e9};
  for (int round = 0; round < 3; ++round) {  // the first warms up
    double times[4];
    Stopwatch one_way(p, start, end, call);
    call(copy, d, h, bytes, cudaMemcpyHostToDevice, p.to_device);
    times[0] = one_way.seconds();
    Stopwatch two_way(p, start, end, call);  // what goes out is what came in
    call(copy, d, h, half, cudaMemcpyHostToDevice, p.to_device);
    call(copy, h + half, d + half, half, cudaMemcpyDeviceToHost, p.to_host);
    times[1] = two_way.seconds();
    for (int64_t copies : {1, 2}) {
      call(copy, d, h, bytes, cudaMemcpyHostToDevice, p.to_device);  // lest the device wait for the host
      Stopwatch chunks(p, start, end, call);
      for (int i = 0; i < kChunks; ++i) {
        const auto& buffer = p.buffers[static_cast<size_t>(i) % p.buffers.size()];
        call(wait, p.to_device, buffer.out)(queue, &p, small, copies, cudaMemcpyHostToDevice, p.to_device);
        call(cudaEventRecord, buffer.in, p.to_device)(wait, p.to_host, buffer.in);
        call(queue, &p, small, copies, cudaMemcpyDeviceToHost, p.to_host)(cudaEventRecord, buffer.out,
                                                                          p.to_host);
      }
      times[1 + copies] = chunks.seconds();
    }
    for (int i = 0; i < 4 && round > 0; ++i) best[i] = std::min(best[i], times[i]);
  }
  for (cudaEvent_t event : {start, end})
    if (event != nullptr) cudaEventDestroy(event);
  if (call.error() != cudaSuccess) return fail("measuring copies", call.error());
  results[0] = static_cast<double>(bytes) / best[0];
  results[1] = 2 * static_cast<double>(half) / best[1];
  results[2] = best[2] / kChunks;
  results[3] = std::max(0.0, best[3] - best[2]) / kChunks;
  return 0;
}

}  // extern "C"
