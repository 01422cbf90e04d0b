// Eight lanes: AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

#include "../quantize/codebook.h"
#include "half.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lane {
  static constexpr int width = 8;
  __m256 v;
  Lane() = default;
  BNB_FSDP_HD explicit Lane(__m256 x) : v(x) {}
  BNB_FSDP_HD explicit Lane(float x) : v(_mm256_set1_ps(x)) {}
};
// Elements that are decoded, updated and encoded together.
constexpr int kGroup = 8;
using Bits = __m256i;

BNB_FSDP_HD __m256i magnitude_bits(__m256 v) {
  return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}

BNB_FSDP_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(_mm256_fmadd_ps(a.v, b.v, c.v)); }
BNB_FSDP_HD Lane mul(Lane a, Lane b) { return Lane(_mm256_mul_ps(a.v, b.v)); }
BNB_FSDP_HD Lane add(Lane a, Lane b) { return Lane(_mm256_add_ps(a.v, b.v)); }
BNB_FSDP_HD Lane sub(Lane a, Lane b) { return Lane(_mm256_sub_ps(a.v, b.v)); }
BNB_FSDP_HD Lane neg(Lane a) { return Lane(_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))); }
BNB_FSDP_HD Lane rcp(Lane a) { return Lane(_mm256_div_ps(_mm256_set1_ps(1.0f), a.v)); }
BNB_FSDP_HD Lane sqrt(Lane a) { return Lane(_mm256_sqrt_ps(a.v)); }
BNB_FSDP_HD Lane flush(Lane a) {
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000), magnitude_bits(a.v));
  return Lane(_mm256_blendv_ps(a.v, _mm256_and_ps(a.v, _mm256_set1_ps(-0.0f)), _mm256_castsi256_ps(small)));
}
BNB_FSDP_HD __m256 is_finite(Lane a) {
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), magnitude_bits(a.v)));
}
// Subnormal numbers count as zero.
BNB_FSDP_HD __m256 is_zero(Lane a) { return _mm256_cmp_ps(a.v, _mm256_setzero_ps(), _CMP_EQ_OQ); }
// Lanes whose element's index is a multiple of 4; element `index`, a multiple of the width, is in lane 0.
BNB_FSDP_HD __m256 every_fourth(int) {
  return _mm256_castsi256_ps(_mm256_setr_epi32(-1, 0, 0, 0, -1, 0, 0, 0));
}
BNB_FSDP_HD Lane select(__m256 m, Lane a, Lane b) { return Lane(_mm256_blendv_ps(b.v, a.v, m)); }
BNB_FSDP_HD Lane signed_by(Lane magnitude, Lane x) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 negative = _mm256_sub_ps(zero, magnitude.v);
  const __m256 up = _mm256_and_ps(_mm256_cmp_ps(x.v, zero, _CMP_GT_OQ), magnitude.v);
  return Lane(_mm256_blendv_ps(up, negative, _mm256_cmp_ps(x.v, zero, _CMP_LT_OQ)));
}

// Bits of the nearest bfloat16 in the upper halves, the lower halves zero.
BNB_FSDP_HD __m256i bfloat16_bits(__m256 v) {
  const __m256i b = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  r = _mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), nan);
}

BNB_FSDP_HD Lane round_to(Float32, Lane a) { return a; }
BNB_FSDP_HD Lane round_to(BFloat16, Lane a) { return Lane(_mm256_castsi256_ps(bfloat16_bits(a.v))); }
BNB_FSDP_HD Lane round_to(Float16, Lane a) {
  return Lane(_mm256_cvtph_ps(_mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
}

// Elements of a dtype in memory. What is stored has been rounded to the dtype before.
template <class P>
struct Memory;
template <>
struct Memory<Float32> {
  using type = float;
  static BNB_FSDP_HD Lane load(const float* p) { return Lane(_mm256_loadu_ps(p)); }
  static BNB_FSDP_HD void store(float* p, Lane a) { _mm256_storeu_ps(p, a.v); }
};
template <>
struct Memory<BFloat16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return Lane(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) {
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(a.v), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }
};
template <>
struct Memory<Float16> {
  using type = uint16_t;
  static BNB_FSDP_HD Lane load(const uint16_t* p) {
    return Lane(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static BNB_FSDP_HD void store(uint16_t* p, Lane a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

BNB_FSDP_HD Bits no_bits() { return _mm256_setzero_si256(); }
// As unsigned integers, so that a NaN of either sign counts as larger than everything.
template <bool Signed>
BNB_FSDP_HD Bits max_magnitude(Bits m, Lane a) {
  return _mm256_max_epu32(m, Signed ? magnitude_bits(a.v) : _mm256_castps_si256(a.v));
}
BNB_FSDP_HD uint32_t largest(Bits m) {
  __m128i x = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
  x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
}

// One group of codes, times their scale.
template <bool Signed>
BNB_FSDP_HD void decode_group(const Codebook& book, const uint8_t* codes, Lane scale, Lane (&out)[1]) {
  const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  out[0] = Lane(_mm256_mul_ps(_mm256_i32gather_ps(book.values, index, 4), scale.v));
}

// Codes of one group of finite values, inverse = 1 / absmax, 0 for the largest; see codebook.h for the tables.
template <bool Signed>
BNB_FSDP_HD void encode_group(const Codebook& book, const float* values, Lane inverse, uint8_t* codes) {
  const int* buckets = reinterpret_cast<const int*>(book.buckets) - (kLowBits >> 16);
  const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(values), inverse.v);
  __m256i b = Signed ? magnitude_bits(x) : _mm256_castps_si256(x);
  b = _mm256_min_epi32(_mm256_max_epi32(b, _mm256_set1_epi32(kLowBits)), _mm256_set1_epi32(kHighBits));
  const __m256i entry = _mm256_i32gather_epi32(buckets, _mm256_srli_epi32(b, 16), 4);
  __m256i code = _mm256_srli_epi32(_mm256_add_epi32(entry, b), 16);
  if (Signed) {
    const __m256i top = _mm256_set1_epi32(254);
    __m256i mirrored = _mm256_sub_epi32(top, _mm256_min_epi32(code, top));
    mirrored = _mm256_min_epi32(mirrored, _mm256_set1_epi32(126));
    code = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(code), _mm256_castsi256_ps(mirrored), x));
  }
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(codes), _mm_packus_epi16(words, words));
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
