// What the rules need to be compiled for several instruction sets and for CUDA from one text.
//
// Each translation unit that is built with its own instruction-set flags defines BNB_FSDP_ISA, and everything
// it includes lives in that namespace: otherwise the linker would keep one copy of an inline function, possibly
// built with instructions the processor lacks.
#pragma once
#include <math.h>

#include "../c_api.h"

#ifndef BNB_FSDP_ISA
#define BNB_FSDP_ISA portable
#endif

#if defined(__CUDACC__)
#define BNB_FSDP_HD __host__ __device__ __forceinline__
#else
#define BNB_FSDP_HD inline __attribute__((always_inline))
#endif

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

// Parameter dtypes, as tags.
struct Float32 {};
struct BFloat16 {};
struct Float16 {};

template <class A, class B>
struct same {
  static constexpr bool value = false;
};
template <class A>
struct same<A, A> {
  static constexpr bool value = true;
};

// 1 - lr * weight_decay, rounded once; 1 without decay. M as in adam.h.
template <class M>
BNB_FSDP_HD float decay_factor(float lr, float weight_decay) {
  return weight_decay > 0.0f ? M::fma(-lr, weight_decay, 1.0f) : 1.0f;
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
