// Compile check: the rules' structs with a CUDA lane. Compiled by tests/test_native_kernels.py where nvcc is
// found.
#include "../../bnb_fsdp/csrc/rules/adagrad.h"
#include "../../bnb_fsdp/csrc/rules/adam.h"
#include "../../bnb_fsdp/csrc/rules/ademamix.h"
#include "../../bnb_fsdp/csrc/rules/lion.h"
#include "../../bnb_fsdp/csrc/rules/momentum.h"
#include "../../bnb_fsdp/csrc/rules/rmsprop.h"

namespace bnb_fsdp {
namespace portable {

struct FloatLane {
  float v;
  FloatLane() = default;
  __host__ __device__ explicit FloatLane(float x) : v(x) {}
};

__device__ FloatLane fma(FloatLane a, FloatLane b, FloatLane c) { return FloatLane(__fmaf_rn(a.v, b.v, c.v)); }
__device__ FloatLane mul(FloatLane a, FloatLane b) { return FloatLane(__fmul_rn(a.v, b.v)); }
__device__ FloatLane add(FloatLane a, FloatLane b) { return FloatLane(__fadd_rn(a.v, b.v)); }
__device__ FloatLane sub(FloatLane a, FloatLane b) { return FloatLane(__fsub_rn(a.v, b.v)); }
__device__ FloatLane neg(FloatLane a) { return FloatLane(-a.v); }
__device__ FloatLane rcp(FloatLane a) { return FloatLane(__frcp_rn(a.v)); }
__device__ FloatLane sqrt(FloatLane a) { return FloatLane(__fsqrt_rn(a.v)); }
__device__ FloatLane flush(FloatLane a) {
  return FloatLane(fabsf(a.v) < 1.17549435e-38f ? copysignf(0.0f, a.v) : a.v);
}
__device__ bool is_finite(FloatLane a) { return isfinite(a.v); }
__device__ FloatLane select(bool m, FloatLane a, FloatLane b) { return m ? a : b; }
__device__ FloatLane signed_by(FloatLane m, FloatLane x) {
  return FloatLane(x.v > 0.0f ? m.v : x.v < 0.0f ? -m.v : 0.0f);
}
template <class P>
__device__ FloatLane round_to(P, FloatLane a) {
  return a;
}

struct DeviceMath {
  static __device__ float one_minus_power(float base, float exponent) { return 1.0f - powf(base, exponent); }
  static __device__ float rcp(float a) { return __frcp_rn(a); }
  static __device__ float sqrt(float a) { return __fsqrt_rn(a); }
  static __device__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ float sub(float a, float b) { return __fsub_rn(a, b); }
  static __device__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
};

template <class Rule>
__global__ void step(bnb_fsdp_hyper hyper, const float* g, float* p, float* s, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const typename Rule::Scalars k = Rule::template scalars<DeviceMath>(hyper, 3.0f, 1.0f);
  FloatLane parameter(p[i]), states[Rule::states];
  for (int j = 0; j < Rule::states; ++j) states[j] = FloatLane(s[j * n + i]);
  Rule::template update8<Float32>(k, FloatLane(g[i]), parameter, states);
  const FloatLane gradient = Rule::template gradient32<BFloat16>(k, i % 4 == 0, FloatLane(g[i]), parameter);
  Rule::template update32<BFloat16>(k, gradient, parameter, states);
  p[i] = parameter.v;
  for (int j = 0; j < Rule::states; ++j) s[j * n + i] = states[j].v;
}

template <class Rule>
__global__ void direction(typename Rule::Scalars k, const float* g, const float* s, float* u, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  FloatLane states[Rule::states];
  for (int j = 0; j < Rule::states; ++j) states[j] = FloatLane(s[j * n + i]);
  u[i] = Rule::direction32(k, FloatLane(g[i]), FloatLane(u[i]), states).v +
         Rule::template direction8<Float16>(k, FloatLane(g[i]), FloatLane(u[i]), states).v;
}

template __global__ void step<Adam>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void step<AdEMAMix>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void step<Adagrad>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void step<Lion>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void step<Momentum>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void step<RMSprop>(bnb_fsdp_hyper, const float*, float*, float*, int);
template __global__ void direction<Adam>(Adam::Scalars, const float*, const float*, float*, int);
template __global__ void direction<Momentum>(Momentum::Scalars, const float*, const float*, float*, int);

}  // namespace portable
}  // namespace bnb_fsdp
