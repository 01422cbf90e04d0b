// RMSprop, not centred, without momentum: see rules.py for the same in torch, adam.h for what a rule is.
#pragma once
#include "coupled_decay.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct RMSprop {
  static constexpr int states = 1;
  static constexpr bool is_signed(int) { return true; }  // as upstream, though it is never negative
  static constexpr bool skips_zeros(int) { return true; }

  struct Scalars {
    float lr, beta1, rest1, eps, weight_decay;
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float, float) {
    Scalars k;
    k.lr = h.lr;
    k.beta1 = h.beta1;
    k.rest1 = M::sub(1.0f, h.beta1);
    k.eps = h.eps;
    k.weight_decay = h.weight_decay;
    return k;
  }

  template <class P, class L, class Mask>
  static BNB_FSDP_HD L gradient32(const Scalars& k, Mask fourth, L g, L p) {
    return decayed32<P>(k.weight_decay, fourth, g, p);
  }

  // The 8-bit kernel upstream divides the gradient without its decay.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    const L decayed = decayed8(k.weight_decay, g, p);
    s[0] = fma(mul(decayed, decayed), L(k.rest1), mul(s[0], L(k.beta1)));
    p = round_to(P{}, fma(neg(quotient(k, g, s[0])), L(k.lr), p));
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = fma(s[0], L(k.beta1), mul(mul(g, L(k.rest1)), g));
    p = round_to(P{}, sub(p, mul(quotient(k, g, s[0]), L(k.lr))));
  }

 private:
  template <class L>
  static BNB_FSDP_HD L quotient(const Scalars& k, L g, L s) {
    return mul(g, rcp(add(sqrt(s), L(k.eps))));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
