// One element on CUDA: each operation is one instruction with one rounding, written out so that neither the
// compiler's flags nor its contraction choices decide the bits. Subnormals are flushed and reciprocal, square
// root and power are the hardware's approximations, as in upstream's --use_fast_math build.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../rules/config.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

#define BNB_FSDP_DEVICE static __device__ __forceinline__

struct DeviceMath {
  BNB_FSDP_DEVICE float mul(float a, float b) {
    float r;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  BNB_FSDP_DEVICE float add(float a, float b) {
    float r;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  BNB_FSDP_DEVICE float sub(float a, float b) {
    float r;
    asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  BNB_FSDP_DEVICE float fma(float a, float b, float c) {
    float r;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
  }
  BNB_FSDP_DEVICE float rcp(float a) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
  }
  BNB_FSDP_DEVICE float sqrt(float a) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
  }
  // 1 - base^exponent
  BNB_FSDP_DEVICE float one_minus_power(float base, float exponent) {
    float l, r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(l) : "f"(base));
    l = mul(exponent, l);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(l));
    return sub(1.0f, r);
  }
};

// `Finite` promises finite gradients, which lets a rule's guards against others vanish.
template <bool Finite>
struct Lane {
  float v;
  Lane() = default;
  __device__ __forceinline__ explicit Lane(float x) : v(x) {}
};
struct Always {};

template <bool F>
BNB_FSDP_DEVICE Lane<F> fma(Lane<F> a, Lane<F> b, Lane<F> c) {
  return Lane<F>(DeviceMath::fma(a.v, b.v, c.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> mul(Lane<F> a, Lane<F> b) {
  return Lane<F>(DeviceMath::mul(a.v, b.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> add(Lane<F> a, Lane<F> b) {
  return Lane<F>(DeviceMath::add(a.v, b.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> sub(Lane<F> a, Lane<F> b) {
  return Lane<F>(DeviceMath::sub(a.v, b.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> neg(Lane<F> a) {
  return Lane<F>(-a.v);
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> rcp(Lane<F> a) {
  return Lane<F>(DeviceMath::rcp(a.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> sqrt(Lane<F> a) {
  return Lane<F>(DeviceMath::sqrt(a.v));
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> flush(Lane<F> a) {
  return Lane<F>(DeviceMath::mul(a.v, 1.0f));
}
// Subnormal numbers count as zero.
BNB_FSDP_DEVICE bool is_zero(float x) { return DeviceMath::mul(x, 1.0f) == 0.0f; }
BNB_FSDP_DEVICE Always is_finite(Lane<true>) { return Always{}; }
BNB_FSDP_DEVICE bool is_finite(Lane<false> a) { return (__float_as_uint(a.v) & 0x7fffffffu) < 0x7f800000u; }
template <bool F>
BNB_FSDP_DEVICE Lane<F> select(Always, Lane<F> a, Lane<F>) {
  return a;
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> select(bool m, Lane<F> a, Lane<F> b) {
  return m ? a : b;
}
template <bool F>
BNB_FSDP_DEVICE Lane<F> signed_by(Lane<F> magnitude, Lane<F> x) {
  return Lane<F>(x.v > 0.0f ? magnitude.v : x.v < 0.0f ? -magnitude.v : 0.0f);
}

// One value rounded to a 16-bit dtype. The instruction for two at once is the fast one.
BNB_FSDP_DEVICE uint16_t to_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.0f), "f"(x));
  return static_cast<uint16_t>(r);
#else
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#endif
}
BNB_FSDP_DEVICE uint16_t to_float16(float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.0f), "f"(x));
  return static_cast<uint16_t>(r);
#else
  return __half_as_ushort(__float2half_rn(x));
#endif
}

// The dtypes in memory.
template <class P>
struct Memory;
template <>
struct Memory<Float32> {
  using type = float;
  BNB_FSDP_DEVICE float widen(float x) { return x; }
  BNB_FSDP_DEVICE float narrow(float x) { return x; }
};
template <>
struct Memory<BFloat16> {
  using type = uint16_t;
  BNB_FSDP_DEVICE float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
  BNB_FSDP_DEVICE uint16_t narrow(float x) { return to_bfloat16(x); }
};
template <>
struct Memory<Float16> {
  using type = uint16_t;
  BNB_FSDP_DEVICE float widen(uint16_t x) { return __half2float(__ushort_as_half(x)); }
  BNB_FSDP_DEVICE uint16_t narrow(float x) { return to_float16(x); }
};

// Rounded and widened again. In the upper half of a word a bfloat16 is a float32 already.
BNB_FSDP_DEVICE float rounded(Float32, float x) { return x; }
BNB_FSDP_DEVICE float rounded(BFloat16, float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(x), "f"(0.0f));
  return __uint_as_float(r);
#else
  return Memory<BFloat16>::widen(to_bfloat16(x));
#endif
}
BNB_FSDP_DEVICE float rounded(Float16, float x) { return Memory<Float16>::widen(to_float16(x)); }

template <class P, bool F>
BNB_FSDP_DEVICE Lane<F> round_to(P tag, Lane<F> a) {
  return Lane<F>(rounded(tag, a.v));
}

// 4-byte words of a dtype: one float32 or two 16-bit values.
template <class P>
constexpr int kPerWord = static_cast<int>(4 / sizeof(typename Memory<P>::type));

// To global memory, which the compiler cannot tell from an address that was in shared memory.
template <int Bytes>
BNB_FSDP_DEVICE void store_words(void* to, const uint32_t* w) {
  __builtin_assume(__isGlobal(to));
  if constexpr (Bytes == 16)
    *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  else if constexpr (Bytes == 8)
    *static_cast<uint2*>(to) = make_uint2(w[0], w[1]);
  else
    *static_cast<uint32_t*>(to) = w[0];
}
template <int Bytes>
BNB_FSDP_DEVICE void load_words(const void* from, uint32_t* w) {
  if constexpr (Bytes == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else if constexpr (Bytes == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    w[0] = v.x, w[1] = v.y;
  } else {
    w[0] = *static_cast<const uint32_t*>(from);
  }
}

template <class P>
BNB_FSDP_DEVICE float from_words(const uint32_t* words, int i) {
  if constexpr (kPerWord<P> == 1) {
    return __uint_as_float(words[i]);
  } else {
    return Memory<P>::widen(static_cast<uint16_t>(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu));
  }
}

// Two values that have been rounded to a 16-bit dtype, as a word.
BNB_FSDP_DEVICE uint32_t packed(BFloat16, float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
BNB_FSDP_DEVICE uint32_t packed(Float16, float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  return static_cast<uint32_t>(to_float16(low)) | static_cast<uint32_t>(to_float16(high)) << 16;
#endif
}

// Values that have been rounded to P, as words.
template <class P, int N>
BNB_FSDP_DEVICE void to_words(const float (&values)[N], uint32_t* words) {
#pragma unroll
  for (int i = 0; i < N / kPerWord<P>; ++i) {
    if constexpr (kPerWord<P> == 1)
      words[i] = __float_as_uint(values[i]);
    else
      words[i] = packed(P{}, values[2 * i], values[2 * i + 1]);
  }
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
