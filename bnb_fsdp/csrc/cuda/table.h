// What a kernel is told: the bucket's table in device memory, and this step's values in the launch parameters.
#pragma once
#include <stdint.h>

#include "../c_api.h"

namespace bnb_fsdp {

constexpr int kBlockSize = 256;                                    // elements that share a scale
constexpr int kTileBlocks = 16, kTile = kTileBlocks * kBlockSize;  // what is handed out together
constexpr int kSignedEntries = 8192, kUnsignedEntries = 4096;

// Tables of the two maps: see encode_table.h.
struct MapTables {
  uint32_t encode_signed[kSignedEntries];
  uint32_t encode_unsigned[kUnsignedEntries];
  float values[2][kBlockSize];  // unsigned, signed
};

// One tensor.
struct alignas(16) Entry {
  void* parameter;
  void* state[BNB_FSDP_MAX_STATES];
  float* absmax[BNB_FSDP_MAX_STATES];
  float* step;  // device counter, if steps live on the device
  int64_t numel;
  int32_t first_tile;  // of this tensor in the bucket's sequence of tiles
  int32_t group;
  int32_t aligned;  // parameter and state allow 16-byte access
  int32_t padding;
};

// Tensors and groups whose values of a step travel in the launch parameters; more go through device memory.
constexpr int kInlineTensors = 1536, kInlineGroups = 32;

struct Launch {
  const Entry* entries;        // NULL: `single` is the only tensor
  const int32_t* tile_tensor;  // tile -> tensor
  const MapTables* maps;       // 8-bit only
  uint32_t* tickets;           // two words, zero between launches
  // This step's values, in device memory; NULL: the arrays below.
  const void* const* gradients;
  const float* steps;
  const bnb_fsdp_hyper* hypers;
  const float* scales;  // device, one a tensor, or NULL
  int32_t tiles;
  int32_t reserved;
  Entry single;
  bnb_fsdp_hyper inline_hypers[kInlineGroups];
  float inline_steps[kInlineTensors];
  const void* inline_gradients[kInlineTensors];
};

// A part of a step's values on its way to device memory, where `Launch` then finds them.
struct Upload {
  const Entry* entries;
  const void** gradients;
  float* steps;
  bnb_fsdp_hyper* hypers;
  int32_t first_tensor, tensors, first_group, groups;
  int32_t steps_on_device;  // take Entry::step and one instead of inline_steps
  int32_t reserved;
  const float* rates[kInlineGroups];  // learning rates in device memory, or NULL
  bnb_fsdp_hyper inline_hypers[kInlineGroups];
  float inline_steps[kInlineTensors];
  const void* inline_gradients[kInlineTensors];
};

static_assert(sizeof(Launch) < 32764 && sizeof(Upload) < 32764,
              "launch parameters are limited to 32,764 bytes");

}  // namespace bnb_fsdp
