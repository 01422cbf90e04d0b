// The dynamic maps and the tables that find the nearest code of a value in O(1). Built once, on the host.
//
// The map: Dettmers et al., https://arxiv.org/abs/2110.02861, section 2; bit-equal to bitsandbytes'.
// code(x) is the index of the nearest value, exact ties to the even index. With t_k the float32 midpoint of
// values k and k+1 that is: number of even k with x > t_k plus number of odd k with x >= t_k.
#pragma once
#include <stdint.h>

namespace bnb_fsdp {

constexpr int kBlock = 256;

// Values are looked up by the upper 16 bits of |x|; below kLowBits lies code zero, above kHighBits (1.0) code 255.
constexpr uint32_t kLowBits = 0x34000000u;   // 2^-23, less than half of the smallest value
constexpr uint32_t kHighBits = 0x3f800000u;  // 1.0
constexpr int kBuckets = static_cast<int>((kHighBits >> 16) - (kLowBits >> 16)) + 1;

struct Codebook {
  float values[256];
  // Smallest float32, as bits, that has at least code `first + 1 + i`; codes of non-negative values only.
  int first;  // code of zero: 127 (signed) or 0
  // (buckets[(b >> 16) - (kLowBits >> 16)] + b) >> 16 is the code of a value with bits b: a bucket holds one
  // bound at most, so adding the low bits carries into the code exactly when the bound is reached.
  uint32_t buckets[kBuckets];
};

// Both fill a codebook; build_codebook returns false if some bucket held two bounds.
bool build_codebook(bool is_signed, Codebook& book);
const Codebook& codebook(bool is_signed);

// The general rule for one state, any value and scale included: see codebook.py, `quantize`.
uint8_t quantize_one(const Codebook& book, bool is_signed, float state, float inverse_absmax);

}  // namespace bnb_fsdp
