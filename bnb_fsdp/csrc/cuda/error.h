// Failures of the CUDA library: the message of this thread's last one, and the scope of a device.
#pragma once
#include <cuda_runtime.h>

#include <string>

namespace bnb_fsdp {

// Keep the message for bnb_fsdp_last_error(); both return 1.
int fail(const std::string& message);
int fail(const std::string& what, cudaError_t error);

// Makes `device` current and puts the old one back.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

}  // namespace bnb_fsdp
