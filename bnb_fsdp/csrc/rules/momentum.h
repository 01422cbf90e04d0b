// SGD with momentum, and LARS: see rules.py for the same in torch, adam.h for what a rule is.
#pragma once
#include "coupled_decay.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Momentum {
  static constexpr int states = 1;
  static constexpr bool is_signed(int) { return true; }
  static constexpr bool skips_zeros(int) { return true; }

  struct Scalars {
    float lr, beta1, weight_decay, scale, scaled_lr, gradient_scale;
    bool first;  // the first step takes the gradient as it is, without looking at the state
    bool published;
  };

  template <class M>
  static BNB_FSDP_HD Scalars scalars(const bnb_fsdp_hyper& h, float step, float scale) {
    Scalars k;
    k.lr = h.lr;
    k.beta1 = h.beta1;
    k.weight_decay = h.weight_decay;
    k.scale = scale;
    k.scaled_lr = M::mul(h.lr, scale);
    k.gradient_scale = 1.0f;
    k.first = step == 1.0f;
    k.published = (h.flags & BNB_FSDP_PUBLISHED) != 0;
    if (k.published) {  // LARS: what enters the momentum has its local learning rate in it
      k.gradient_scale = k.scaled_lr;
      k.lr = k.scale = k.scaled_lr = 1.0f;
    }
    return k;
  }

  template <class P, class L, class Mask>
  static BNB_FSDP_HD L gradient32(const Scalars& k, Mask fourth, L g, L p) {
    return decayed32<P>(k.weight_decay, fourth, g, p);
  }

  // Upstream's kernel has no update scale and fuses lr; the scale is multiplied into it.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = momentum(k, scaled(k, decayed8(k.weight_decay, g, p)), s[0]);
    p = round_to(P{}, fma(neg(s[0]), L(k.scaled_lr), p));
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = momentum(k, scaled(k, g), s[0]);
    p = round_to(P{}, fma(mul(s[0], L(k.lr)), neg(L(k.scale)), p));
  }

  // Weight decay is left out, as upstream.
  template <class P, class L>
  static BNB_FSDP_HD L direction8(const Scalars& k, L g, L p, const L (&s)[states]) {
    return direction32(k, g, p, s);
  }

  template <class L>
  static BNB_FSDP_HD L direction32(const Scalars& k, L g, L, const L (&s)[states]) {
    return k.published ? flush(g) : momentum(k, g, s[0]);
  }

 private:
  template <class L>
  static BNB_FSDP_HD L scaled(const Scalars& k, L g) {
    return k.published ? mul(g, L(k.gradient_scale)) : g;
  }

  template <class L>
  static BNB_FSDP_HD L momentum(const Scalars& k, L g, L s) {
    return k.first ? flush(g) : fma(s, L(k.beta1), g);
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
