// float32 states on any architecture: one CTA a tile, which the device starts in order.
#pragma once
#include "launch.cuh"
#include "update32.cuh"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr int kThreads32 = 512, kRuns32 = kTile / (kThreads32 * kRun32);

BNB_FSDP_DEVICE bool aligned_to(const void* p, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

template <class Rule, class P, class G>
__global__ void __launch_bounds__(kThreads32) step32(const __grid_constant__ Launch launch) {
  const int tile = static_cast<int>(blockIdx.x), tensor = tensor_of(launch, tile);
  const void* gradient = gradient_of(launch, tensor);
  if (gradient == nullptr) return;
  const Entry& e = entry_of(launch, tensor);
  const int64_t first = static_cast<int64_t>(tile - e.first_tile) * kTile;
  Place32<Rule, P, G> place;
  place.p = static_cast<typename Memory<P>::type*>(e.parameter) + first;
  place.g = static_cast<const typename Memory<G>::type*>(gradient) + first;
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) place.states[s] = static_cast<float*>(e.state[s]) + first;
  const int elements = static_cast<int>(min(e.numel - first, static_cast<int64_t>(kTile)));
  const bool aligned = e.aligned != 0, aligned_g = aligned_to(place.g, kRun32 * sizeof *place.g);

  Run32<Rule> runs[kRuns32];
#pragma unroll
  for (int run = 0; run < kRuns32; ++run) {
    const int at = (run * kThreads32 + static_cast<int>(threadIdx.x)) * kRun32;
    read_run(place, at, elements - at, aligned, aligned_g, runs[run]);
  }
  const bnb_fsdp_hyper& hyper = hyper_of(launch, e.group);
  const auto k = Rule::template scalars<DeviceMath>(hyper, step_of(launch, tensor), scale_of(launch, tensor));
  const bool skip = Rule::skips_zeros(32) && skips_zeros(hyper);
#pragma unroll
  for (int run = 0; run < kRuns32; ++run) {
    const int at = (run * kThreads32 + static_cast<int>(threadIdx.x)) * kRun32;
    update_run<Rule, P>(k, skip, runs[run]);
    write_run(place, at, elements - at, aligned, runs[run]);
  }
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
