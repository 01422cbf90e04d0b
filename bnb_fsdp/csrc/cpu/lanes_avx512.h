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
// Elements that are decoded, updated and encoded together.
constexpr int kGroup = 64;
using Bits = __m512i;

BNB_FSDP_HD __m512i magnitude_bits(__m512 v) {
  return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}

BNB_FSDP_HD Lane fma(Lane a, Lane b, Lane c) { return Lane(_mm512_fmadd_ps(a.v, b.v, c.v)); }
BNB_FSDP_HD Lane mul(Lane a, Lane b) { return Lane(_mm512_mul_ps(a.v, b.v)); }
BNB_FSDP_HD Lane add(Lane a, Lane b) { return Lane(_mm512_add_ps(a.v, b.v)); }
BNB_FSDP_HD Lane sub(Lane a, Lane b) { return Lane(_mm512_sub_ps(a.v, b.v)); }
BNB_FSDP_HD Lane neg(Lane a) { return Lane(_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))); }
BNB_FSDP_HD Lane rcp(Lane a) { return Lane(_mm512_div_ps(_mm512_set1_ps(1.0f), a.v)); }
BNB_FSDP_HD Lane sqrt(Lane a) { return Lane(_mm512_sqrt_ps(a.v)); }
BNB_FSDP_HD Lane flush(Lane a) {
  const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude_bits(a.v), _mm512_set1_epi32(0x00800000));
  return Lane(_mm512_mask_and_ps(a.v, small, a.v, _mm512_set1_ps(-0.0f)));
}
BNB_FSDP_HD __mmask16 is_finite(Lane a) {
  return _knot_mask16(_mm512_fpclass_ps_mask(a.v, 0x99));  // quiet NaN, infinities, signalling NaN
}
// Subnormal numbers count as zero.
BNB_FSDP_HD __mmask16 is_zero(Lane a) { return _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_EQ_OQ); }
// Lanes whose element's index is a multiple of 4; element `index`, a multiple of the width, is in lane 0.
BNB_FSDP_HD __mmask16 every_fourth(int) { return 0x1111; }
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

// Elements of a dtype in memory. What is stored has been rounded to the dtype before.
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
    const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16));
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

BNB_FSDP_HD Bits no_bits() { return _mm512_setzero_si512(); }
// As unsigned integers, so that a NaN of either sign counts as larger than everything.
template <bool Signed>
BNB_FSDP_HD Bits max_magnitude(Bits m, Lane a) {
  return _mm512_max_epu32(m, Signed ? magnitude_bits(a.v) : _mm512_castps_si512(a.v));
}
BNB_FSDP_HD uint32_t largest(Bits m) { return _mm512_reduce_max_epu32(m); }

// The transpose of 4 x 4 groups of 32 bits: unpacking and packing work within 128-bit lanes.
BNB_FSDP_HD __m512i group_order() {
  return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// One group of codes, times their scale.
template <bool Signed>
BNB_FSDP_HD void decode_group(const Codebook& book, const uint8_t* codes, Lane scale, Lane (&out)[4]) {
#if defined(BNB_FSDP_VBMI)
  // Each byte of the float32 values is looked up for 64 codes at a time, then the bytes are interleaved.
  const __m512i index = _mm512_permutexvar_epi32(group_order(), _mm512_loadu_si512(codes));
  const __mmask64 upper = _mm512_movepi8_mask(index);
  __m512i bytes[4];
  for (int plane = 0; plane < 4; ++plane) {
    const uint8_t* table = book.planes[plane];
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
    const __m512i high =
        _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), index, _mm512_load_si512(table + 192));
    bytes[plane] = _mm512_mask_mov_epi8(low, upper, high);
  }
  const __m512i words[4] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]), _mm512_unpacklo_epi8(bytes[2], bytes[3]),
                            _mm512_unpackhi_epi8(bytes[0], bytes[1]), _mm512_unpackhi_epi8(bytes[2], bytes[3])};
  const __m512i floats[4] = {
      _mm512_unpacklo_epi16(words[0], words[1]), _mm512_unpackhi_epi16(words[0], words[1]),
      _mm512_unpacklo_epi16(words[2], words[3]), _mm512_unpackhi_epi16(words[2], words[3])};
  for (int part = 0; part < 4; ++part)
    out[part] = Lane(_mm512_mul_ps(_mm512_castsi512_ps(floats[part]), scale.v));
#else
  for (int part = 0; part < 4; ++part) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * part));
    const __m512 values = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), book.values, 4);
    out[part] = Lane(_mm512_mul_ps(values, scale.v));
  }
#endif
}

// Codes of 16 magnitudes by the table of buckets, at any distance from a bound.
BNB_FSDP_HD __m512i table_codes(const Codebook& book, __m512i magnitude) {
  const uint32_t* buckets = book.buckets - (kLowBits >> 16);
  const __m512i b = _mm512_min_epi32(magnitude, _mm512_set1_epi32(kHighBits));
  const __m512i entry = _mm512_i32gather_epi32(_mm512_srli_epi32(b, 16), buckets, 4);
  return _mm512_srli_epi32(_mm512_add_epi32(entry, b), 16);
}

// Codes of one group of finite values, inverse = 1 / absmax, 0 for the largest; see codebook.h for the tables.
template <bool Signed>
BNB_FSDP_HD void encode_group(const Codebook& book, const float* values, Lane inverse, uint8_t* codes) {
  const __m512i low = _mm512_set1_epi32(kLowBits), one = _mm512_set1_epi32(1);
  const __m512i fraction = _mm512_set1_epi32(kFractionMask);
  __m512i magnitude[4], part_codes[4];
  __mmask16 negative[4], unsure = 0;
  for (int part = 0; part < 4; ++part) {
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(values + 16 * part), inverse.v);
    if (Signed) negative[part] = _mm512_movepi32_mask(_mm512_castps_si512(x));
    const __m512i b = _mm512_max_epi32(Signed ? magnitude_bits(x) : _mm512_castps_si512(x), low);
    magnitude[part] = b;
    const __m512i exponent = _mm512_srli_epi32(b, 23);
    const __m512i bound = _mm512_permutex2var_epi32(_mm512_load_si512(book.binade_bound), exponent,
                                                    _mm512_load_si512(book.binade_bound + 16));
    const __m512i start = _mm512_permutex2var_epi32(_mm512_load_si512(book.binade_decade), exponent,
                                                    _mm512_load_si512(book.binade_decade + 16));
    const __m512i decade = _mm512_mask_add_epi32(start, _mm512_cmpge_epi32_mask(b, bound), start, one);
    const __m512 position =
        _mm512_fmadd_ps(_mm512_castsi512_ps(b), _mm512_permutexvar_ps(decade, _mm512_load_ps(book.slope)),
                        _mm512_permutexvar_ps(decade, _mm512_load_ps(book.offset)));
    const __m512i fixed = _mm512_min_epi32(_mm512_castps_si512(position),
                                           _mm512_permutexvar_epi32(decade, _mm512_load_si512(book.top)));
    part_codes[part] = _mm512_cvttps_epi32(_mm512_castsi512_ps(fixed));
    unsure |= _mm512_testn_epi32_mask(fixed, fraction);
  }
  if (__builtin_expect(unsure != 0, 0))
    for (int part = 0; part < 4; ++part) part_codes[part] = table_codes(book, magnitude[part]);
  // The packs work within 128-bit lanes; the permutation brings the groups of four codes into order.
  const __m512i byte = _mm512_set1_epi16(255);
  const __m512i packed =
      _mm512_packus_epi16(_mm512_and_si512(_mm512_packus_epi32(part_codes[0], part_codes[1]), byte),
                          _mm512_and_si512(_mm512_packus_epi32(part_codes[2], part_codes[3]), byte));
  __m512i code = _mm512_permutexvar_epi32(group_order(), packed);
  if (Signed) {
    const __m512i mirrored = _mm512_subs_epu8(_mm512_set1_epi8(static_cast<char>(254)), code);
    const __mmask64 all =
        _mm512_kunpackd(_mm512_kunpackw(negative[3], negative[2]), _mm512_kunpackw(negative[1], negative[0]));
    code = _mm512_mask_min_epu8(code, all, mirrored, _mm512_set1_epi8(126));
  }
  _mm512_storeu_si512(codes, code);
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
