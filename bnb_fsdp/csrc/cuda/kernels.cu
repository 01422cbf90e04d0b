// All kernels of one rule. Compiled once a rule: BNB_FSDP_RULE is its struct, BNB_FSDP_RULE_HEADER its file and
// BNB_FSDP_RULE_KERNELS the function to define.
#include "kernels.h"

#include BNB_FSDP_RULE_HEADER

#include "bulk.cuh"
#include "norms.cuh"
#include "step32.cuh"
#include "warp8.cuh"

namespace bnb_fsdp {
namespace {

using namespace BNB_FSDP_ISA;
using Rule = BNB_FSDP_RULE;

template <class P, class G>
void add(KernelSet& set, int p, int g) {
  set.bulk8[p][g] = reinterpret_cast<const void*>(bulk<Rule, P, G, 8>);
  set.bulk8_bytes[p][g] = Stage<Rule, P, G, 8>::shared_bytes;
  set.bulk32[p][g] = reinterpret_cast<const void*>(bulk<Rule, P, G, 32>);
  set.bulk32_bytes[p][g] = Stage<Rule, P, G, 32>::shared_bytes;
  set.warp8[p][g] = reinterpret_cast<const void*>(warp8<Rule, P, G>);
  set.step32[p][g] = reinterpret_cast<const void*>(step32<Rule, P, G>);
#if defined(BNB_FSDP_RULE_HAS_NORM)
  set.norms8[p][g] = reinterpret_cast<const void*>(tile_norms<Rule, P, G, 8>);
  set.norms32[p][g] = reinterpret_cast<const void*>(tile_norms<Rule, P, G, 32>);
#endif
}

template <class P>
void add_gradients(KernelSet& set, int p) {
  add<P, Float32>(set, p, BNB_FSDP_FLOAT32);
  add<P, BFloat16>(set, p, BNB_FSDP_BFLOAT16);
  add<P, Float16>(set, p, BNB_FSDP_FLOAT16);
}

KernelSet build() {
  KernelSet set = {};
  set.states = Rule::states;
  set.warp8_bytes = SharedMaps<Rule, 1>::bytes;
  add_gradients<Float32>(set, BNB_FSDP_FLOAT32);
  add_gradients<BFloat16>(set, BNB_FSDP_BFLOAT16);
  add_gradients<Float16>(set, BNB_FSDP_FLOAT16);
  return set;
}

}  // namespace

const KernelSet& BNB_FSDP_RULE_KERNELS() {
  static const KernelSet set = build();
  return set;
}

}  // namespace bnb_fsdp
