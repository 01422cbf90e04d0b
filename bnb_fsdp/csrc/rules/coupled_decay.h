// Weight decay that is added to the gradient: momentum, RMSprop and Adagrad.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

// With 8-bit states: one rounding, to float32 whatever the parameter's dtype.
template <class L>
BNB_FSDP_HD L decayed8(float weight_decay, L g, L p) {
  return weight_decay > 0.0f ? fma(p, L(weight_decay), g) : g;
}

// With 32-bit states the sum is kept in the parameter's dtype. For float32 the compiler contracted upstream's
// four elements a thread in two ways: g * gradient_scale + p * weight_decay fuses the second product in the
// first element and the first product (by 1 here) in the other three. `fourth` marks elements 0, 4, 8... of the
// tensor.
template <class P, class L, class Mask>
BNB_FSDP_HD L decayed32(float weight_decay, Mask fourth, L g, L p) {
  if (!(weight_decay > 0.0f)) return g;
  const L fused = round_to(P{}, fma(p, L(weight_decay), g));
  if (!same<P, Float32>::value) return fused;
  return select(fourth, fused, add(g, mul(p, L(weight_decay))));
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
