// Adam and AdamW: see rules.py for the same in torch, docs/parity.md for the order of operations.
//
// A rule is written on lanes L: fma, mul, rcp, sqrt, is_finite, select and round_to(dtype, x) come with the
// lane type (a SIMD register on the CPU, a float on CUDA) and round each operation once.
#pragma once
#include "config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

struct Adam {
  static constexpr int states = 2;
  static constexpr bool is_signed(int state) { return state == 0; }

  struct Scalars {
    float beta1, beta2, rest1, rest2, correction2, eps, step_size, decay;
  };

  // Host part, once a tensor and step. The bias corrections are computed in double from the float32 betas.
  static Scalars scalars(const bnb_fsdp_hyper& h, float step) {
    Scalars k;
    k.beta1 = h.beta1;
    k.beta2 = h.beta2;
    k.rest1 = 1.0f - h.beta1;
    k.rest2 = 1.0f - h.beta2;
    const float correction1 = static_cast<float>(1.0 - pow(h.beta1, static_cast<double>(step)));
    k.correction2 = sqrtf(static_cast<float>(1.0 - pow(h.beta2, static_cast<double>(step))));
    k.eps = h.eps;
    k.step_size = (k.correction2 * h.lr) * -(1.0f / correction1);
    k.decay = h.weight_decay > 0.0f ? fmaf(-h.lr, h.weight_decay, 1.0f) : 1.0f;
    return k;
  }

  // A non-finite gradient element resets its state and leaves its parameter alone.
  template <class P, class L>
  static BNB_FSDP_HD void update8(const Scalars& k, L g, L& p, L (&s)[states]) {
    const auto finite = is_finite(g);
    L m = fma(g, L(k.rest1), mul(s[0], L(k.beta1)));
    // The association follows upstream's machine code, which differs between float32 and 16-bit parameters.
    L v = same<P, Float32>::value ? fma(g, mul(g, L(k.rest2)), mul(s[1], L(k.beta2)))
                                  : fma(s[1], L(k.beta2), mul(mul(g, L(k.rest2)), g));
    s[0] = select(finite, m, L(0.0f));
    s[1] = select(finite, v, L(0.0f));
    p = select(finite, parameter<P>(k, p, m, v), p);
  }

  template <class P, class L>
  static BNB_FSDP_HD void update32(const Scalars& k, L g, L& p, L (&s)[states]) {
    s[0] = fma(s[0], L(k.beta1), mul(g, L(k.rest1)));
    s[1] = fma(s[1], L(k.beta2), mul(mul(g, g), L(k.rest2)));
    p = parameter<P>(k, p, s[0], s[1]);
  }

 private:
  // 16-bit parameters are rounded twice, after the update and after decay, as upstream stores them.
  template <class P, class L>
  static BNB_FSDP_HD L parameter(const Scalars& k, L p, L m, L v) {
    const L denominator = fma(L(k.correction2), L(k.eps), sqrt(v));
    p = round_to(P{}, fma(L(k.step_size), mul(m, rcp(denominator)), p));
    return round_to(P{}, mul(p, L(k.decay)));
  }
};

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
