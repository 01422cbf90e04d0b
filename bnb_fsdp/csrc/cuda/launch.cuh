// This step's values of a tensor, wherever they are.
#pragma once
#include "lane.cuh"
#include "table.h"

namespace bnb_fsdp {
namespace BNB_FSDP_ISA {

BNB_FSDP_DEVICE int tensor_of(const Launch& launch, int tile) {
  return launch.tile_tensor != nullptr ? launch.tile_tensor[tile] : 0;
}
BNB_FSDP_DEVICE const Entry& entry_of(const Launch& launch, int tensor) {
  return launch.entries != nullptr ? launch.entries[tensor] : launch.single;
}
BNB_FSDP_DEVICE const void* gradient_of(const Launch& launch, int tensor) {
  return launch.gradients != nullptr ? launch.gradients[tensor] : launch.inline_gradients[tensor];
}
BNB_FSDP_DEVICE float step_of(const Launch& launch, int tensor) {
  return launch.gradients != nullptr ? launch.steps[tensor] : launch.inline_steps[tensor];
}
BNB_FSDP_DEVICE const bnb_fsdp_hyper& hyper_of(const Launch& launch, int group) {
  return launch.gradients != nullptr ? launch.hypers[group] : launch.inline_hypers[group];
}
BNB_FSDP_DEVICE float scale_of(const Launch& launch, int tensor) {
  return launch.scales != nullptr ? launch.scales[tensor] : 1.0f;
}
BNB_FSDP_DEVICE bool skips_zeros(const bnb_fsdp_hyper& hyper) {
  return (hyper.flags & BNB_FSDP_SKIP_ZEROS) != 0;
}

}  // namespace BNB_FSDP_ISA
}  // namespace bnb_fsdp
