// Hopper and later: a persistent CTA per multiprocessor, in which one producer thread brings tiles of 4,096
// elements to shared memory with bulk copies, and warps update a block of 256 elements each. Tiles are handed
// out in order by a ticket, so that the whole device works on one moving window of memory: that order, and the
// size of the requests, is what reaches the bandwidth of a plain copy (docs/kernels.md).
#pragma once
#include "block8.cuh"
#include "launch.cuh"
#include "update32.cuh"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr int kSharedLimit = 227 * 1024, kMaxStages = 4;  // three are as fast, more no faster

// Warps that update. They take the blocks of all tiles in turn, so their number need not divide a tile's. With
// the producer's warp it decides the registers a thread may have: 15 warps leave 128, 19 leave 96.
template <class Rule, int Bits>
constexpr int kWarps = Bits == 8 && Rule::states > 2 ? 15 : 19;
// Arrivals that make a stage free: one a block, or, where a warp may have none in a tile, one a warp. A warp
// that passed over a tile without a word could meet the stage's next round but one.
template <class Rule, int Bits>
constexpr int kArrivals = kWarps<Rule, Bits> > kTileBlocks ? kWarps<Rule, Bits> : kTileBlocks;
// A lane arrives for its warp. compute-sanitizer's racecheck does not see that the other lanes are done by
// then: for it, a build in which each arrives itself.
#if defined(BNB_FSDP_EVERY_LANE_ARRIVES)
constexpr int kArrivingLanes = 32;
#else
constexpr int kArrivingLanes = 1;
#endif

// With several states and 16-bit parameters, look-ups in shared memory are what a step waits for.
template <class Rule, class P, class G>
using BulkMaps = SharedMaps<Rule, (Rule::states > 1 && kPerWord<P> == 2 && kPerWord<G> == 2) ? 32 : 1>;

// What a tile is, written by the producer beside its data.
template <class Rule>
struct TileHeader {
  char* p;
  const char* g;
  char* states[Rule::states];
  float* absmax[Rule::states];  // 8 bits
  int elements;                 // of the tensor from the tile's start on, a tile's at most; -1: no more tiles
  int blocks;                   // whole blocks that were brought to shared memory
  int scales;                   // of them with their scales
  int shift;  // bytes between the 16-byte boundary that the gradient's copy begins at and the gradient
  int tensor, group;
  float step, scale;
};

template <class Rule, class P, class G, int Bits>
struct Stage {
  static constexpr int tables = Bits == 8 ? BulkMaps<Rule, P, G>::bytes : 0;
  static constexpr int state_size = Bits / 8;
  static constexpr int p_size = sizeof(typename Memory<P>::type), g_size = sizeof(typename Memory<G>::type);
  static constexpr int p = 0, g = kTile * p_size, states = g + kTile * g_size + 16;
  static constexpr int absmax = states + Rule::states * kTile * state_size;
  static constexpr int header = absmax + (Bits == 8 ? Rule::states * kTileBlocks * 4 : 0);
  static constexpr int bytes = (header + static_cast<int>(sizeof(TileHeader<Rule>)) + 127) / 128 * 128;
  static constexpr int barriers = tables;  // a "full" and an "empty" one a stage
  static constexpr int first = barriers + 128;
  static constexpr int fitting = (kSharedLimit - first) / bytes;
  static constexpr int count = fitting < kMaxStages ? fitting : kMaxStages;
  static constexpr int shared_bytes = first + count * bytes;
  static_assert(count >= 2 && count <= 8, "stages do not fit");
};

BNB_FSDP_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if __CUDA_ARCH__ >= 900
BNB_FSDP_DEVICE void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
BNB_FSDP_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
BNB_FSDP_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
BNB_FSDP_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
BNB_FSDP_DEVICE void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The warp has read what it wanted of a stage.
BNB_FSDP_DEVICE void hand_back(uint32_t empty, int lane) {
  __syncwarp();
  if (lane < kArrivingLanes) barrier_arrive(empty);
}

// Waits for a free stage, fills it and hands it over. `turn` counts the stages used by this CTA so far.
template <class Rule, class P, class G, int Bits>
struct Producer {
  using S = Stage<Rule, P, G, Bits>;
  int turn = 0;

  struct Stop {
    unsigned char* memory;
    uint32_t full;
  };
  __device__ __forceinline__ Stop next() {
    const int stage = turn % S::count, round = turn / S::count;
    const uint32_t full = shared_address(shared_memory + S::barriers) + 16 * stage;
    if (round > 0) barrier_wait(full + 8, (round & 1) ^ 1);
    ++turn;
    return {shared_memory + S::first + stage * S::bytes, full};
  }

  // Tile number `at` (within its tensor) of the entry.
  __device__ __forceinline__ void tile(const Entry& e, const void* gradient, int at, int tensor, float step,
                                       float scale) {
    const int64_t first = static_cast<int64_t>(at) * kTile, left = e.numel - first;
    TileHeader<Rule> h;
    h.elements = static_cast<int>(left < kTile ? left : kTile);
    h.p = static_cast<char*>(e.parameter) + first * S::p_size;
    h.g = static_cast<const char*>(gradient) + first * S::g_size;
    h.shift = static_cast<int>(reinterpret_cast<uintptr_t>(h.g) & 15);
    h.blocks = e.aligned ? h.elements / kBlockSize : 0;
    // A gradient between 16-byte boundaries is copied from the one before it to the one behind it, which must
    // not lie behind the tensor.
    if (h.shift != 0 && h.blocks > 0 && (left - h.blocks * kBlockSize) * S::g_size < 16 - h.shift) --h.blocks;
    h.scales = Bits == 8 ? h.blocks & ~3 : 0;  // copies come in units of 16 bytes
    h.tensor = tensor;
    h.group = e.group;
    h.step = step;
    h.scale = scale;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      h.states[s] = static_cast<char*>(e.state[s]) + first * S::state_size;
      if constexpr (Bits == 8) h.absmax[s] = e.absmax[s] + static_cast<int64_t>(at) * kTileBlocks;
    }
    const Stop stop = next();
    *reinterpret_cast<TileHeader<Rule>*>(stop.memory + S::header) = h;
    if (h.blocks == 0) {
      barrier_arrive(stop.full);
      return;
    }
    const int elements = h.blocks * kBlockSize, g_bytes = elements * S::g_size + (h.shift != 0 ? 16 : 0);
    const uint32_t to = shared_address(stop.memory);
    barrier_expect(stop.full,
                   elements * S::p_size + g_bytes + Rule::states * (elements * S::state_size + 4 * h.scales));
    bulk_copy(to + S::p, h.p, elements * S::p_size, stop.full);
    bulk_copy(to + S::g, h.g - h.shift, g_bytes, stop.full);
#pragma unroll
    for (int s = 0; s < Rule::states; ++s)
      bulk_copy(to + S::states + s * kTile * S::state_size, h.states[s], elements * S::state_size, stop.full);
    if (h.scales == 0) return;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s)
      bulk_copy(to + S::absmax + s * kTileBlocks * 4, h.absmax[s], 4 * h.scales, stop.full);
  }

  __device__ __forceinline__ void end() {
    const Stop stop = next();
    reinterpret_cast<TileHeader<Rule>*>(stop.memory + S::header)->elements = -1;
    barrier_arrive(stop.full);
  }
};

// The producer thread. A ticket costs about a microsecond under load, so that everything a tile needs is asked
// for ahead: ticket three tiles before, its tensor two, the tensor's entry one.
template <class Rule, class P, class G, int Bits>
__device__ __forceinline__ void produce(const Launch& launch) {
  Producer<Rule, P, G, Bits> producer;
  const int tiles = launch.tiles, ctas = static_cast<int>(gridDim.x);
  const bool shared_out = tiles > ctas;  // otherwise every CTA has one tile
  const auto ticket = [&] {
    return shared_out ? static_cast<int>(atomicAdd(launch.tickets, 1u)) + 2 * ctas : tiles;
  };
  struct Ahead {
    Entry entry;
    const void* gradient;
    float step, scale;
    int tensor;
  };
  const auto fetch = [&](int tensor) {
    return Ahead{entry_of(launch, tensor), gradient_of(launch, tensor), step_of(launch, tensor),
                 scale_of(launch, tensor), tensor};
  };
  const auto find = [&](int tile) { return tensor_of(launch, min(tile, tiles - 1)); };
  int now = static_cast<int>(blockIdx.x), next = now + ctas, after = ticket();
  Ahead ahead = fetch(find(now));
  int next_tensor = find(next);
  while (now < tiles) {
    const int far = ticket();
    const int after_tensor = find(after);
    const Ahead following = fetch(next_tensor);
    if (ahead.gradient != nullptr)
      producer.tile(ahead.entry, ahead.gradient, now - ahead.entry.first_tile, ahead.tensor, ahead.step,
                    ahead.scale);
    now = next;
    next = after;
    after = far;
    ahead = following;
    next_tensor = after_tensor;
  }
  producer.end();
  if (!shared_out) return;
  // The last CTA leaves the counters as it found them, for the next launch.
  __threadfence();
  if (atomicInc(launch.tickets + 1, gridDim.x - 1) == gridDim.x - 1) launch.tickets[0] = 0;
}

// A gradient in shared memory, `shift` bytes behind `from`.
template <class G, int N>
__device__ __forceinline__ void load_gradient(const unsigned char* from, int shift, float* g) {
  constexpr int words = N / kPerWord<G>;
  uint32_t w[words + 1];
  if (shift == 0) {
    load_words<4 * words>(from, w);
  } else {
    const uint32_t* source = reinterpret_cast<const uint32_t*>(from + (shift & ~3));
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = source[i];
    if constexpr (kPerWord<G> == 2) {
      w[words] = source[words];
      const uint32_t bits = (shift & 2) * 8;
#pragma unroll
      for (int i = 0; i < words; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bits);
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = from_words<G>(w, i);
}

// Block `number` of a tile in shared memory: read, report to the stage's barrier `empty`, update.
template <class Rule, class P, class G>
struct Consumer8 {
  using S = Stage<Rule, P, G, 8>;
  using L = Layout<P, G>;
  using Maps = BulkMaps<Rule, P, G>;
  static __device__ __forceinline__ void run(const unsigned char* memory, const TileHeader<Rule>& h, int number,
                                             int lane, uint32_t empty, const typename Rule::Scalars& k,
                                             bool skip) {
    const int elements = min(h.elements - number * kBlockSize, kBlockSize);
    const bool whole = number < h.blocks;
    Block<Rule, P, G> block;
    block.p = reinterpret_cast<typename Memory<P>::type*>(h.p) + number * kBlockSize;
    block.g = reinterpret_cast<const typename Memory<G>::type*>(h.g) + number * kBlockSize;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      block.codes[s] = reinterpret_cast<uint8_t*>(h.states[s]) + number * kBlockSize;
      block.absmax[s] = h.absmax[s] + number;
    }
    Registers<Rule, P, G> r;
    if (whole) {
      const bool scales = number < h.scales;
#pragma unroll
      for (int run = 0; run < L::kRuns; ++run) {
        const int at = number * kBlockSize + L::first(run, lane);
        load_words<4 * L::p_words>(memory + S::p + at * S::p_size, r.p + run * L::p_words);
        load_gradient<G, L::kRun>(memory + S::g + at * S::g_size, h.shift, r.g + run * L::kRun);
#pragma unroll
        for (int s = 0; s < Rule::states; ++s)
          load_words<L::kRun>(memory + S::states + s * kTile + at, r.codes[s] + run * (L::kRun / 4));
      }
#pragma unroll
      for (int s = 0; s < Rule::states; ++s)
        r.absmax[s] = scales ? reinterpret_cast<const float*>(memory + S::absmax)[s * kTileBlocks + number]
                             : *block.absmax[s];
    }
    hand_back(empty, lane);
    if (!(whole && !skip && update_fast<Rule, P, G, Maps>(k, r, block, lane)) && elements > 0) {
      // Copies: what a call takes by address would live in memory all along.
      const typename Rule::Scalars scalars = k;
      const Block<Rule, P, G> rare = block;
      update_any<Rule, P, G, Maps>(scalars, rare, elements, skip);
    }
  }
};

template <class Rule, class P, class G>
struct Consumer32 {
  using S = Stage<Rule, P, G, 32>;
  static constexpr int runs = kPerLane / kRun32;
  static __device__ __forceinline__ void run(const unsigned char* memory, const TileHeader<Rule>& h, int number,
                                             int lane, uint32_t empty, const typename Rule::Scalars& k,
                                             bool skip) {
    const int elements = min(h.elements - number * kBlockSize, kBlockSize);
    const bool whole = number < h.blocks;
    Place32<Rule, P, G> place;
    place.p = reinterpret_cast<typename Memory<P>::type*>(h.p) + number * kBlockSize;
    place.g = reinterpret_cast<const typename Memory<G>::type*>(h.g) + number * kBlockSize;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s)
      place.states[s] = reinterpret_cast<float*>(h.states[s]) + number * kBlockSize;
    Run32<Rule> r[runs];
    if (whole) {
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        const int at = number * kBlockSize + (run * 32 + lane) * kRun32;
        read4<P>(reinterpret_cast<const typename Memory<P>::type*>(memory + S::p) + at, true, kRun32, r[run].p);
        load_gradient<G, kRun32>(memory + S::g + at * S::g_size, h.shift, r[run].g);
#pragma unroll
        for (int s = 0; s < Rule::states; ++s)
          read4<Float32>(reinterpret_cast<const float*>(memory + S::states) + s * kTile + at, true, kRun32,
                         r[run].s[s]);
      }
    }
    hand_back(empty, lane);
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      const int at = (run * 32 + lane) * kRun32;
      if (!whole) read_run(place, at, elements - at, false, false, r[run]);
      update_run<Rule, P>(k, skip, r[run]);
      write_run(place, at, elements - at, whole, r[run]);
    }
  }
};

template <class Rule, class P, class G, int Bits, class Consumer>
__device__ __forceinline__ void consume(const Launch& launch) {
  using S = Stage<Rule, P, G, Bits>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) & 31;
  typename Rule::Scalars k;
  bool skip = false;
  int last = -1;
  // Blocks are numbered through all tiles; `number` is this warp's next one, counted from the start of the
  // tile.
  for (int number = warp, stage = 0, parity = 0;; number -= kTileBlocks) {
    const uint32_t full = shared_address(shared_memory + S::barriers) + 16 * stage;
    barrier_wait(full, parity);
    const unsigned char* memory = shared_memory + S::first + stage * S::bytes;
    const auto& h = *reinterpret_cast<const TileHeader<Rule>*>(memory + S::header);
    if (h.elements < 0) return;
    if (kWarps<Rule, Bits> > kTileBlocks && number >= kTileBlocks) {
      hand_back(full + 8, lane);  // nothing for this warp
    } else {
      if (h.tensor != last) {
        last = h.tensor;
        const bnb_fsdp_hyper& hyper = hyper_of(launch, h.group);
        k = Rule::template scalars<DeviceMath>(hyper, h.step, h.scale);
        skip = Rule::skips_zeros(Bits) && skips_zeros(hyper);
      }
      do {
        Consumer::run(memory, h, number, lane, full + 8, k, skip);
        number += kWarps<Rule, Bits>;
      } while (kWarps<Rule, Bits> < kTileBlocks && number < kTileBlocks);
    }
    if (++stage == S::count) stage = 0, parity ^= 1;
  }
}
#endif  // __CUDA_ARCH__ >= 900

template <class Rule, class P, class G, int Bits>
__global__ void __launch_bounds__(32 * (kWarps<Rule, Bits> + 1), 1)
    bulk(const __grid_constant__ Launch launch) {
#if __CUDA_ARCH__ >= 900
  using S = Stage<Rule, P, G, Bits>;
  constexpr int consumers = 32 * kWarps<Rule, Bits>;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    const uint32_t barriers = shared_address(shared_memory + S::barriers);
    for (int i = 0; i < S::count; ++i) {
      barrier_init(barriers + 16 * i, 1);
      barrier_init(barriers + 16 * i + 8, kArrivingLanes * kArrivals<Rule, Bits>);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (thread >= consumers) {
    if (thread == consumers) produce<Rule, P, G, Bits>(launch);
    return;
  }
  if constexpr (Bits == 8) {
    // The producer is under way meanwhile.
    BulkMaps<Rule, P, G>::fill(launch.maps, thread, consumers);
    asm volatile("bar.sync 1, %0;" ::"n"(consumers) : "memory");
    consume<Rule, P, G, 8, Consumer8<Rule, P, G>>(launch);
  } else {
    consume<Rule, P, G, 32, Consumer32<Rule, P, G>>(launch);
  }
#else
  __trap();  // never launched: see find_kernel
#endif
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
