// 8-bit states on any architecture: persistent CTAs whose warps load, update and store a block each.
#pragma once
#include "block8.cuh"
#include "launch.cuh"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr int kWarpThreads = kTileBlocks * 32;

template <class G, int N>
__device__ __forceinline__ void read_gradient(const typename Memory<G>::type* from, bool aligned, float* g) {
  constexpr int words = N / kPerWord<G>;
  if (aligned) {
    uint32_t w[words];
    load_words<4 * words>(from, w);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = from_words<G>(w, i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = Memory<G>::widen(from[i]);
  }
}

template <class Rule, class P, class G>
__global__ void __launch_bounds__(kWarpThreads) warp8(const __grid_constant__ Launch launch) {
  using L = Layout<P, G>;
  using Maps = SharedMaps<Rule, 1>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  Maps::fill(launch.maps, static_cast<int>(threadIdx.x), kWarpThreads);
  __syncthreads();
  typename Rule::Scalars k;
  bool skip = false;
  int last = -1;
  for (int tile = static_cast<int>(blockIdx.x); tile < launch.tiles; tile += static_cast<int>(gridDim.x)) {
    const int tensor = tensor_of(launch, tile);
    const void* gradient = gradient_of(launch, tensor);
    if (gradient == nullptr) continue;
    const Entry& e = entry_of(launch, tensor);
    if (tensor != last) {
      last = tensor;
      const bnb_fsdp_hyper& hyper = hyper_of(launch, e.group);
      k = Rule::template scalars<DeviceMath>(hyper, step_of(launch, tensor), scale_of(launch, tensor));
      skip = Rule::skips_zeros(8) && skips_zeros(hyper);
    }
    const int64_t number = static_cast<int64_t>(tile - e.first_tile) * kTileBlocks + warp;
    const int64_t left = e.numel - number * kBlockSize;
    if (left <= 0) continue;
    Block<Rule, P, G> block;
    block.p = static_cast<typename Memory<P>::type*>(e.parameter) + number * kBlockSize;
    block.g = static_cast<const typename Memory<G>::type*>(gradient) + number * kBlockSize;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      block.codes[s] = static_cast<uint8_t*>(e.state[s]) + number * kBlockSize;
      block.absmax[s] = e.absmax[s] + number;
    }
    bool done = false;
    if (e.aligned && left >= kBlockSize && !skip) {
      const bool aligned = (reinterpret_cast<uintptr_t>(block.g) & 15) == 0;
      Registers<Rule, P, G> r;
#pragma unroll
      for (int run = 0; run < L::kRuns; ++run) {
        const int at = L::first(run, lane);
        load_words<4 * L::p_words>(block.p + at, r.p + run * L::p_words);
        read_gradient<G, L::kRun>(block.g + at, aligned, r.g + run * L::kRun);
#pragma unroll
        for (int s = 0; s < Rule::states; ++s)
          load_words<L::kRun>(block.codes[s] + at, r.codes[s] + run * (L::kRun / 4));
      }
#pragma unroll
      for (int s = 0; s < Rule::states; ++s) r.absmax[s] = *block.absmax[s];
      __syncwarp();
      done = update_fast<Rule, P, G, Maps>(k, r, block, lane);
    }
    if (!done) {
      // Copies: what a call takes by address would live in memory all along.
      const typename Rule::Scalars scalars = k;
      const Block<Rule, P, G> rare = block;
      update_any<Rule, P, G, Maps>(scalars, rare, static_cast<int>(left < kBlockSize ? left : kBlockSize),
                                   skip);
    }
  }
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
