// Sums of squares for LAMB and LARS: of the rule's direction, and of the parameter. Deterministic:
// a CTA sums a tile in a fixed order, and a second kernel sums a tensor's tiles in theirs.
#pragma once
#include "launch.cuh"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr int kNormThreads = 256;

BNB_FSDP_DEVICE float2 block_sum(float2 x) {
  __shared__ float2 partial[kNormThreads];
  partial[threadIdx.x] = x;
  for (int half = kNormThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      partial[threadIdx.x].x += partial[threadIdx.x + half].x;
      partial[threadIdx.x].y += partial[threadIdx.x + half].y;
    }
  }
  return partial[0];  // meaningful for thread 0
}

template <class Rule, int Bits>
BNB_FSDP_DEVICE Lane<false> state_of(const Launch& launch, const Entry& e, int s, int64_t at) {
  if constexpr (Bits == 32) return Lane<false>(static_cast<const float*>(e.state[s])[at]);
  const uint8_t code = static_cast<const uint8_t*>(e.state[s])[at];
  const float value = launch.maps->values[Rule::is_signed(s) ? 1 : 0][code];
  return Lane<false>(DeviceMath::mul(value, e.absmax[s][at / kBlockSize]));
}

// sums: two floats a tile.
template <class Rule, class P, class G, int Bits>
__global__ void __launch_bounds__(kNormThreads)
    tile_norms(const __grid_constant__ Launch launch, float2* sums) {
  using Element = Lane<false>;
  const int tile = static_cast<int>(blockIdx.x), tensor = tensor_of(launch, tile);
  const Entry& e = entry_of(launch, tensor);
  const void* gradient = gradient_of(launch, tensor);
  float2 sum = make_float2(0.0f, 0.0f);
  if (gradient != nullptr) {
    const auto k = Rule::template scalars<DeviceMath>(hyper_of(launch, e.group), step_of(launch, tensor), 1.0f);
    const int64_t first = static_cast<int64_t>(tile - e.first_tile) * kTile;
    const int64_t end = min(first + kTile, e.numel);
    for (int64_t at = first + threadIdx.x; at < end; at += kNormThreads) {
      const Element p(Memory<P>::widen(static_cast<const typename Memory<P>::type*>(e.parameter)[at]));
      const Element g(Memory<G>::widen(static_cast<const typename Memory<G>::type*>(gradient)[at]));
      Element states[Rule::states];
      for (int s = 0; s < Rule::states; ++s) states[s] = state_of<Rule, Bits>(launch, e, s, at);
      Element u;
      if constexpr (Bits == 8)
        u = Rule::template direction8<P>(k, g, p, states);
      else
        u = Rule::direction32(k, g, p, states);
      sum.x += u.v * u.v;
      sum.y += p.v * p.v;
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[tile] = sum;
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
