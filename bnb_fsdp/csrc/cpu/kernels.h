// What one instruction set offers to the dispatcher.
#pragma once
#include <stdint.h>

#include "../c_api.h"

namespace bnb_fsdp {

// Room for any rule's Scalars.
struct alignas(16) ScalarBlock {
  unsigned char bytes[64];
  bool skip_zeros;
};

// Elements [begin, end) of a tensor; begin and, unless it is numel, end are multiples of kBlock.
struct Range {
  const bnb_fsdp_tensor* tensor;
  const void* gradient;
  const ScalarBlock* scalars;
  int64_t begin, end;
};

struct Kernel {
  int states;
  void (*scalars)(const bnb_fsdp_hyper& hyper, float step, float scale, ScalarBlock& out);
  // gradient_dtype is a bnb_fsdp_dtype. Runs with subnormal numbers flushed to zero: see FlushScope.
  void (*run)(const Range& range, int gradient_dtype);
  // Sums of squares of the rule's direction and of the parameter; NULL for rules without one.
  void (*norms)(const Range& range, int gradient_dtype, double (&sums)[2]);
};

struct InstructionSet {
  const char* name;
  bool (*supported)();
  // NULL members if there is no such kernel.
  Kernel (*find)(const char* rule, int bits, int parameter_dtype);
};

#if defined(BNB_FSDP_X86)
extern const InstructionSet avx512vbmi_set, avx512_set, avx2_set;
#endif
#if defined(BNB_FSDP_NEON)
extern const InstructionSet neon_set;
#endif
extern const InstructionSet generic_set;

}  // namespace bnb_fsdp
