// The scalars of a step in IEEE arithmetic: the CPU's counterpart of the approximate instructions on CUDA.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

// The policy M of Rule::scalars(). Each function rounds once.
struct HostMath {
  static float one_minus_power(float base, float exponent) {
    return static_cast<float>(1.0 - pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  static float rcp(float a) { return 1.0f / a; }
  static float sqrt(float a) { return sqrtf(a); }
  static float mul(float a, float b) { return a * b; }
  static float sub(float a, float b) { return a - b; }
  static float fma(float a, float b, float c) { return fmaf(a, b, c); }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
