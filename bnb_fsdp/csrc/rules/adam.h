// Adam, AdamW and LAMB: see rules.py for the same in torch, docs/parity.md for the order of operations and
// docs/upstream-arithmetic.md for upstream's.
//
// A rule is a struct of static functions:
//   skips_zeros(bits)       whether the skip_zeros flag acts: elements with a zero gradient keep parameter and
//   states.
//                           Kernels do the selecting, on the gradient itself (8-bit) or on gradient32()
//                           (32-bit).
//   scalars<M>(h, step, scale)  what depends on the step alone, `scale` being update_scale. M has static
//   functions
//                           one_minus_power(base, exponent), rcp, sqrt, mul, sub and fma, each rounding once.
//   gradient32<P>(k, fourth, g, p)  the gradient that update32() takes. `fourth` is the mask, of the type
//   select()
//                           takes, of the elements whose index in the tensor is a multiple of 4.
//   update8<P>(k, g, p, s), update32<P>(k, g, p, s)  one element; p and s are replaced.
//   direction8<P>(k, g, p, s), direction32(k, g, p, s)  LAMB and LARS: the u whose squares sum to the norm that
//                           the scale is made of, from the states before the step.
// It is written on lanes L: fma, mul, add, sub, neg, rcp, sqrt, flush (subnormal numbers to zero), is_finite,
// select, signed_by(magnitude, x) and round_to(dtype, x) come with the lane type (a SIMD register on the CPU, a
// float on CUDA) and round each operation once.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Adam {
  static constexpr int states = 2;
  static constexpr bool is_signed(int state) { return state == 0; }
  static constexpr bool skips_zeros(int bits) { return bits == 32; }

  struct Scalars {
    float beta1, beta2, rest1, rest2, correction2, eps, step_size, decay;
    float inverse1, inverse2, added_decay;  // 1 / (1 - beta^t) and LAMB's decay, for the direction alone
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float step, float scale) {
    Scalars k;
    k.beta1 = h.beta1;
    k.beta2 = h.beta2;
    k.rest1 = M::sub(1.0f, h.beta1);
    k.rest2 = M::sub(1.0f, h.beta2);
    const float squared_correction2 = M::one_minus_power(h.beta2, step);
    k.inverse1 = M::rcp(M::one_minus_power(h.beta1, step));
    k.inverse2 = M::rcp(squared_correction2);
    k.correction2 = M::sqrt(squared_correction2);
    k.eps = h.eps;
    // LAMB as published multiplies lr by the scale, decay included; update and decay commute by the division.
    const bool published = (h.flags & BNB_FSDP_PUBLISHED) != 0;
    k.decay = decay_factor<M>(published ? M::mul(h.lr, scale) : h.lr, h.weight_decay);
    k.step_size = M::mul(M::mul(M::mul(k.correction2, h.lr), -k.inverse1), scale);
    if (published) k.step_size = M::mul(k.step_size, M::rcp(k.decay));
    k.added_decay = published ? h.weight_decay : 0.0f;
    return k;
  }

  template <class P, class L, class Mask>
  static BNB_FSDP_HD L gradient32(const Scalars&, Mask, L g, L) {
    return g;
  }

  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    moments8<P>(k, g, s);
    p = select(is_finite(g), parameter<P>(k, p, s[0], s[1]), p);
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    moments32(k, g, s);
    p = parameter<P>(k, p, s[0], s[1]);
  }

  template <class P, class L>
  static BNB_FSDP_HD L direction8(const Scalars& k, L g, L p, const L (&s)[states]) {
    L moments[states] = {s[0], s[1]};
    moments8<P>(k, g, moments);
    return direction(k, p, moments[0], moments[1]);
  }

  template <class L>
  static BNB_FSDP_HD L direction32(const Scalars& k, L g, L p, const L (&s)[states]) {
    L moments[states] = {s[0], s[1]};
    moments32(k, g, moments);
    return direction(k, p, moments[0], moments[1]);
  }

 private:
  // A non-finite gradient element resets its state. The association of the second moment follows upstream's
  // machine code, which differs between float32 and 16-bit parameters.
  template <class P, class L>
  static BNB_FSDP_HD void moments8(const Scalars& k, L g, L (&s)[states]) {
    const auto finite = is_finite(g);
    const L m = fma(g, L(k.rest1), mul(s[0], L(k.beta1)));
    const L v = same<P, Float32>::value ? fma(g, mul(g, L(k.rest2)), mul(s[1], L(k.beta2)))
                                        : fma(s[1], L(k.beta2), mul(mul(g, L(k.rest2)), g));
    s[0] = select(finite, m, L(0.0f));
    s[1] = select(finite, v, L(0.0f));
  }

  template <class L>
  static BNB_FSDP_HD void moments32(const Scalars& k, L g, L (&s)[states]) {
    s[0] = fma(s[0], L(k.beta1), mul(g, L(k.rest1)));
    s[1] = fma(s[1], L(k.beta2), mul(mul(g, g), L(k.rest2)));
  }

  // 16-bit parameters are rounded twice, after the update and after decay, as upstream stores them.
  template <class P, class L>
  static BNB_FSDP_HD L parameter(const Scalars& k, L p, L m, L v) {
    const L denominator = fma(L(k.correction2), L(k.eps), sqrt(v));
    p = round_to(P{}, fma(L(k.step_size), mul(m, rcp(denominator)), p));
    return round_to(P{}, mul(p, L(k.decay)));
  }

  template <class L>
  static BNB_FSDP_HD L direction(const Scalars& k, L p, L m, L v) {
    const L u = mul(mul(m, L(k.inverse1)), rcp(add(sqrt(mul(v, L(k.inverse2))), L(k.eps))));
    return k.added_decay > 0.0f ? fma(p, L(k.added_decay), u) : u;
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
