// float16 and bfloat16 by integer arithmetic alone: exact under any flush-to-zero mode, on any processor.
#pragma once
#include <stdint.h>
#include <string.h>

#include "../rules/config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

BNB_FSDP_HD uint32_t to_bits(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

BNB_FSDP_HD float from_bits(uint32_t b) {
  float x;
  memcpy(&x, &b, sizeof x);
  return x;
}

BNB_FSDP_HD float bfloat16_to_float(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

BNB_FSDP_HD uint16_t float_to_bfloat16(float x) {
  const uint32_t b = to_bits(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

BNB_FSDP_HD float float16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0x1f) return from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return from_bits(sign);
    exponent = 1;
    while (!(mantissa & 0x400u)) mantissa <<= 1, --exponent;  // may wrap below zero; the bias below undoes it
    mantissa &= 0x3ffu;
  }
  return from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

BNB_FSDP_HD uint16_t float_to_float16(float x) {
  const uint32_t b = to_bits(x), magnitude = b & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((b >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x33000001u) return sign;            // 2^-25 and below round to zero
  uint32_t mantissa, shift, exponent;
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal
    mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    shift = 126u - (magnitude >> 23);
    exponent = 0;
  } else {
    mantissa = magnitude & 0x7fffffu;
    shift = 13;
    exponent = (magnitude >> 23) - 112u;
  }
  uint32_t result = (exponent << 10) + (mantissa >> shift);
  const uint32_t rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1);
  if (rest > half || (rest == half && (result & 1u))) ++result;  // may carry into the exponent, rightly
  return sign | static_cast<uint16_t>(result);
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
