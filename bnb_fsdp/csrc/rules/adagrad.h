// Adagrad: see rules.py for the same in torch, adam.h for what a rule is.
#pragma once
#include "coupled_decay.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Adagrad {
  static constexpr int states = 1;
  static constexpr bool is_signed(int) { return true; }  // as upstream, though it is never negative
  static constexpr bool skips_zeros(int) { return true; }

  struct Scalars {
    float lr, eps, weight_decay;
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float, float) {
    Scalars k;
    k.lr = h.lr;
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
    s[0] = fma(decayed, decayed, s[0]);
    p = parameter<P>(k, g, p, s[0]);
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = fma(g, g, s[0]);
    p = parameter<P>(k, g, p, s[0]);
  }

 private:
  template <class P, class L>
  static BNB_FSDP_HD L parameter(const Scalars& k, L g, L p, L s) {
    const L quotient = mul(g, rcp(add(sqrt(s), L(k.eps))));
    return round_to(P{}, fma(neg(quotient), L(k.lr), p));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
