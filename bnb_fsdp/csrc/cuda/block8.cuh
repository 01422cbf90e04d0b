// One block of 256 elements with 8-bit states, by one warp: decode, update, encode.
//
// update_fast keeps a whole aligned block in registers, eight elements a lane. It declines, before anything is
// stored, if a new state is not finite; update_any then reads the block again and handles every case.
#pragma once
#include "lane.cuh"
#include "table.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr int kPerLane = kBlockSize / 32;

extern __shared__ __align__(128) unsigned char shared_memory[];

// The tables a rule needs, at the start of shared memory. The values lie there `Copies` times: with 32, every
// lane has its own bank, and a look-up never waits.
template <class Rule, int Copies>
struct SharedMaps {
  static constexpr bool any_unsigned() {
    for (int s = 0; s < Rule::states; ++s)
      if (!Rule::is_signed(s)) return true;
    return false;
  }
  static constexpr int stride = 4 * Copies, value_bytes = kBlockSize * stride;
  static constexpr int signed_values = 0, unsigned_values = value_bytes;
  static constexpr int encode_signed = any_unsigned() ? 2 * value_bytes : value_bytes;
  static constexpr int encode_unsigned = encode_signed + 4 * kSignedEntries;
  static constexpr int bytes = encode_unsigned + (any_unsigned() ? 4 * kUnsignedEntries : 0);

  // Byte `i` of a word of codes, as an offset for value().
  static __device__ __forceinline__ uint32_t offset(uint32_t word, int i, uint32_t lane) {
    static_assert(Copies == 1 || Copies == 32, "a lane has the common copy or its own");
    constexpr int shift = Copies == 1 ? 2 : 7;
    const uint32_t scaled = 8 * i < shift ? word << (shift - 8 * i) : word >> (8 * i - shift);
    return (scaled & (0xffu << shift)) | (Copies == 1 ? 0u : 4 * lane);
  }
  static __device__ __forceinline__ float value(bool is_signed, uint32_t offset) {
    return *reinterpret_cast<const float*>(shared_memory + (is_signed ? signed_values : unsigned_values) +
                                           offset);
  }
  static __device__ __forceinline__ uint32_t entry(bool is_signed, uint32_t offset) {
    return *reinterpret_cast<const uint32_t*>(shared_memory + (is_signed ? encode_signed : encode_unsigned) +
                                              offset);
  }

  // By `threads` threads, of which this is number `thread`.
  static __device__ void fill(const MapTables* maps, int thread, int threads) {
    spread(signed_values, maps->values[1], thread, threads);
    copy(encode_signed, maps->encode_signed, 4 * kSignedEntries, thread, threads);
    if constexpr (any_unsigned()) {
      spread(unsigned_values, maps->values[0], thread, threads);
      copy(encode_unsigned, maps->encode_unsigned, 4 * kUnsignedEntries, thread, threads);
    }
  }

 private:
  static __device__ __forceinline__ void copy(int to, const void* from, int bytes, int thread, int threads) {
    const uint4* source = static_cast<const uint4*>(from);
    uint4* destination = reinterpret_cast<uint4*>(shared_memory + to);
#pragma unroll 4
    for (int i = thread; i < bytes / 16; i += threads) destination[i] = source[i];
  }
  static __device__ __forceinline__ void spread(int to, const float* values, int thread, int threads) {
    float* destination = reinterpret_cast<float*>(shared_memory + to);
#pragma unroll 4
    for (int i = thread; i < kBlockSize * Copies; i += threads) destination[i] = values[i / Copies];
  }
};

// Where a block of 256 elements is.
template <class Rule, class P, class G>
struct Block {
  typename Memory<P>::type* p;
  const typename Memory<G>::type* g;
  uint8_t* codes[Rule::states];
  float* absmax[Rule::states];
};

BNB_FSDP_DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

// Two values truncated to float16.
BNB_FSDP_DEVICE uint32_t truncated_halves(float low, float high) {
  uint32_t r;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  r = static_cast<uint32_t>(__half_as_ushort(__float2half_rz(low))) |
      static_cast<uint32_t>(__half_as_ushort(__float2half_rz(high))) << 16;
#endif
  return r;
}

// Codes of four values, given times 1024 (encode_table.h).
template <class Maps, bool Signed>
BNB_FSDP_DEVICE uint32_t encode4(const float* y) {
  const uint32_t h0 = truncated_halves(y[0], y[1]), h1 = truncated_halves(y[2], y[3]);
  constexpr uint32_t mask = Signed ? 0x7ffcu : 0x3ffcu;
  const uint32_t at[4] = {h0 >> 1 & mask, h0 >> 17 & mask, h1 >> 1 & mask, h1 >> 17 & mask};
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = static_cast<uint32_t>(max(static_cast<int>(Maps::entry(Signed, at[i]) + __float_as_uint(y[i])), 0));
  const uint32_t q = permute(permute(w[0], w[1], 0x0062), permute(w[2], w[3], 0x0062), 0x5410);
  if constexpr (!Signed) return q;
  // 127 + q, or 126 - q = 127 + ~q where y is negative: bytewise, without carries between them.
  uint32_t negative;
  asm("prmt.b32 %0, %1, %2, 0xFDB9;" : "=r"(negative) : "r"(h0), "r"(h1));
  const uint32_t a = q ^ negative;
  return ((a & 0x7f7f7f7fu) + 0x7f7f7f7fu) ^ (a & 0x80808080u);
}

// The code of any state, given x = rcp(absmax) * state.
template <class Maps, bool Signed>
BNB_FSDP_DEVICE uint8_t encode_any(float x, float state) {
  if (isnan(x)) {
    // Upstream's search ends at code 0, which has a negative value in the signed map: its sign is then
    // corrected.
    if (!Signed || (signbit(state) && !isnan(state))) return 0;
    return state > 0.0f ? 1 : 255;
  }
  const float y[4] = {DeviceMath::mul(x, 1024.0f), 0.0f, 0.0f, 0.0f};
  return static_cast<uint8_t>(encode4<Maps, Signed>(y));
}

// The larger magnitude; NaN if either is.
BNB_FSDP_DEVICE float larger_magnitude(float m, float x) {
#if __CUDA_ARCH__ >= 800
  float r;
  asm("{.reg .f32 t; abs.f32 t, %2; max.NaN.f32 %0, %1, t;}" : "=f"(r) : "f"(m), "f"(x));
  return r;
#else
  return __uint_as_float(max(__float_as_uint(m), __float_as_uint(x) & 0x7fffffffu));
#endif
}

// Largest over the warp of non-negative floats' bits.
BNB_FSDP_DEVICE uint32_t warp_largest(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, bits);
#else
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, o));
  return bits;
#endif
}

// A lane holds kPerLane elements in runs of kRun neighbours, 32 * kRun apart, so that a warp's widest access is
// 512 contiguous bytes: runs of 4 for float32, of 8 for 16-bit parameters and gradients.
template <class P, class G>
struct Layout {
  static constexpr int kRun = kPerWord<P> == 1 || kPerWord<G> == 1 ? 4 : 8;
  static constexpr int kRuns = kPerLane / kRun;
  static constexpr int p_words = kRun / kPerWord<P>, g_words = kRun / kPerWord<G>;
  static __device__ __forceinline__ int first(int run, int lane) { return run * 32 * kRun + lane * kRun; }
};

// A lane's part of a block.
template <class Rule, class P, class G>
struct Registers {
  using L = Layout<P, G>;
  uint32_t p[L::kRuns * L::p_words];
  float g[kPerLane];
  uint32_t codes[Rule::states][kPerLane / 4];
  float absmax[Rule::states];
};

// A byte of ones for each of four values with the sign bit set.
BNB_FSDP_DEVICE uint32_t negative_bytes(const float* x) {
  uint32_t low, high;
  asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(low) : "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])));
  asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(high) : "r"(__float_as_uint(x[2])), "r"(__float_as_uint(x[3])));
  return permute(low, high, 0x5410);
}

// Encodes one state; absmax is the block's new scale.
template <class Maps, class P, class G, bool Signed>
BNB_FSDP_DEVICE void encode_block(float (&values)[kPerLane], uint32_t largest, uint8_t* codes, int lane) {
  using L = Layout<P, G>;
  uint32_t words[kPerLane / 4];
  if (largest == 0) {
    // Upstream divides 0 by 0 and takes code 0, a negative value, which it corrects to 255 unless the zero is
    // negative.
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) words[i] = Signed ? ~negative_bytes(values + 4 * i) : 0u;
  } else {
    float inverse = DeviceMath::rcp(__uint_as_float(largest));
    if (largest < 0x08800000u) {
      // Below 2^-110 the inverse times 1024 would overflow: the factor goes to the values, which is exact.
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) values[i] = DeviceMath::mul(values[i], 1048576.0f);
      inverse = DeviceMath::mul(inverse, 1.0f / 1024.0f);
    } else {
      inverse = DeviceMath::mul(inverse, 1024.0f);
    }
#pragma unroll
    for (int i = 0; i < kPerLane / 4; ++i) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = DeviceMath::mul(inverse, values[4 * i + j]);
      words[i] = encode4<Maps, Signed>(y);
    }
  }
#pragma unroll
  for (int run = 0; run < L::kRuns; ++run)
    store_words<L::kRun>(codes + L::first(run, lane), words + run * (L::kRun / 4));
}

// Returns false, with nothing stored, if update_any must do it.
template <class Rule, class P, class G, class Maps>
BNB_FSDP_DEVICE bool update_fast(const typename Rule::Scalars& k, const Registers<Rule, P, G>& r,
                                 const Block<Rule, P, G>& block, int lane) {
  using L = Layout<P, G>;
  using Element = Lane<true>;
  float values[Rule::states][kPerLane];
  float parameters[kPerLane];
  float largest[Rule::states];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    Element state[Rule::states];
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      const uint32_t offset = Maps::offset(r.codes[s][i / 4], i % 4, lane);
      state[s] = Element(DeviceMath::mul(Maps::value(Rule::is_signed(s), offset), r.absmax[s]));
    }
    Element p(from_words<P>(r.p, i));
    Rule::template update8<P>(k, Element(r.g[i]), p, state);
    parameters[i] = p.v;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      values[s][i] = state[s].v;
      largest[s] = i == 0 ? fabsf(state[s].v) : larger_magnitude(largest[s], state[s].v);
    }
  }
  uint32_t bits[Rule::states];
  bool finite = true;
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) {
    bits[s] = warp_largest(__float_as_uint(largest[s]));
    finite = finite && bits[s] < kInfinity;
  }
  if (!finite) return false;
  uint32_t words[L::kRuns * L::p_words];
  to_words<P>(parameters, words);
#pragma unroll
  for (int run = 0; run < L::kRuns; ++run)
    store_words<4 * L::p_words>(block.p + L::first(run, lane), words + run * L::p_words);
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) {
    if (Rule::is_signed(s))
      encode_block<Maps, P, G, true>(values[s], bits[s], block.codes[s], lane);
    else
      encode_block<Maps, P, G, false>(values[s], bits[s], block.codes[s], lane);
  }
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) store_words<4>(block.absmax[s], &bits[s]);
  }
  return true;
}

// Any block of n <= 256 elements at any alignment. Lanes beyond n hold what upstream's do, and count in the
// maximum.
template <class Rule, class P, class G, class Maps>
__device__ __noinline__ void update_any(const typename Rule::Scalars& k, const Block<Rule, P, G>& block, int n,
                                        bool skip_zeros) {
  using Element = Lane<false>;
  const int lane = threadIdx.x & 31;
  float values[kPerLane][Rule::states];
  float largest[Rule::states], absmax[Rule::states];
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) {
    absmax[s] = *block.absmax[s];
    largest[s] = -3.402823466e38f;  // what is left if every value is NaN
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int at = i * 32 + lane;
    const bool inside = at < n;
    Element state[Rule::states], old[Rule::states];
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      const uint32_t code = inside ? block.codes[s][at] : Rule::is_signed(s) ? 128u : 0u;
      state[s] = Element(DeviceMath::mul(Maps::value(Rule::is_signed(s), Maps::stride * code), absmax[s]));
      old[s] = state[s];
    }
    const float g = inside ? Memory<G>::widen(block.g[at]) : 0.0f;
    Element p(inside ? Memory<P>::widen(block.p[at]) : 0.0f);
    Rule::template update8<P>(k, Element(g), p, state);
    const bool skipped = skip_zeros && is_zero(g);
    if (inside && !skipped) block.p[at] = Memory<P>::narrow(p.v);
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) {
      values[i][s] = skipped ? old[s].v : state[s].v;
      largest[s] = fmaxf(largest[s], fabsf(values[i][s]));
    }
  }
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) largest[s] = fmaxf(largest[s], __shfl_xor_sync(kAllLanes, largest[s], o));
    const float inverse = DeviceMath::rcp(largest[s]);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int at = i * 32 + lane;
      const float x = DeviceMath::mul(inverse, values[i][s]);
      const uint8_t code = Rule::is_signed(s) ? encode_any<Maps, true>(x, values[i][s])
                                              : encode_any<Maps, false>(x, values[i][s]);
      if (at < n) block.codes[s][at] = code;
    }
    if (lane == 0) *block.absmax[s] = largest[s];
  }
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
