#pragma once
#include <cuda_runtime.h>

#include "table.h"

namespace bnb_fsdp {

cudaError_t launch_upload(const Upload& upload, cudaStream_t stream);

// Writes the step counts that an upload computed to the tensors' own, once the step is under way.
cudaError_t launch_advance(const Entry* entries, const void* const* gradients, const float* steps, int count,
                           cudaStream_t stream);

// Sums of a tensor's tiles, for `tensors` entries, or for the only tensor of `count` tiles if entries is NULL.
cudaError_t launch_sum(const float2* tiles, const Entry* entries, int tensors, int count, float2* sums,
                       cudaStream_t stream);

}  // namespace bnb_fsdp
