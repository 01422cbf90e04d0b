// Kernels around the update: a step's values on their way to device memory, and sums over a tensor's tiles.
#include "upload.h"

namespace bnb_fsdp {
namespace {

__global__ void upload_kernel(const __grid_constant__ Upload upload) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < upload.groups) {
    bnb_fsdp_hyper hyper = upload.inline_hypers[at];
    if (upload.rates[at] != nullptr) hyper.lr = *upload.rates[at];
    upload.hypers[upload.first_group + at] = hyper;
  }
  if (at >= upload.tensors) return;
  const int tensor = upload.first_tensor + at;
  const void* gradient = upload.inline_gradients[at];
  upload.gradients[tensor] = gradient;
  if (!upload.steps_on_device) {
    upload.steps[tensor] = upload.inline_steps[at];
  } else if (gradient != nullptr) {
    upload.steps[tensor] = *upload.entries[tensor].step + 1.0f;
  }
}

__global__ void advance_kernel(const Entry* entries, const void* const* gradients, const float* steps,
                               int count) {
  const int tensor = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (tensor < count && gradients[tensor] != nullptr) *entries[tensor].step = steps[tensor];
}

__global__ void sum_kernel(const float2* tiles, const Entry* entries, int count, float2* sums) {
  const int tensor = static_cast<int>(blockIdx.x);
  const int first = entries != nullptr ? entries[tensor].first_tile : 0;
  const int end =
      entries != nullptr ? first + static_cast<int>((entries[tensor].numel + kTile - 1) / kTile) : count;
  // One warp: lane sums a stretch with a fixed stride, then a fixed tree.
  double x = 0.0, y = 0.0;
  for (int tile = first + static_cast<int>(threadIdx.x); tile < end; tile += 32) {
    x += tiles[tile].x;
    y += tiles[tile].y;
  }
  for (int o = 16; o > 0; o /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, o);
    y += __shfl_xor_sync(0xffffffffu, y, o);
  }
  if (threadIdx.x == 0) sums[tensor] = make_float2(static_cast<float>(x), static_cast<float>(y));
}

}  // namespace

cudaError_t launch_upload(const Upload& upload, cudaStream_t stream) {
  const int threads = 256, work = upload.tensors > upload.groups ? upload.tensors : upload.groups;
  void* arguments[] = {const_cast<Upload*>(&upload)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(upload_kernel), dim3((work + threads - 1) / threads),
                          dim3(threads), arguments, 0, stream);
}

cudaError_t launch_advance(const Entry* entries, const void* const* gradients, const float* steps, int count,
                           cudaStream_t stream) {
  const int threads = 256;
  void* arguments[] = {&entries, &gradients, &steps, &count};
  return cudaLaunchKernel(reinterpret_cast<const void*>(advance_kernel), dim3((count + threads - 1) / threads),
                          dim3(threads), arguments, 0, stream);
}

cudaError_t launch_sum(const float2* tiles, const Entry* entries, int tensors, int count, float2* sums,
                       cudaStream_t stream) {
  void* arguments[] = {&tiles, &entries, &count, &sums};
  return cudaLaunchKernel(reinterpret_cast<const void*>(sum_kernel), dim3(tensors), dim3(32), arguments, 0,
                          stream);
}

}  // namespace bnb_fsdp
