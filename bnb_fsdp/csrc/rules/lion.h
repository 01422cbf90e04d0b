// Lion: see rules.py for the same in torch, adam.h for what a rule is. signed_by(magnitude, x) is the magnitude
// with the sign of x, 0 where x is 0 or NaN.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lion {
  static constexpr int states = 1;
  static constexpr bool is_signed(int) { return true; }
  static constexpr bool skips_zeros(int) { return true; }

  struct Scalars {
    float lr, beta1, beta2, rest1, rest2, decay;
    bool skip_zeros;
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float, float) {
    Scalars k;
    k.lr = h.lr;
    k.beta1 = h.beta1;
    k.beta2 = h.beta2;
    k.rest1 = M::sub(1.0f, h.beta1);
    k.rest2 = M::sub(1.0f, h.beta2);
    k.decay = decay_factor<M>(h.lr, h.weight_decay);
    k.skip_zeros = (h.flags & BNB_FSDP_SKIP_ZEROS) != 0;
    return k;
  }

  template <class P, class L, class Mask>
  static BNB_FSDP_HD L gradient32(const Scalars&, Mask, L g, L) {
    return g;
  }

  // The 8-bit kernel upstream keeps lr * sign in the parameter's dtype.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    const L direction = fma(g, L(k.rest1), mul(s[0], L(k.beta1)));
    p = round_to(P{}, mul(p, L(k.decay)));
    p = round_to(P{}, sub(p, signed_by(round_to(P{}, L(k.lr)), direction)));
    s[0] = fma(g, L(k.rest2), mul(s[0], L(k.beta2)));
  }

  // Decay and step of a float32 parameter round once, together; upstream's code for skip_zeros rounds twice.
  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    const L direction = fma(s[0], L(k.beta1), mul(g, L(k.rest1)));
    const L change = signed_by(L(k.lr), direction);
    if (same<P, Float32>::value && !k.skip_zeros)
      p = fma(p, L(k.decay), neg(change));
    else
      p = round_to(P{}, sub(round_to(P{}, mul(p, L(k.decay))), change));
    s[0] = fma(s[0], L(k.beta2), mul(g, L(k.rest2)));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
