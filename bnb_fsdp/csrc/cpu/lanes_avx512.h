// Sixteen lanes: AVX-512 F, BW, DQ and VL.
#pragma once
#include <immintrin.h>

#include "../quantize/codebook.h"
#include "half.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lane {
  static constexpr int width = 16;
  __m512 v;
  Lane() = default;
  BNB_FSDP_HD explicit Lane(__m512 x) : v(x) {}
  BNB_FSDP_HD explicit Lane(float x) : v(_mm512_set1_ps(x)) {}
};
using Bits = __m512i;

BNB_FSDP_HD __m512i magnitude_bits(__m512 v) {
  return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}

BNB_FSDP_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(_mm512_fmadd_ps(a.v, b.v, c.v)); }
BNB_FSDP_HD Lane mul(Lane a, Lane b) { return Lane(_mm512_mul_ps(a.v, b.v)); }
BNB_FSDP_HD Lane sub(Lane a, Lane b) { return Lane(_mm512_sub_ps(a.v, b.v)); }
BNB_FSDP_HD Lane rcp(Lane a) { return Lane(_mm512_div_ps(_mm512_set1_ps(1.0f), a.v)); }
BNB_FSDP_HD Lane sqrt(Lane a) { return Lane(_mm512_sqrt_ps(a.v)); }
BNB_FSDP_HD __mmask16 is_finite(Lane a) {
  return _mm512_cmplt_epi32_mask(magnitude_bits(a.v), _mm512_set1_epi32(0x7f800000));
}
BNB_FSDP_HD Lane select(__mmask16 m, Lane a, Lane b) { return Lane(_mm512_mask_blend_ps(m, b.v, a.v)); }
BNB_FSDP_HD Lane signed_by(Lane magnitude, Lane x) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 up = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, zero, _CMP_GT_OQ), magnitude.v);
  return Lane(_mm512_mask_sub_ps(up, _mm512_cmp_ps_mask(x.v, zero, _CMP_LT_OQ), zero, magnitude.v));
}

// Bits of the nearest bfloat16 in the upper halves, the lower halves zero.
BNB_FSDP_HD __m512i bfloat16_bits(__m512 v) {
  const __m512i b = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  r = _mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}

BNB_FSDP_HD Lane round_to(Float32, Lane a) { return a; }
BNB_FSDP_HD Lane round_to(BFloat16, Lane a) { return Lane(_mm512_castsi512_ps(bfloat16_bits(a.v))); }
BNB_FSDP_HD Lane round_to(Float16, Lane a) {
  return Lane(_mm512_cvtph_ps(_mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
}

template <class P>
struct Memory;
template <>
struct Memory<Float32> {
  using type = float;
  static BNB_FSDP_HD Lane load(const float* p) { return Lane(_mm512_loadu_ps(p)); }
  static BNB_FSDP_HD void store(float* p, Lane a) { _mm512_storeu_ps(p, a.v); }
};
template <>
struct Memory<BFloat16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return Lane(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) {
    const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bfloat16_bits(a.v), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
  }
};
template <>
struct Memory<Float16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    return Lane(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

BNB_FSDP_HD Lane lookup(const float* values, const uint8_t* codes) {
  const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return Lane(_mm512_i32gather_ps(index, values, 4));
}

BNB_FSDP_HD Bits no_bits() { return _mm512_setzero_si512(); }
BNB_FSDP_HD Bits max_magnitude(Bits m, Lane a) { return _mm512_max_epi32(m, magnitude_bits(a.v)); }
BNB_FSDP_HD int32_t largest(Bits m) { return _mm512_reduce_max_epi32(m); }

// Codes of finite values x scaled to [-1, 1]; buckets as in codebook.h, moved so that they are indexed by bits >> 16.
template <bool Signed>
BNB_FSDP_HD void store_codes(uint8_t* codes, const uint32_t* buckets, Lane x) {
  __m512i b = Signed ? magnitude_bits(x.v) : _mm512_castps_si512(x.v);
  b = _mm512_min_epi32(_mm512_max_epi32(b, _mm512_set1_epi32(kLowBits)), _mm512_set1_epi32(kHighBits));
  const __m512i entry = _mm512_i32gather_epi32(_mm512_srli_epi32(b, 16), buckets, 4);
  __m512i code = _mm512_srli_epi32(_mm512_add_epi32(entry, b), 16);
  if (Signed) {
    const __m512i top = _mm512_set1_epi32(254);
    const __m512i mirrored = _mm512_sub_epi32(top, _mm512_min_epi32(code, top));
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x.v));
    code = _mm512_mask_min_epi32(code, negative, mirrored, _mm512_set1_epi32(126));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(code));
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
