// Four lanes: AArch64 Advanced SIMD. Table look-ups are scalar, as the instruction set has no gather.
#pragma once
#include <arm_neon.h>

#include "../quantize/codebook.h"
#include "half.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lane {
  static constexpr int width = 4;
  float32x4_t v;
  Lane() = default;
  BNB_FSDP_HD explicit Lane(float32x4_t x) : v(x) {}
  BNB_FSDP_HD explicit Lane(float x) : v(vdupq_n_f32(x)) {}
};
// Elements that are decoded, updated and encoded together.
constexpr int kGroup = 4;
using Bits = uint32x4_t;

BNB_FSDP_HD int32x4_t magnitude_bits(float32x4_t v) {
  return vandq_s32(vreinterpretq_s32_f32(v), vdupq_n_s32(0x7fffffff));
}

BNB_FSDP_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(vfmaq_f32(c.v, a.v, b.v)); }
BNB_FSDP_HD Lane mul(Lane a, Lane b) { return Lane(vmulq_f32(a.v, b.v)); }
BNB_FSDP_HD Lane add(Lane a, Lane b) { return Lane(vaddq_f32(a.v, b.v)); }
BNB_FSDP_HD Lane sub(Lane a, Lane b) { return Lane(vsubq_f32(a.v, b.v)); }
BNB_FSDP_HD Lane neg(Lane a) { return Lane(vnegq_f32(a.v)); }
BNB_FSDP_HD Lane rcp(Lane a) { return Lane(vdivq_f32(vdupq_n_f32(1.0f), a.v)); }
BNB_FSDP_HD Lane sqrt(Lane a) { return Lane(vsqrtq_f32(a.v)); }
BNB_FSDP_HD Lane flush(Lane a) {
  const uint32x4_t small = vcltq_s32(magnitude_bits(a.v), vdupq_n_s32(0x00800000));
  const uint32x4_t sign = vandq_u32(vreinterpretq_u32_f32(a.v), vdupq_n_u32(0x80000000u));
  return Lane(vbslq_f32(small, vreinterpretq_f32_u32(sign), a.v));
}
BNB_FSDP_HD uint32x4_t is_finite(Lane a) { return vcltq_s32(magnitude_bits(a.v), vdupq_n_s32(0x7f800000)); }
// Subnormal numbers count as zero.
BNB_FSDP_HD uint32x4_t is_zero(Lane a) { return vceqq_f32(a.v, vdupq_n_f32(0.0f)); }
// Lanes whose element's index is a multiple of 4; element `index`, a multiple of the width, is in lane 0.
BNB_FSDP_HD uint32x4_t every_fourth(int) { return vsetq_lane_u32(0xffffffffu, vdupq_n_u32(0), 0); }
BNB_FSDP_HD Lane select(uint32x4_t m, Lane a, Lane b) { return Lane(vbslq_f32(m, a.v, b.v)); }
BNB_FSDP_HD Lane signed_by(Lane magnitude, Lane x) {
  const float32x4_t zero = vdupq_n_f32(0.0f);
  const float32x4_t down = vbslq_f32(vcltq_f32(x.v, zero), vsubq_f32(zero, magnitude.v), zero);
  return Lane(vbslq_f32(vcgtq_f32(x.v, zero), magnitude.v, down));
}

// Bits of the nearest bfloat16 in the upper halves, the lower halves zero.
BNB_FSDP_HD uint32x4_t bfloat16_bits(float32x4_t v) {
  const uint32x4_t b = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
  uint32x4_t r = vaddq_u32(b, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  r = vandq_u32(r, vdupq_n_u32(0xffff0000u));
  return vbslq_u32(vceqq_f32(v, v), r, vdupq_n_u32(0x7fc00000));
}

BNB_FSDP_HD Lane round_to(Float32, Lane a) { return a; }
BNB_FSDP_HD Lane round_to(BFloat16, Lane a) { return Lane(vreinterpretq_f32_u32(bfloat16_bits(a.v))); }
BNB_FSDP_HD Lane round_to(Float16, Lane a) { return Lane(vcvt_f32_f16(vcvt_f16_f32(a.v))); }

// Elements of a dtype in memory. What is stored has been rounded to the dtype before.
template <class P>
struct Memory;
template <>
struct Memory<Float32> {
  using type = float;
  static BNB_FSDP_HD Lane load(const float* p) { return Lane(vld1q_f32(p)); }
  static BNB_FSDP_HD void store(float* p, Lane a) { vst1q_f32(p, a.v); }
};
template <>
struct Memory<BFloat16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    return Lane(vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16)));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) {
    vst1_u16(p, vshrn_n_u32(vreinterpretq_u32_f32(a.v), 16));
  }
};
template <>
struct Memory<Float16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    return Lane(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }
};

BNB_FSDP_HD Bits no_bits() { return vdupq_n_u32(0); }
// As unsigned integers, so that a NaN of either sign counts as larger than everything.
template <bool Signed>
BNB_FSDP_HD Bits max_magnitude(Bits m, Lane a) {
  return vmaxq_u32(m, Signed ? vreinterpretq_u32_s32(magnitude_bits(a.v)) : vreinterpretq_u32_f32(a.v));
}
BNB_FSDP_HD uint32_t largest(Bits m) { return vmaxvq_u32(m); }

// One group of codes, times their scale.
template <bool Signed>
BNB_FSDP_HD void decode_group(const Codebook& book, const uint8_t* codes, Lane scale, Lane (&out)[1]) {
  const float x[4] = {book.values[codes[0]], book.values[codes[1]], book.values[codes[2]],
                      book.values[codes[3]]};
  out[0] = Lane(vmulq_f32(vld1q_f32(x), scale.v));
}

// Codes of one group of finite values, inverse = 1 / absmax, 0 for the largest; see codebook.h for the tables.
template <bool Signed>
BNB_FSDP_HD void encode_group(const Codebook& book, const float* values, Lane inverse, uint8_t* codes) {
  const uint32_t* buckets = book.buckets - (kLowBits >> 16);
  const float32x4_t x = vmulq_f32(vld1q_f32(values), inverse.v);
  int32x4_t b = Signed ? magnitude_bits(x) : vreinterpretq_s32_f32(x);
  b = vminq_s32(vmaxq_s32(b, vdupq_n_s32(kLowBits)), vdupq_n_s32(kHighBits));
  uint32_t code[4];
  vst1q_u32(code, vreinterpretq_u32_s32(b));
  for (int lane = 0; lane < 4; ++lane) code[lane] = (buckets[code[lane] >> 16] + code[lane]) >> 16;
  if (Signed) {
    const uint32x4_t c = vld1q_u32(code), top = vdupq_n_u32(254);
    const uint32x4_t mirrored = vminq_u32(vsubq_u32(top, vminq_u32(c, top)), vdupq_n_u32(126));
    vst1q_u32(code, vbslq_u32(vcltq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(0)), mirrored, c));
  }
  for (int lane = 0; lane < 4; ++lane) codes[lane] = static_cast<uint8_t>(code[lane]);
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
