// Compile check: the rules' structs with a CUDA lane. Compiled by tests/test_native_kernels.py where nvcc is
// found.
#include "../../bnb_fsdp/csrc/rules/adam.h"
#include "../../bnb_fsdp/csrc/rules/lion.h"

namespace bnb_fsdp {
namespace portable {

struct FloatLane {
  float v;
  FloatLane() = default;
  __host__ __device__ explicit FloatLane(float x) : v(x) {}
};

__device__ FloatLane fma(FloatLane a, FloatLane b, FloatLane c) { return FloatLane(__fmaf_rn(a.v, b.v, c.v)); }
__device__ FloatLane mul(FloatLane a, FloatLane b) { return FloatLane(__fmul_rn(a.v, b.v)); }
__device__ FloatLane sub(FloatLane a, FloatLane b) { return FloatLane(__fsub_rn(a.v, b.v)); }
__device__ FloatLane rcp(FloatLane a) { return FloatLane(__frcp_rn(a.v)); }
__device__ FloatLane sqrt(FloatLane a) { return FloatLane(__fsqrt_rn(a.v)); }
__device__ bool is_finite(FloatLane a) { return isfinite(a.v); }
__device__ FloatLane select(bool m, FloatLane a, FloatLane b) { return m ? a : b; }
__device__ FloatLane signed_by(FloatLane m, FloatLane x) {
  return FloatLane(x.v > 0.0f ? m.v : x.v < 0.0f ? -m.v : 0.0f);
}
template <class P>
__device__ FloatLane round_to(P, FloatLane a) {
  return a;
}

template <class Rule>
__global__ void step(typename Rule::Scalars k, const float* g, float* p, float* s, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  FloatLane parameter(p[i]), states[Rule::states];
  for (int j = 0; j < Rule::states; ++j) states[j] = FloatLane(s[j * n + i]);
  Rule::template update8<Float32>(k, FloatLane(g[i]), parameter, states);
  Rule::template update32<BFloat16>(k, FloatLane(g[i]), parameter, states);
  p[i] = parameter.v;
  for (int j = 0; j < Rule::states; ++j) s[j * n + i] = states[j].v;
}

template __global__ void step<Adam>(Adam::Scalars, const float*, float*, float*, int);
template __global__ void step<Lion>(Lion::Scalars, const float*, float*, float*, int);

}  // namespace portable
}  // namespace bnb_fsdp
