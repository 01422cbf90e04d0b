// One lane: plain code for processors without a path of their own. fmaf is exact on any of them.
#pragma once
#include <algorithm>

#include "../quantize/codebook.h"
#include "half.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lane {
  static constexpr int width = 1;
  float v;
  Lane() = default;
  BNB_FSDP_HD explicit Lane(float x) : v(x) {}
};
// Elements that are decoded, updated and encoded together.
constexpr int kGroup = 1;
using Bits = uint32_t;  // one integer a lane

BNB_FSDP_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(fmaf(a.v, b.v, c.v)); }
BNB_FSDP_HD Lane mul(Lane a, Lane b) { return Lane(a.v * b.v); }
BNB_FSDP_HD Lane add(Lane a, Lane b) { return Lane(a.v + b.v); }
BNB_FSDP_HD Lane sub(Lane a, Lane b) { return Lane(a.v - b.v); }
BNB_FSDP_HD Lane neg(Lane a) { return Lane(-a.v); }
BNB_FSDP_HD Lane rcp(Lane a) { return Lane(1.0f / a.v); }
BNB_FSDP_HD Lane sqrt(Lane a) { return Lane(sqrtf(a.v)); }
BNB_FSDP_HD Lane flush(Lane a) {
  return (to_bits(a.v) & 0x7f800000u) == 0 ? Lane(from_bits(to_bits(a.v) & 0x80000000u)) : a;
}
BNB_FSDP_HD bool is_finite(Lane a) { return (to_bits(a.v) & 0x7fffffffu) < 0x7f800000u; }
BNB_FSDP_HD bool is_zero(Lane a) { return a.v == 0.0f; }  // subnormal numbers count as zero
// Lanes whose element's index is a multiple of 4; element `index`, a multiple of the width, is in lane 0.
BNB_FSDP_HD bool every_fourth(int index) { return index % 4 == 0; }
BNB_FSDP_HD Lane select(bool m, Lane a, Lane b) { return m ? a : b; }
BNB_FSDP_HD Lane signed_by(Lane magnitude, Lane x) {
  return Lane(x.v > 0.0f ? magnitude.v : x.v < 0.0f ? -magnitude.v : 0.0f);
}

BNB_FSDP_HD Lane round_to(Float32, Lane a) { return a; }
BNB_FSDP_HD Lane round_to(BFloat16, Lane a) { return Lane(bfloat16_to_float(float_to_bfloat16(a.v))); }
BNB_FSDP_HD Lane round_to(Float16, Lane a) { return Lane(float16_to_float(float_to_float16(a.v))); }

// Elements of a dtype in memory. What is stored has been rounded to the dtype before.
template <class P>
struct Memory;
template <>
struct Memory<Float32> {
  using type = float;
  static BNB_FSDP_HD Lane load(const float* p) { return Lane(*p); }
  static BNB_FSDP_HD void store(float* p, Lane a) { *p = a.v; }
};
template <>
struct Memory<BFloat16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) { return Lane(bfloat16_to_float(*p)); }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) { *p = static_cast<uint16_t>(to_bits(a.v) >> 16); }
};
template <>
struct Memory<Float16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) { return Lane(float16_to_float(*p)); }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) { *p = float_to_float16(a.v); }
};

BNB_FSDP_HD Bits no_bits() { return 0; }
template <bool Signed>
BNB_FSDP_HD Bits max_magnitude(Bits m, Lane a) {
  return std::max(m, Signed ? to_bits(a.v) & 0x7fffffffu : to_bits(a.v));
}
BNB_FSDP_HD uint32_t largest(Bits m) { return m; }

// One group of codes, times their scale.
template <bool Signed>
BNB_FSDP_HD void decode_group(const Codebook& book, const uint8_t* codes, Lane scale, Lane (&out)[1]) {
  out[0] = Lane(book.values[*codes] * scale.v);
}

// Codes of one group of finite values, inverse = 1 / absmax, 0 for the largest; see codebook.h for the tables.
template <bool Signed>
BNB_FSDP_HD void encode_group(const Codebook& book, const float* values, Lane inverse, uint8_t* codes) {
  const uint32_t* buckets = book.buckets - (kLowBits >> 16);
  const int32_t b = static_cast<int32_t>(to_bits(*values * inverse.v));
  int32_t magnitude = Signed ? b & 0x7fffffff : b;
  magnitude = std::min(std::max(magnitude, static_cast<int32_t>(kLowBits)), static_cast<int32_t>(kHighBits));
  uint32_t code = (buckets[magnitude >> 16] + static_cast<uint32_t>(magnitude)) >> 16;
  if (Signed && b < 0) code = std::min(254u - std::min(code, 254u), 126u);
  *codes = static_cast<uint8_t>(code);
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
