// Subnormal numbers flushed to zero while in scope, inputs and results: bitsandbytes' kernels are built so, and
// subnormal arithmetic costs x86 processors a hundred cycles an operation.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace bnb_fsdp {

class FlushScope {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FlushScope() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushScope() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    const uint64_t flush = saved_ | (uint64_t{1} << 24);
    asm volatile("msr fpcr, %0" : : "r"(flush));
  }
  ~FlushScope() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushScope() {}
#endif
 public:
  FlushScope(const FlushScope&) = delete;
  FlushScope& operator=(const FlushScope&) = delete;
};

}  // namespace bnb_fsdp
