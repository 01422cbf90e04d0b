// The kernels of one rule, as the launcher sees them. Indices are dtypes: parameter, then gradient.
#pragma once

namespace bnb_fsdp {

constexpr int kDtypes = 3;

struct KernelSet {
  int states;
  const void* bulk8[kDtypes][kDtypes];  // Hopper and later
  const void* bulk32[kDtypes][kDtypes];
  int bulk8_bytes[kDtypes][kDtypes];  // of dynamic shared memory
  int bulk32_bytes[kDtypes][kDtypes];
  const void* warp8[kDtypes][kDtypes];  // any architecture
  int warp8_bytes;
  const void* step32[kDtypes][kDtypes];
  const void* norms8[kDtypes][kDtypes];  // LAMB and LARS; NULL for rules without a norm
  const void* norms32[kDtypes][kDtypes];
};

const KernelSet& adam_kernels();
const KernelSet& lion_kernels();
const KernelSet& momentum_kernels();
const KernelSet& rmsprop_kernels();
const KernelSet& adagrad_kernels();
const KernelSet& ademamix_kernels();

}  // namespace bnb_fsdp
