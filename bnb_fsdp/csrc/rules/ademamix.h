// AdEMAMix: see rules.py for the same in torch, adam.h for what a rule is. States: the fast average m1, the
// second moment nu, the slow average m2. beta3 and alpha come scheduled.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct AdEMAMix {
  static constexpr int states = 3;
  static constexpr bool is_signed(int state) { return state != 1; }
  static constexpr bool skips_zeros(int) { return false; }

  struct Scalars {
    float beta1, beta2, beta3, rest1, rest2, rest3, alpha, inverse1, inverse2, eps, lr, decay;
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float step, float) {
    Scalars k;
    k.beta1 = h.beta1;
    k.beta2 = h.beta2;
    k.beta3 = h.beta3;
    k.rest1 = M::sub(1.0f, h.beta1);
    k.rest2 = M::sub(1.0f, h.beta2);
    k.rest3 = M::sub(1.0f, h.beta3);
    k.alpha = h.alpha;
    k.inverse1 = M::rcp(M::one_minus_power(h.beta1, step));
    k.inverse2 = M::rcp(M::sqrt(M::one_minus_power(h.beta2, step)));
    k.eps = h.eps;
    k.lr = h.lr;
    k.decay = decay_factor<M>(h.lr, h.weight_decay);
    return k;
  }

  template <class P, class L, class Mask>
  static BNB_FSDP_HD L gradient32(const Scalars&, Mask, L g, L) {
    return g;
  }

  // A non-finite gradient element resets its state and leaves its parameter alone, as in Adam; so does the
  // association of the second moment depend on the dtype.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    const auto finite = is_finite(g);
    const L m1 = fma(g, L(k.rest1), mul(s[0], L(k.beta1)));
    const L nu = same<P, Float32>::value ? fma(g, mul(g, L(k.rest2)), mul(s[1], L(k.beta2)))
                                         : fma(s[1], L(k.beta2), mul(mul(g, L(k.rest2)), g));
    const L m2 = fma(g, L(k.rest3), mul(s[2], L(k.beta3)));
    p = select(finite, parameter<P>(k, p, m1, nu, m2), p);
    s[0] = select(finite, m1, L(0.0f));
    s[1] = select(finite, nu, L(0.0f));
    s[2] = select(finite, m2, L(0.0f));
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = fma(s[0], L(k.beta1), mul(g, L(k.rest1)));
    s[1] = fma(s[1], L(k.beta2), mul(mul(g, L(k.rest2)), g));
    s[2] = fma(s[2], L(k.beta3), mul(g, L(k.rest3)));
    p = parameter<P>(k, p, s[0], s[1], s[2]);
  }

 private:
  template <class P, class L>
  static BNB_FSDP_HD L parameter(const Scalars& k, L p, L m1, L nu, L m2) {
    const L denominator = fma(sqrt(nu), L(k.inverse2), L(k.eps));
    const L numerator = fma(m2, L(k.alpha), mul(m1, L(k.inverse1)));
    p = round_to(P{}, fma(neg(mul(numerator, rcp(denominator))), L(k.lr), p));
    return round_to(P{}, mul(p, L(k.decay)));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
