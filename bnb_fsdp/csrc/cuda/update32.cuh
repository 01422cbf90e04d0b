// Elements with float32 states, in runs of four neighbours.
#pragma once
#include "lane.cuh"
#include "table.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

constexpr int kRun32 = 4;

template <class Rule>
struct Run32 {
  float p[kRun32], g[kRun32], s[Rule::states][kRun32];
};

template <class Rule, class P>
BNB_FSDP_DEVICE void update_run(const typename Rule::Scalars& k, bool skip, Run32<Rule>& r) {
  using Element = Lane<false>;
#pragma unroll
  for (int i = 0; i < kRun32; ++i) {
    Element p(r.p[i]), state[Rule::states];
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) state[s] = Element(r.s[s][i]);
    const Element g = Rule::template gradient32<P>(k, i == 0, Element(r.g[i]), p);
    Rule::template update32<P>(k, g, p, state);
    if (skip && is_zero(g.v)) continue;
    r.p[i] = p.v;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) r.s[s][i] = state[s].v;
  }
}

// Four elements, of which the first `n` exist.
template <class P>
BNB_FSDP_DEVICE void read4(const typename Memory<P>::type* from, bool aligned, int n, float (&x)[kRun32]) {
  if (aligned && n >= kRun32) {
    uint32_t w[kRun32 / kPerWord<P>];
    load_words<4 * kRun32 / kPerWord<P>>(from, w);
#pragma unroll
    for (int i = 0; i < kRun32; ++i) x[i] = from_words<P>(w, i);
  } else {
#pragma unroll
    for (int i = 0; i < kRun32; ++i) x[i] = i < n ? Memory<P>::widen(from[i]) : 0.0f;
  }
}

template <class P>
BNB_FSDP_DEVICE void write4(typename Memory<P>::type* to, bool aligned, int n, const float (&x)[kRun32]) {
  if (aligned && n >= kRun32) {
    uint32_t w[kRun32 / kPerWord<P>];
    to_words<P>(x, w);
    store_words<4 * kRun32 / kPerWord<P>>(to, w);
  } else {
#pragma unroll
    for (int i = 0; i < kRun32; ++i)
      if (i < n) to[i] = Memory<P>::narrow(x[i]);
  }
}

// Where elements with float32 states are.
template <class Rule, class P, class G>
struct Place32 {
  typename Memory<P>::type* p;
  const typename Memory<G>::type* g;
  float* states[Rule::states];
};

// The run at `at`, of which `n` elements exist, from and to global memory.
template <class Rule, class P, class G>
BNB_FSDP_DEVICE void read_run(const Place32<Rule, P, G>& place, int at, int n, bool aligned, bool aligned_g,
                              Run32<Rule>& r) {
  read4<P>(place.p + at, aligned, n, r.p);
  read4<G>(place.g + at, aligned_g, n, r.g);
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) read4<Float32>(place.states[s] + at, aligned, n, r.s[s]);
}
template <class Rule, class P, class G>
BNB_FSDP_DEVICE void write_run(const Place32<Rule, P, G>& place, int at, int n, bool aligned,
                               const Run32<Rule>& r) {
  write4<P>(place.p + at, aligned, n, r.p);
#pragma unroll
  for (int s = 0; s < Rule::states; ++s) write4<Float32>(place.states[s] + at, aligned, n, r.s[s]);
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
