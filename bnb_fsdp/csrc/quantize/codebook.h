// The dynamic maps and the tables that find the nearest code of a value in O(1). Built once, on the host.
//
// The map: Dettmers et al., https://arxiv.org/abs/2110.02861, section 2; bit-equal to bitsandbytes'.
// code(x) is the index of the nearest value, exact ties to the even index. With t_k the float32 midpoint of
// values k and k+1 that is: number of even k with x > t_k plus number of odd k with x >= t_k.
#pragma once
#include <stdint.h>

namespace bnb_fsdp {

constexpr int kBlock = 256;

// Values are looked up by the upper 16 bits of |x|; below kLowBits lies code zero, above kHighBits (1.0) code
// 255.
constexpr uint32_t kLowBits = 0x34000000u;   // 2^-23, less than half of the smallest value
constexpr uint32_t kHighBits = 0x3f800000u;  // 1.0
constexpr int kBuckets = static_cast<int>((kHighBits >> 16) - (kLowBits >> 16)) + 1;

struct Codebook {
  float values[256];
  int first;  // code of zero: 127 (signed) or 0
  // (buckets[(b >> 16) - (kLowBits >> 16)] + b) >> 16 is the code of a value with bits b: a bucket holds one
  // bound at most, so adding the low bits carries into the code exactly when the bound is reached.
  uint32_t buckets[kBuckets];

  // The same by arithmetic, for instruction sets with small in-register tables. Within a decade the bounds are
  // evenly spaced: slope * x + offset, rounded to a fixed-point number in the mantissa of a float32, has the
  // code as its integer part unless its fraction is zero, when rounding may have crossed a bound. It is limited
  // to `top`, as the first tenth of a decade belongs to the one below. Indexed by decade: 1 to 7 for 1e-6 to 1,
  // 0 for code zero and 8 for code 255.
  alignas(64) float slope[16], offset[16];
  alignas(64) int32_t top[16];
  // Indexed by the low five bits of the value's exponent: the decade at the start of the binade, and the bound
  // (bits) within it at which the next decade begins (the largest integer if none).
  alignas(64) int32_t binade_decade[32], binade_bound[32];

  // values[] as four planes of bytes, for byte permutations: planes[b][i] is byte b of values[i].
  alignas(64) uint8_t planes[4][256];
};

constexpr int kFractionBits = 12;
constexpr int32_t kFractionMask = (1 << kFractionBits) - 1;

// Both maps, built on first use.
const Codebook& codebook(bool is_signed);

// The general rule for one state, any value and scale included: see codebook.py, `quantize`.
uint8_t quantize_one(const Codebook& book, bool is_signed, float state, float inverse_absmax);

}  // namespace bnb_fsdp
