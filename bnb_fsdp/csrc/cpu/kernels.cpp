// All kernels of one instruction set. Compiled once for each, with BNB_FSDP_ISA naming it.
#include "kernels.h"

#include <string.h>

#include "../quantize/codebook.h"
#include "../rules/adagrad.h"
#include "../rules/adam.h"
#include "../rules/ademamix.h"
#include "../rules/host_math.h"
#include "../rules/lion.h"
#include "../rules/momentum.h"
#include "../rules/rmsprop.h"

#if defined(BNB_FSDP_LANES_AVX512)
#include "lanes_avx512.h"
#elif defined(BNB_FSDP_LANES_AVX2)
#include "lanes_avx2.h"
#elif defined(BNB_FSDP_LANES_NEON)
#include "lanes_neon.h"
#else
#include "lanes_generic.h"
#endif

#define BNB_FSDP_JOIN_(a, b) a##b
#define BNB_FSDP_JOIN(a, b) BNB_FSDP_JOIN_(a, b)
#define BNB_FSDP_QUOTE_(a) #a
#define BNB_FSDP_QUOTE(a) BNB_FSDP_QUOTE_(a)

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {
namespace {

// Bits of the block's largest magnitude at which the fast quantiser does not apply: zero, infinity and NaN.
bool is_ordinary(uint32_t largest) { return largest != 0 && largest < 0x7f800000u; }

// The largest magnitude with NaN left out; -FLT_MAX if there is nothing else, as upstream.
float plain_absmax(const float* values) {
  float result = -3.402823466e38f;
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = fabsf(values[i]);
    if (magnitude > result) result = magnitude;
  }
  return result;
}

template <bool Signed>
void quantize_block(const float* values, uint32_t largest, uint8_t* codes, float* absmax) {
  const Codebook& book = codebook(Signed);
  if (!is_ordinary(largest)) {
    *absmax = plain_absmax(values);
    const float inverse = 1.0f / *absmax;
    for (int i = 0; i < kBlock; ++i) codes[i] = quantize_one(book, Signed, values[i], inverse);
    return;
  }
  *absmax = from_bits(largest);
  const Lane inverse(1.0f / *absmax);
  for (int i = 0; i < kBlock; i += kGroup) encode_group<Signed>(book, values + i, inverse, codes + i);
}

template <class G>
void widen(const void* source, float* destination) {
  const auto* from = static_cast<const typename Memory<G>::type*>(source);
  for (int i = 0; i < kBlock; i += Lane::width)
    Memory<Float32>::store(destination + i, Memory<G>::load(from + i));
}

size_t size_of(int dtype) { return dtype == BNB_FSDP_FLOAT32 ? 4 : 2; }

// kBlock gradients as float32: in place where they are that already, else in `buffer`.
const float* gradients(const void* gradient, int64_t offset, int dtype, float* buffer) {
  const char* source = static_cast<const char*>(gradient) + offset * static_cast<int64_t>(size_of(dtype));
  switch (dtype) {
    case BNB_FSDP_BFLOAT16: widen<BFloat16>(source, buffer); return buffer;
    case BNB_FSDP_FLOAT16: widen<Float16>(source, buffer); return buffer;
    default: return reinterpret_cast<const float*>(source);
  }
}

// The last n < kBlock gradients as kBlock float32, zeros behind them.
const float* tail_gradients(const void* gradient, int64_t offset, size_t n, int dtype,
                            unsigned char (&raw)[4 * kBlock], float* buffer) {
  const size_t size = size_of(dtype);
  memset(raw, 0, sizeof raw);
  memcpy(raw, static_cast<const char*>(gradient) + offset * static_cast<int64_t>(size), n * size);
  return gradients(raw, 0, dtype, buffer);
}

// Brings data that is needed soon to the cache, a line at a time: hardware prefetchers lose the streams to the
// buffers used in between, and a burst of requests would stall.
constexpr int64_t kAhead = 2 * kBlock;
template <class T>
BNB_FSDP_HD void prefetch(const T* address, int i) {
  if (i * sizeof(T) % 64 == 0) __builtin_prefetch(address + kAhead + i);
}

// One block between its update and its encoding.
template <class Rule>
struct Updated {
  alignas(64) float values[Rule::states][kBlock];
  uint32_t largest[Rule::states];  // bits of the largest magnitudes
  uint8_t* codes[Rule::states];
  float* absmax[Rule::states];
};

template <class Rule>
void encode_block(const Updated<Rule>& block) {
  for (int s = 0; s < Rule::states; ++s) {
    if (Rule::is_signed(s))
      quantize_block<true>(block.values[s], block.largest[s], block.codes[s], block.absmax[s]);
    else
      quantize_block<false>(block.values[s], block.largest[s], block.codes[s], block.absmax[s]);
  }
}

// Elements with a zero gradient get their old parameter and states back.
template <class Rule>
BNB_FSDP_HD void keep_zeros(Lane g, Lane old_parameter, const Lane (&old)[Rule::states], Lane& parameter,
                            Lane (&state)[Rule::states]) {
  const auto zero = is_zero(g);
  parameter = select(zero, old_parameter, parameter);
  for (int s = 0; s < Rule::states; ++s) state[s] = select(zero, old[s], state[s]);
}

// Updates states and parameters of one block; `block` says where the states are, and takes their new values.
template <class Rule, class P, bool SkipZeros>
void update_block(const typename Rule::Scalars& k, const float* g, typename Memory<P>::type* p,
                  Updated<Rule>& block) {
  constexpr int lanes = kGroup / Lane::width;
  Bits largest_bits[Rule::states];
  Lane scale[Rule::states];
  const Codebook* books[Rule::states];
  for (int s = 0; s < Rule::states; ++s) {
    books[s] = &codebook(Rule::is_signed(s));
    largest_bits[s] = no_bits();
    scale[s] = Lane(*block.absmax[s]);
  }
  for (int i = 0; i < kBlock; i += kGroup) {
    Lane states[Rule::states][lanes];
    for (int s = 0; s < Rule::states; ++s) {
      prefetch(block.codes[s], i);
      if (Rule::is_signed(s))
        decode_group<true>(*books[s], block.codes[s] + i, scale[s], states[s]);
      else
        decode_group<false>(*books[s], block.codes[s] + i, scale[s], states[s]);
    }
    for (int lane = 0; lane < lanes; ++lane) {
      const int at = i + lane * Lane::width;
      prefetch(p, at);
      prefetch(g, at);
      Lane state[Rule::states], old[Rule::states];
      for (int s = 0; s < Rule::states; ++s) state[s] = old[s] = states[s][lane];
      const Lane gradient = Memory<Float32>::load(g + at), old_parameter = Memory<P>::load(p + at);
      Lane parameter = old_parameter;
      Rule::template update8<P>(k, gradient, parameter, state);
      if (SkipZeros) keep_zeros<Rule>(gradient, old_parameter, old, parameter, state);
      Memory<P>::store(p + at, parameter);
      for (int s = 0; s < Rule::states; ++s) {
        Memory<Float32>::store(block.values[s] + at, state[s]);
        largest_bits[s] = Rule::is_signed(s) ? max_magnitude<true>(largest_bits[s], state[s])
                                             : max_magnitude<false>(largest_bits[s], state[s]);
      }
    }
  }
  for (int s = 0; s < Rule::states; ++s) block.largest[s] = largest(largest_bits[s]);
}

// The last, partial block goes through padded copies. Upstream's padding lanes hold code 128 (signed) or 0 and
// take part in the block's maximum, so these do.
template <class Rule, class P, bool SkipZeros>
void tail8(const typename Rule::Scalars& k, const void* gradient, int64_t begin, int n, int gradient_dtype,
           typename Memory<P>::type* p, Updated<Rule>& block) {
  alignas(64) unsigned char g_raw[4 * kBlock];
  alignas(64) float buffer[kBlock];
  alignas(64) typename Memory<P>::type p_copy[kBlock] = {};
  alignas(64) uint8_t code_copies[Rule::states][kBlock];
  uint8_t* codes[Rule::states];
  const float* g = tail_gradients(gradient, begin, n, gradient_dtype, g_raw, buffer);
  memcpy(p_copy, p, n * sizeof *p);
  for (int s = 0; s < Rule::states; ++s) {
    memset(code_copies[s], Rule::is_signed(s) ? 128 : 0, kBlock);
    memcpy(code_copies[s], block.codes[s], n);
    codes[s] = block.codes[s];
    block.codes[s] = code_copies[s];
  }
  update_block<Rule, P, SkipZeros>(k, g, p_copy, block);
  encode_block(block);
  memcpy(p, p_copy, n * sizeof *p);
  for (int s = 0; s < Rule::states; ++s) memcpy(codes[s], code_copies[s], n);
}

template <class Rule, class P, bool SkipZeros>
void blocks8(const Range& range, int gradient_dtype) {
  typename Rule::Scalars k;
  memcpy(&k, range.scalars->bytes, sizeof k);
  const bnb_fsdp_tensor& t = *range.tensor;
  Updated<Rule> block;
  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    auto* p = static_cast<typename Memory<P>::type*>(t.parameter) + begin;
    for (int s = 0; s < Rule::states; ++s) {
      block.codes[s] = static_cast<uint8_t*>(t.state[s]) + begin;
      block.absmax[s] = t.absmax[s] + begin / kBlock;
    }
    if (range.end - begin < kBlock) {
      const int n = static_cast<int>(range.end - begin);
      tail8<Rule, P, SkipZeros>(k, range.gradient, begin, n, gradient_dtype, p, block);
      break;
    }
    alignas(64) float buffer[kBlock];
    const float* g = gradients(range.gradient, begin, gradient_dtype, buffer);
    update_block<Rule, P, SkipZeros>(k, g, p, block);
    encode_block(block);
  }
}

template <class Rule, class P>
void run8(const Range& range, int gradient_dtype) {
  if (Rule::skips_zeros(8) && range.scalars->skip_zeros)
    blocks8<Rule, P, Rule::skips_zeros(8)>(range, gradient_dtype);
  else
    blocks8<Rule, P, false>(range, gradient_dtype);
}

template <class Rule, class P, bool SkipZeros>
void block32(const typename Rule::Scalars& k, const float* g, typename Memory<P>::type* p,
             float* const (&values)[Rule::states]) {
  for (int i = 0; i < kBlock; i += Lane::width) {
    Lane state[Rule::states], old[Rule::states];
    for (int s = 0; s < Rule::states; ++s) state[s] = old[s] = Memory<Float32>::load(values[s] + i);
    const Lane old_parameter = Memory<P>::load(p + i);
    Lane parameter = old_parameter;
    const Lane gradient =
        Rule::template gradient32<P>(k, every_fourth(i), Memory<Float32>::load(g + i), parameter);
    Rule::template update32<P>(k, gradient, parameter, state);
    if (SkipZeros) keep_zeros<Rule>(gradient, old_parameter, old, parameter, state);
    Memory<P>::store(p + i, parameter);
    for (int s = 0; s < Rule::states; ++s) Memory<Float32>::store(values[s] + i, state[s]);
  }
}

template <class Rule, class P, bool SkipZeros>
void blocks32(const Range& range, int gradient_dtype) {
  typename Rule::Scalars k;
  memcpy(&k, range.scalars->bytes, sizeof k);
  const bnb_fsdp_tensor& t = *range.tensor;
  alignas(64) float buffer[kBlock];
  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    auto* p = static_cast<typename Memory<P>::type*>(t.parameter) + begin;
    float* values[Rule::states];
    for (int s = 0; s < Rule::states; ++s) values[s] = static_cast<float*>(t.state[s]) + begin;
    if (range.end - begin >= kBlock) {
      block32<Rule, P, SkipZeros>(k, gradients(range.gradient, begin, gradient_dtype, buffer), p, values);
      continue;
    }
    const size_t n = static_cast<size_t>(range.end - begin);
    alignas(64) unsigned char g_raw[4 * kBlock];
    alignas(64) float state_copies[Rule::states][kBlock] = {};
    alignas(64) typename Memory<P>::type p_copy[kBlock] = {};
    float* copies[Rule::states];
    const float* g = tail_gradients(range.gradient, begin, n, gradient_dtype, g_raw, buffer);
    memcpy(p_copy, p, n * sizeof *p);
    for (int s = 0; s < Rule::states; ++s) {
      copies[s] = state_copies[s];
      memcpy(copies[s], values[s], n * sizeof(float));
    }
    block32<Rule, P, SkipZeros>(k, g, p_copy, copies);
    memcpy(p, p_copy, n * sizeof *p);
    for (int s = 0; s < Rule::states; ++s) memcpy(values[s], copies[s], n * sizeof(float));
  }
}

template <class Rule, class P>
void run32(const Range& range, int gradient_dtype) {
  if (Rule::skips_zeros(32) && range.scalars->skip_zeros)
    blocks32<Rule, P, Rule::skips_zeros(32)>(range, gradient_dtype);
  else
    blocks32<Rule, P, false>(range, gradient_dtype);
}

// Sums of squares, with a running sum in each lane for a block's elements and double precision beyond.
struct Squares {
  Lane direction{0.0f}, parameter{0.0f};

  void add(Lane u, Lane p) {
    direction = fma(u, u, direction);
    parameter = fma(p, p, parameter);
  }
  void add_to(double (&sums)[2]) const {
    alignas(64) float parts[2][Lane::width];
    Memory<Float32>::store(parts[0], direction);
    Memory<Float32>::store(parts[1], parameter);
    for (int which = 0; which < 2; ++which)
      for (float part : parts[which]) sums[which] += static_cast<double>(part);
  }
};

// A block's states as float32. n < kBlock: the rest is 0.
template <class Rule, int StateBits>
void widen_states(const bnb_fsdp_tensor& t, int64_t begin, int n, float (&values)[Rule::states][kBlock]) {
  constexpr int lanes = kGroup / Lane::width;
  for (int s = 0; s < Rule::states; ++s) {
    if (StateBits == 32) {
      memcpy(values[s], static_cast<const float*>(t.state[s]) + begin, static_cast<size_t>(n) * sizeof(float));
    } else {
      alignas(64) uint8_t codes[kBlock] = {};
      memcpy(codes, static_cast<const uint8_t*>(t.state[s]) + begin, static_cast<size_t>(n));
      const Lane scale(t.absmax[s][begin / kBlock]);
      for (int i = 0; i < kBlock; i += kGroup) {
        Lane states[lanes];
        if (Rule::is_signed(s))
          decode_group<true>(codebook(true), codes + i, scale, states);
        else
          decode_group<false>(codebook(false), codes + i, scale, states);
        for (int lane = 0; lane < lanes; ++lane)
          Memory<Float32>::store(values[s] + i + lane * Lane::width, states[lane]);
      }
    }
    for (int i = n; i < kBlock; ++i) values[s][i] = 0.0f;
  }
}

template <class Rule, class P, int StateBits>
void norms(const Range& range, int gradient_dtype, double (&sums)[2]) {
  typename Rule::Scalars k;
  memcpy(&k, range.scalars->bytes, sizeof k);
  const bnb_fsdp_tensor& t = *range.tensor;
  for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
    const int n = static_cast<int>(range.end - begin < kBlock ? range.end - begin : kBlock);
    alignas(64) float buffer[kBlock];
    alignas(64) float values[Rule::states][kBlock];
    alignas(64) float u[kBlock];
    alignas(64) unsigned char g_raw[4 * kBlock];
    alignas(64) typename Memory<P>::type p_copy[kBlock] = {};
    const auto* p = static_cast<const typename Memory<P>::type*>(t.parameter) + begin;
    const float* g;
    if (n == kBlock) {
      g = gradients(range.gradient, begin, gradient_dtype, buffer);
    } else {
      g = tail_gradients(range.gradient, begin, static_cast<size_t>(n), gradient_dtype, g_raw, buffer);
      memcpy(p_copy, p, static_cast<size_t>(n) * sizeof *p);
      p = p_copy;
    }
    widen_states<Rule, StateBits>(t, begin, n, values);
    Squares squares;
    for (int i = 0; i < kBlock; i += Lane::width) {
      Lane state[Rule::states];
      for (int s = 0; s < Rule::states; ++s) state[s] = Memory<Float32>::load(values[s] + i);
      const Lane gradient = Memory<Float32>::load(g + i), parameter = Memory<P>::load(p + i);
      Lane direction = StateBits == 8 ? Rule::template direction8<P>(k, gradient, parameter, state)
                                      : Rule::direction32(k, gradient, parameter, state);
      if (i + Lane::width > n) {  // what fills the block up does not count, not even as 0 / 0
        Memory<Float32>::store(u, direction);
        for (int lane = 0; lane < Lane::width; ++lane)
          if (i + lane >= n) u[lane] = 0.0f;
        direction = Memory<Float32>::load(u);
      }
      squares.add(direction, parameter);
    }
    squares.add_to(sums);
  }
}

template <class Rule>
void scalars(const bnb_fsdp_hyper& hyper, float step, float scale, ScalarBlock& out) {
  static_assert(sizeof(typename Rule::Scalars) <= sizeof(ScalarBlock::bytes),
                "ScalarBlock is too small for this rule");
  const typename Rule::Scalars k = Rule::template scalars<HostMath>(hyper, step, scale);
  memcpy(out.bytes, &k, sizeof k);
  out.skip_zeros = (hyper.flags & BNB_FSDP_SKIP_ZEROS) != 0;
}

template <class Rule, class P>
Kernel kernel(int bits) {
  return {Rule::states, scalars<Rule>, bits == 8 ? run8<Rule, P> : run32<Rule, P>, nullptr};
}

template <class Rule>
Kernel kernel(int bits, int parameter_dtype) {
  switch (parameter_dtype) {
    case BNB_FSDP_FLOAT32: return kernel<Rule, Float32>(bits);
    case BNB_FSDP_BFLOAT16: return kernel<Rule, BFloat16>(bits);
    case BNB_FSDP_FLOAT16: return kernel<Rule, Float16>(bits);
    default: return {0, nullptr, nullptr, nullptr};
  }
}

template <class Rule>
Kernel kernel_with_norms(int bits, int parameter_dtype) {
  Kernel result = kernel<Rule>(bits, parameter_dtype);
  switch (parameter_dtype) {
    case BNB_FSDP_FLOAT32: result.norms = bits == 8 ? norms<Rule, Float32, 8> : norms<Rule, Float32, 32>; break;
    case BNB_FSDP_BFLOAT16:
      result.norms = bits == 8 ? norms<Rule, BFloat16, 8> : norms<Rule, BFloat16, 32>;
      break;
    case BNB_FSDP_FLOAT16: result.norms = bits == 8 ? norms<Rule, Float16, 8> : norms<Rule, Float16, 32>; break;
    default: break;
  }
  return result;
}

Kernel find(const char* rule, int bits, int parameter_dtype) {
  if (strcmp(rule, "adam") == 0) return kernel_with_norms<Adam>(bits, parameter_dtype);
  if (strcmp(rule, "ademamix") == 0) return kernel<AdEMAMix>(bits, parameter_dtype);
  if (strcmp(rule, "lion") == 0) return kernel<Lion>(bits, parameter_dtype);
  if (strcmp(rule, "momentum") == 0) return kernel_with_norms<Momentum>(bits, parameter_dtype);
  if (strcmp(rule, "rmsprop") == 0) return kernel<RMSprop>(bits, parameter_dtype);
  if (strcmp(rule, "adagrad") == 0) return kernel<Adagrad>(bits, parameter_dtype);
  return {0, nullptr, nullptr, nullptr};
}

bool supported() {
#if defined(BNB_FSDP_LANES_AVX512)
#if defined(BNB_FSDP_VBMI)
  if (!__builtin_cpu_supports("avx512vbmi")) return false;
#endif
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(BNB_FSDP_LANES_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

}  // namespace
}  // namespace BNB_FSDP_ISA

extern const InstructionSet BNB_FSDP_JOIN(BNB_FSDP_ISA, _set) = {BNB_FSDP_QUOTE(BNB_FSDP_ISA),
                                                                 BNB_FSDP_ISA::supported, BNB_FSDP_ISA::find};

}  // namespace bnb_fsdp
