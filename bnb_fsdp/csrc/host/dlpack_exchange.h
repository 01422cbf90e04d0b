// The part of DLPack's C exchange interface that is used here: layouts of dlpack.h, version 1.3
// (https://github.com/dmlc/dlpack/blob/v1.3/include/dlpack/dlpack.h). They are fixed within major version 1.
#pragma once
#include <stdint.h>

namespace bnb_fsdp::dlpack {

constexpr uint32_t kMajorVersion = 1;

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;  // 2: IEEE float, 4: bfloat16
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {  // DLTensor; strides count elements
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Managed {  // DLManagedTensorVersioned
  uint32_t major, minor;
  void* context;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {  // DLPackExchangeAPI
  uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  int (*managed_from_object)(void* object, Managed** out);
  void* object_from_managed;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows; may be NULL; -1 with a Python exception set
  void* current_stream;
};

}  // namespace bnb_fsdp::dlpack
