// Lion: see rules.py for the same in torch. Lanes as in adam.h, and signed_by(magnitude, x): magnitude with the
// sign of x, 0 where x is 0 or NaN.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Lion {
  static constexpr int states = 1;
  static constexpr bool is_signed(int) { return true; }

  struct Scalars {
    float lr, beta1, beta2, rest1, rest2, decay;
  };

  static Scalars scalars(const bnb_fsdp_hyper& h, float) {
    Scalars k;
    k.lr = h.lr;
    k.beta1 = h.beta1;
    k.beta2 = h.beta2;
    k.rest1 = 1.0f - h.beta1;
    k.rest2 = 1.0f - h.beta2;
    k.decay = h.weight_decay > 0.0f ? fmaf(-h.lr, h.weight_decay, 1.0f) : 1.0f;
    return k;
  }

  // The 8-bit kernel upstream keeps lr * sign in the parameter's dtype.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    const L direction = fma(g, L(k.rest1), mul(s[0], L(k.beta1)));
    p = round_to(P{}, mul(p, L(k.decay)));
    p = round_to(P{}, sub(p, signed_by(round_to(P{}, L(k.lr)), direction)));
    s[0] = fma(g, L(k.rest2), mul(s[0], L(k.beta2)));
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    const L direction = fma(s[0], L(k.beta1), mul(g, L(k.rest1)));
    p = round_to(P{}, mul(p, L(k.decay)));
    p = round_to(P{}, sub(p, signed_by(L(k.lr), direction)));
    s[0] = fma(s[0], L(k.beta2), mul(g, L(k.rest2)));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
