// The C functions of the CUDA library: checks, choice of kernel, launches on the caller's stream.
#include <cuda_runtime.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../c_api.h"
#include "encode_table.h"
#include "error.h"
#include "kernels.h"
#include "table.h"
#include "upload.h"

namespace bnb_fsdp {
namespace {

thread_local std::string error_message;

}  // namespace

int fail(const std::string& message) {
  error_message = message;
  return 1;
}

// The runtime keeps the error for the next caller, who would take it for their own: it is taken back.
int fail(const std::string& what, cudaError_t error) {
  cudaGetLastError();
  return fail(what + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

namespace {

constexpr const char* kRuleNames[] = {"adam", "lion", "momentum", "rmsprop", "adagrad", "ademamix"};

const KernelSet* kernel_set(const char* rule) {
  const KernelSet& (*const sets[])() = {adam_kernels,    lion_kernels,    momentum_kernels,
                                        rmsprop_kernels, adagrad_kernels, ademamix_kernels};
  for (size_t i = 0; i < std::size(kRuleNames); ++i)
    if (rule != nullptr && strcmp(rule, kRuleNames[i]) == 0) return &sets[i]();
  return nullptr;
}

// bulk: where the device can; portable: the kernels that run everywhere.
std::atomic<bool> portable_only{false};

// What is launched for a rule, its dtypes and bits on a device.
struct Kernel {
  const void* function = nullptr;
  const void* norms = nullptr;
  int states = 0, threads = 0, shared_bytes = 0;
  int ctas = 0;  // at most so many; 0: one a tile
  bool tickets = false;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

std::string capability(int device) {
  return std::to_string(attribute(cudaDevAttrComputeCapabilityMajor, device)) + "." +
         std::to_string(attribute(cudaDevAttrComputeCapabilityMinor, device));
}

// Dynamic shared memory above 48 KB has to be asked for, once a kernel and device.
cudaError_t allow_shared_memory(const void* function, int bytes, int device) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  if (allowed.count({function, device}) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.insert({function, device});
  return error;
}

// Of the current device; 0 and `kernel`, or the error told.
int find_kernel(const char* rule, int bits, int parameter_dtype, int gradient_dtype, int device,
                Kernel& kernel) {
  const KernelSet* set = kernel_set(rule);
  const auto known = [](int dtype) { return dtype >= 0 && dtype < kDtypes; };
  if (set == nullptr || (bits != 8 && bits != 32) || !known(parameter_dtype) || !known(gradient_dtype))
    return fail("no kernel for rule " + std::string(rule ? rule : "(null)") + ", " + std::to_string(bits) +
                " bits, parameter dtype " + std::to_string(parameter_dtype) + ", gradient dtype " +
                std::to_string(gradient_dtype));
  const int p = parameter_dtype, g = gradient_dtype;
  const std::string where = std::string(rule) + " on cuda:" + std::to_string(device) + " (compute capability " +
                            capability(device) + ", kernels built for " + BNB_FSDP_ARCHITECTURES + ")";
  kernel.states = set->states;
  const void* const bulk = bits == 8 ? set->bulk8[p][g] : set->bulk32[p][g];
  const int bulk_bytes = bits == 8 ? set->bulk8_bytes[p][g] : set->bulk32_bytes[p][g];
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, bulk);
  if (error != cudaSuccess) return fail(where, error);
  // Code made for an older architecture may run here all the same, but has no bulk kernels in it.
  kernel.tickets = !portable_only && attributes.ptxVersion >= 90 &&
                   bulk_bytes <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  kernel.function = kernel.tickets ? bulk : bits == 8 ? set->warp8[p][g] : set->step32[p][g];
  kernel.shared_bytes = kernel.tickets ? bulk_bytes : bits == 8 ? set->warp8_bytes : 0;
  kernel.norms = bits == 8 ? set->norms8[p][g] : set->norms32[p][g];
  error = cudaFuncGetAttributes(&attributes, kernel.function);
  if (error != cudaSuccess) return fail(where, error);
  kernel.threads = attributes.maxThreadsPerBlock;  // what __launch_bounds__ says
  if (!kernel.tickets && bits == 32) return 0;     // a CTA for every tile
  error = allow_shared_memory(kernel.function, kernel.shared_bytes, device);
  int resident = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel.function, kernel.threads,
                                                          static_cast<size_t>(kernel.shared_bytes));
  if (error != cudaSuccess) return fail(where, error);
  if (resident == 0) return fail(where + ": the kernel does not fit the device");
  kernel.ctas = resident * attribute(cudaDevAttrMultiProcessorCount, device);
  return 0;
}

// What is wrong with a table entry, or NULL.
const char* check(const bnb_fsdp_tensor& t, int bits, int states, int64_t groups) {
  if (t.numel < 0) return "numel is negative";
  if (t.numel > (int64_t{1} << 31) * kTile / 2) return "it has too many elements";
  if (t.group < 0 || t.group >= groups) return "its group is out of range";
  if (t.step == nullptr) return "it has no step counter";
  if (t.numel == 0) return nullptr;
  if (t.parameter == nullptr) return "it has no parameter";
  for (int s = 0; s < states; ++s)
    if (t.state[s] == nullptr || (bits == 8 && t.absmax[s] == nullptr)) return "its state is missing";
  return nullptr;
}

int64_t tiles_of(int64_t numel) { return (numel + kTile - 1) / kTile; }

Entry entry_of(const bnb_fsdp_tensor& t, int bits, int states, int64_t first_tile) {
  Entry e = {};
  e.parameter = t.parameter;
  e.step = t.step;
  e.numel = t.numel;
  e.first_tile = static_cast<int32_t>(first_tile);
  e.group = static_cast<int32_t>(t.group);
  uintptr_t addresses = reinterpret_cast<uintptr_t>(t.parameter);
  for (int s = 0; s < states; ++s) {
    e.state[s] = t.state[s];
    addresses |= reinterpret_cast<uintptr_t>(t.state[s]);
    if (bits != 8) continue;
    e.absmax[s] = t.absmax[s];
    addresses |= reinterpret_cast<uintptr_t>(t.absmax[s]);
  }
  e.aligned = addresses % 16 == 0;
  return e;
}

const MapTables* map_tables() {
  static const MapTables* const tables = [] {
    auto* built = new MapTables;
    return fill_map_tables(*built) ? built : nullptr;
  }();
  return tables;
}

int launch(const Kernel& kernel, const Launch& values, cudaStream_t stream, const std::string& what) {
  const int grid = kernel.ctas > 0 ? std::min(kernel.ctas, values.tiles) : values.tiles;
  void* arguments[] = {const_cast<Launch*>(&values)};
  const cudaError_t error = cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(grid)),
                                             dim3(static_cast<unsigned>(kernel.threads)), arguments,
                                             static_cast<size_t>(kernel.shared_bytes), stream);
  return error == cudaSuccess ? 0 : fail(what, error);
}

}  // namespace
}  // namespace bnb_fsdp

using namespace bnb_fsdp;

// A prepared list of tensors. The image is what its device memory has to hold.
struct bnb_fsdp_cuda_bucket {
  std::string name;
  Kernel kernel;
  int device = 0;
  bool steps_on_device = false;
  std::vector<float*> steps;
  int64_t count = 0, groups = 0, tiles = 0;
  int64_t tile_tensor = 0, tickets = 0, gradients = 0, device_steps = 0, hypers = 0;  // offsets
  const MapTables* maps = nullptr;
  std::vector<unsigned char> image;

  template <class T>
  T* at(void* memory, int64_t offset) const {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(memory) + offset);
  }
};

namespace bnb_fsdp {
namespace {

void build_image(bnb_fsdp_cuda_bucket& b, const std::vector<Entry>& entries) {
  int64_t bytes = 0;
  const auto place = [&](int64_t size) {
    const int64_t offset = bytes;
    bytes += (size + 127) / 128 * 128;
    return offset;
  };
  place(b.count * static_cast<int64_t>(sizeof(Entry)));
  b.tile_tensor = place(b.tiles * 4);
  b.tickets = place(8);
  b.gradients = place(b.count * 8);
  b.device_steps = place(b.count * 4);
  b.hypers = place(b.groups * static_cast<int64_t>(sizeof(bnb_fsdp_hyper)));
  b.image.assign(static_cast<size_t>(bytes), 0);
  unsigned char* image = b.image.data();
  if (b.count > 0) memcpy(image, entries.data(), entries.size() * sizeof(Entry));
  auto* map = reinterpret_cast<int32_t*>(image + b.tile_tensor);
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t tiles = tiles_of(entries[i].numel);
    std::fill(map, map + tiles, static_cast<int32_t>(i));
    map += tiles;
  }
}

// The device pointers of a launch.
void point(const bnb_fsdp_cuda_bucket& b, void* memory, Launch& values) {
  values.entries = b.at<const Entry>(memory, 0);
  values.tile_tensor = b.at<const int32_t>(memory, b.tile_tensor);
  values.maps = b.maps;
  values.tickets = b.at<uint32_t>(memory, b.tickets);
  values.tiles = static_cast<int32_t>(b.tiles);
  values.gradients = nullptr;
  values.steps = nullptr;
  values.hypers = nullptr;
  values.scales = nullptr;
}

float next_step(const bnb_fsdp_cuda_bucket& b, const void* const* gradients, int64_t i) {
  return b.steps_on_device || gradients[i] == nullptr ? 0.0f : *b.steps[static_cast<size_t>(i)] + 1.0f;
}

// Brings this step's values to device memory, by as many launches as their parameters take.
int upload_all(const bnb_fsdp_cuda_bucket& b, void* memory, const void* const* gradients,
               const bnb_fsdp_hyper* hypers, const float* const* rates, cudaStream_t stream, Launch& values) {
  thread_local Upload part;
  part.entries = values.entries;
  part.gradients = b.at<const void*>(memory, b.gradients);
  part.steps = b.at<float>(memory, b.device_steps);
  part.hypers = b.at<bnb_fsdp_hyper>(memory, b.hypers);
  part.steps_on_device = b.steps_on_device;
  values.gradients = part.gradients;
  values.steps = part.steps;
  values.hypers = part.hypers;
  for (int64_t tensor = 0, group = 0; tensor < b.count || group < b.groups;
       tensor += kInlineTensors, group += kInlineGroups) {
    part.first_tensor = static_cast<int32_t>(std::min(tensor, b.count));
    part.tensors = static_cast<int32_t>(std::clamp<int64_t>(b.count - tensor, 0, kInlineTensors));
    part.first_group = static_cast<int32_t>(std::min(group, b.groups));
    part.groups = static_cast<int32_t>(std::clamp<int64_t>(b.groups - group, 0, kInlineGroups));
    for (int i = 0; i < part.tensors; ++i) {
      part.inline_gradients[i] = gradients[tensor + i];
      part.inline_steps[i] = next_step(b, gradients, tensor + i);
    }
    for (int i = 0; i < part.groups; ++i) {
      part.inline_hypers[i] = hypers[group + i];
      part.rates[i] = rates != nullptr ? rates[group + i] : nullptr;
    }
    const cudaError_t error = launch_upload(part, stream);
    if (error != cudaSuccess) return fail(b.name + ": upload of a step's values", error);
  }
  return 0;
}

int set_values(const bnb_fsdp_cuda_bucket& b, void* memory, const void* const* gradients,
               const bnb_fsdp_hyper* hypers, const float* const* rates, cudaStream_t stream, Launch& values) {
  point(b, memory, values);
  bool on_device = b.steps_on_device || b.count > kInlineTensors || b.groups > kInlineGroups;
  for (int64_t i = 0; i < b.groups && rates != nullptr; ++i) on_device = on_device || rates[i] != nullptr;
  if (on_device) return upload_all(b, memory, gradients, hypers, rates, stream, values);
  if (b.count > 0) memcpy(values.inline_gradients, gradients, static_cast<size_t>(b.count) * sizeof(void*));
  for (int64_t i = 0; i < b.count; ++i) {
    // The counters lie anywhere in memory.
    if (i + 16 < b.count) __builtin_prefetch(b.steps[static_cast<size_t>(i + 16)]);
    values.inline_steps[i] = next_step(b, gradients, i);
  }
  if (b.groups > 0)
    memcpy(values.inline_hypers, hypers, static_cast<size_t>(b.groups) * sizeof(bnb_fsdp_hyper));
  return 0;
}

// Launch parameters are copied when the kernel is launched, so one buffer a thread serves all launches.
Launch& launch_buffer() {
  thread_local Launch values;
  return values;
}

// The launch of one tensor that is in no bucket.
int single(const char* rule, int bits, int parameter_dtype, int gradient_dtype, const bnb_fsdp_tensor* tensor,
           const void* gradient, const bnb_fsdp_hyper* hyper, float step, const void* maps, int device,
           Kernel& kernel, Launch& values) {
  if (tensor == nullptr || hyper == nullptr || gradient == nullptr)
    return fail("tensor, hyper or gradient is NULL");
  if (find_kernel(rule, bits, parameter_dtype, gradient_dtype, device, kernel) != 0) return 1;
  if (const char* problem = check(*tensor, bits, kernel.states, 1)) return fail(problem);
  if (bits == 8 && maps == nullptr) return fail("maps is NULL");
  values.entries = nullptr;
  values.tile_tensor = nullptr;
  values.maps = static_cast<const MapTables*>(maps);
  values.tickets = nullptr;
  values.gradients = nullptr;
  values.steps = nullptr;
  values.hypers = nullptr;
  values.scales = nullptr;
  values.tiles = static_cast<int32_t>(tiles_of(tensor->numel));
  values.single = entry_of(*tensor, bits, kernel.states, 0);
  values.inline_gradients[0] = gradient;
  values.inline_steps[0] = step;
  values.inline_hypers[0] = *hyper;
  return 0;
}

}  // namespace
}  // namespace bnb_fsdp

extern "C" {

const char* bnb_fsdp_last_error(void) { return error_message.c_str(); }

int bnb_fsdp_abi_version(void) { return BNB_FSDP_ABI_VERSION; }

const char* bnb_fsdp_build_info(void) { return BNB_FSDP_CUDA_BUILD ", architectures " BNB_FSDP_ARCHITECTURES; }

int bnb_fsdp_cuda_check(int device) {
  try {
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
    Kernel kernel;
    return find_kernel("adam", 32, BNB_FSDP_FLOAT32, BNB_FSDP_FLOAT32, device, kernel);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_set_kernels(const char* name) {
  if (name != nullptr && strcmp(name, "auto") == 0) {
    portable_only = false;
  } else if (name != nullptr && strcmp(name, "portable") == 0) {
    portable_only = true;
  } else {
    return fail("kernels " + std::string(name ? name : "(null)") + " are not known; choose auto or portable");
  }
  return 0;
}

int64_t bnb_fsdp_cuda_maps_bytes(void) { return static_cast<int64_t>(sizeof(MapTables)); }

int bnb_fsdp_cuda_maps(void* memory) {
  if (memory == nullptr || map_tables() == nullptr) return fail("memory is NULL or the maps have no tables");
  memcpy(memory, map_tables(), sizeof(MapTables));
  return 0;
}

int64_t bnb_fsdp_cuda_tiles(int64_t numel) { return tiles_of(numel); }

int bnb_fsdp_cuda_bucket_create(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                                const bnb_fsdp_tensor* tensors, int64_t count, int64_t groups,
                                int steps_on_device, const void* maps, int device,
                                bnb_fsdp_cuda_bucket** bucket) {
  try {
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
    auto b = std::make_unique<bnb_fsdp_cuda_bucket>();
    if (find_kernel(rule, bits, parameter_dtype, gradient_dtype, device, b->kernel) != 0) return 1;
    if (bits == 8 && maps == nullptr) return fail("maps is NULL");
    b->maps = static_cast<const MapTables*>(maps);
    b->name = std::string(rule) + ", " + std::to_string(bits) + "-bit states";
    b->device = device;
    b->count = count;
    b->groups = groups;
    b->steps_on_device = steps_on_device != 0;
    std::vector<Entry> entries;
    for (int64_t i = 0; i < count; ++i) {
      if (const char* problem = check(tensors[i], bits, b->kernel.states, groups))
        return fail("tensor " + std::to_string(i) + ": " + problem);
      entries.push_back(entry_of(tensors[i], bits, b->kernel.states, b->tiles));
      b->steps.push_back(tensors[i].step);
      b->tiles += tiles_of(tensors[i].numel);
      if (b->tiles >= (int64_t{1} << 31) - (1 << 20))
        return fail("the tensors have too many elements together");
    }
    build_image(*b, entries);
    *bucket = b.release();
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

void bnb_fsdp_cuda_bucket_destroy(bnb_fsdp_cuda_bucket* bucket) { delete bucket; }

const void* bnb_fsdp_cuda_bucket_image(const bnb_fsdp_cuda_bucket* bucket, int64_t* bytes) {
  *bytes = static_cast<int64_t>(bucket->image.size());
  return bucket->image.data();
}

int64_t bnb_fsdp_cuda_bucket_tiles(const bnb_fsdp_cuda_bucket* bucket) { return bucket->tiles; }

int bnb_fsdp_cuda_bucket_step(bnb_fsdp_cuda_bucket* bucket, void* memory, const void* const* gradients,
                              const bnb_fsdp_hyper* hypers, const float* const* rates, const float* scales,
                              void* stream) {
  try {
    const bnb_fsdp_cuda_bucket& b = *bucket;
    if (std::all_of(gradients, gradients + b.count, [](const void* g) { return g == nullptr; })) return 0;
    const DeviceScope scope(b.device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(b.device), scope.error());
    Launch& values = launch_buffer();
    const auto on = static_cast<cudaStream_t>(stream);
    if (set_values(b, memory, gradients, hypers, rates, on, values) != 0) return 1;
    values.scales = scales;
    if (b.tiles > 0 && launch(b.kernel, values, on, b.name) != 0) return 1;
    if (b.steps_on_device) {
      const cudaError_t error =
          launch_advance(values.entries, values.gradients, values.steps, static_cast<int>(b.count), on);
      if (error != cudaSuccess) return fail(b.name + ": step counts", error);
    }
    for (int64_t i = 0; i < b.count && !b.steps_on_device; ++i)
      if (gradients[i] != nullptr) *b.steps[static_cast<size_t>(i)] += 1.0f;
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_step(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                       const bnb_fsdp_tensor* tensor, const void* gradient, const bnb_fsdp_hyper* hyper,
                       float step, const float* scale, const void* maps, void* tickets, int device,
                       void* stream) {
  try {
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
    Kernel kernel;
    Launch& values = launch_buffer();
    if (single(rule, bits, parameter_dtype, gradient_dtype, tensor, gradient, hyper, step, maps, device, kernel,
               values) != 0)
      return 1;
    if (values.tiles == 0) return 0;
    if (kernel.tickets && values.tiles > kernel.ctas && tickets == nullptr) return fail("tickets is NULL");
    values.tickets = static_cast<uint32_t*>(tickets);
    values.scales = scale;
    return launch(kernel, values, static_cast<cudaStream_t>(stream), rule);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_norms(const char* rule, int bits, int parameter_dtype, int gradient_dtype,
                        const bnb_fsdp_tensor* tensor, const void* gradient, const bnb_fsdp_hyper* hyper,
                        float step, const void* maps, float* workspace, float* sums, int device, void* stream) {
  try {
    const DeviceScope scope(device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(device), scope.error());
    Kernel kernel;
    Launch& values = launch_buffer();
    if (single(rule, bits, parameter_dtype, gradient_dtype, tensor, gradient, hyper, step, maps, device, kernel,
               values) != 0)
      return 1;
    if (kernel.norms == nullptr) return fail(std::string(rule) + " has no update norm");
    const auto on = static_cast<cudaStream_t>(stream);
    auto* tiles = reinterpret_cast<float2*>(workspace);
    void* arguments[] = {&values, &tiles};
    cudaError_t error = cudaSuccess;
    if (values.tiles > 0)
      error = cudaLaunchKernel(kernel.norms, dim3(static_cast<unsigned>(values.tiles)), dim3(256), arguments, 0,
                               on);
    if (error == cudaSuccess)
      error = launch_sum(tiles, nullptr, 1, values.tiles, reinterpret_cast<float2*>(sums), on);
    return error == cudaSuccess ? 0 : fail(std::string(rule) + " norms", error);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

int bnb_fsdp_cuda_bucket_norms(bnb_fsdp_cuda_bucket* bucket, void* memory, const void* const* gradients,
                               const bnb_fsdp_hyper* hypers, float* workspace, float* sums, void* stream) {
  try {
    const bnb_fsdp_cuda_bucket& b = *bucket;
    if (b.kernel.norms == nullptr) return fail(b.name + ": the rule has no update norm");
    if (b.steps_on_device) return fail(b.name + ": norms need steps on the host");
    const DeviceScope scope(b.device);
    if (scope.error() != cudaSuccess) return fail("cuda:" + std::to_string(b.device), scope.error());
    Launch& values = launch_buffer();
    const auto on = static_cast<cudaStream_t>(stream);
    if (set_values(b, memory, gradients, hypers, nullptr, on, values) != 0) return 1;
    auto* tiles = reinterpret_cast<float2*>(workspace);
    void* arguments[] = {&values, &tiles};
    cudaError_t error = cudaSuccess;
    if (b.tiles > 0)
      error =
          cudaLaunchKernel(b.kernel.norms, dim3(static_cast<unsigned>(b.tiles)), dim3(256), arguments, 0, on);
    if (error == cudaSuccess && b.count > 0)
      error =
          launch_sum(tiles, values.entries, static_cast<int>(b.count), 0, reinterpret_cast<float2*>(sums), on);
    return error == cudaSuccess ? 0 : fail(b.name + ": norms", error);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

}  // extern "C"
