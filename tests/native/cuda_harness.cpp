// Runs every CUDA kernel once or twice through the C interface, for compute-sanitizer: allocations have exactly
// the bytes their tensors need, so that an access behind them is seen. No comparisons:
// tests/test_cuda_parity.py has those.
//
//   g++ -std=c++17 -I bnb_fsdp/csrc tests/native/cuda_harness.cpp -o harness -L LIBRARY_DIRECTORY
//   -lbnb_fsdp_cuda
//       -I CUDA/include -L CUDA/lib64 -lcudart
//   compute-sanitizer --tool memcheck ./harness        (and --tool racecheck ./harness short)
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "c_api.h"

namespace {

void check(int status, const char* what) {
  if (status == 0) return;
  fprintf(stderr, "%s: %s\n", what, bnb_fsdp_last_error());
  exit(1);
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s\n", cudaGetErrorString(error));
  exit(1);
}

std::vector<void*> allocations;

// Device memory of exactly so many bytes, with this content.
void* device(const void* content, size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes > 0 ? bytes : 1));
  allocations.push_back(memory);
  if (bytes > 0) check(cudaMemcpy(memory, content, bytes, cudaMemcpyHostToDevice));
  return memory;
}

void* zeros(size_t bytes) { return device(std::vector<char>(bytes).data(), bytes); }

void free_all() {
  for (void* memory : allocations) check(cudaFree(memory));
  allocations.clear();
}

size_t size_of(int dtype) { return dtype == BNB_FSDP_FLOAT32 ? 4 : 2; }

// Values of a dtype: mostly ordinary, with NaN, infinity, zero and blocks of zeros among them.
std::vector<char> values(int64_t n, int dtype, unsigned seed) {
  std::vector<char> bytes(static_cast<size_t>(n) * size_of(dtype));
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    float x = (static_cast<int>(seed >> 8) - (1 << 23)) * 1e-7f;
    if (i / 256 % 5 == 1) x = 0.0f;
    if (i / 256 % 5 == 2 && seed % 97 == 0) x = seed & 1024 ? NAN : INFINITY;
    uint32_t b;
    memcpy(&b, &x, 4);
    if (dtype == BNB_FSDP_FLOAT32) {
      memcpy(&bytes[static_cast<size_t>(i) * 4], &b, 4);
    } else {  // the upper half is a bfloat16, and some float16
      const uint16_t half = static_cast<uint16_t>(b >> 16);
      memcpy(&bytes[static_cast<size_t>(i) * 2], &half, 2);
    }
  }
  return bytes;
}

struct Made {
  std::vector<bnb_fsdp_tensor> tensors;
  std::vector<float> steps;
  std::vector<const void*> gradients;
};

// Gradients lie `shift` elements behind the start of their memory, and end where it ends.
Made make(const std::vector<int64_t>& sizes, int states, int bits, int p, int g, int shift,
          bool steps_on_device) {
  Made made;
  made.steps.resize(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t n = sizes[i];
    bnb_fsdp_tensor t = {};
    const auto parameter = values(n, p, static_cast<unsigned>(i));
    t.parameter = device(parameter.data(), parameter.size());
    for (int s = 0; s < states; ++s) {
      t.state[s] = zeros(static_cast<size_t>(n) * (bits == 8 ? 1 : 4));
      if (bits == 8) t.absmax[s] = static_cast<float*>(zeros(static_cast<size_t>((n + 255) / 256) * 4));
    }
    t.step = steps_on_device ? static_cast<float*>(zeros(4)) : &made.steps[i];
    t.numel = n;
    t.group = static_cast<int64_t>(i % 2);
    made.tensors.push_back(t);
    const auto gradient = values(n + shift, g, 77u + static_cast<unsigned>(i));
    made.gradients.push_back(static_cast<char*>(device(gradient.data(), gradient.size())) +
                             static_cast<size_t>(shift) * size_of(g));
  }
  return made;
}

const void* maps() {
  static const void* const tables = [] {
    std::vector<char> host(static_cast<size_t>(bnb_fsdp_cuda_maps_bytes()));
    check(bnb_fsdp_cuda_maps(host.data()), "maps");
    return device(host.data(), host.size());
  }();
  return tables;
}

void run(const char* rule, int states, int bits, int p, int g, int shift, const std::vector<int64_t>& sizes,
         bool steps_on_device, cudaStream_t stream) {
  Made made = make(sizes, states, bits, p, g, shift, steps_on_device);
  const auto count = static_cast<int64_t>(sizes.size());
  bnb_fsdp_cuda_bucket* bucket = nullptr;
  check(bnb_fsdp_cuda_bucket_create(rule, bits, p, g, made.tensors.data(), count, 2, steps_on_device, maps(), 0,
                                    &bucket),
        rule);
  int64_t bytes = 0;
  const void* image = bnb_fsdp_cuda_bucket_image(bucket, &bytes);
  void* memory = device(image, static_cast<size_t>(bytes));
  const bnb_fsdp_hyper hypers[2] = {{1e-3f, 0.9f, 0.99f, 0.999f, 2.0f, 1e-8f, 0.01f, 0},
                                    {1e-2f, 0.9f, 0.99f, 0.999f, 2.0f, 1e-8f, 0.0f, BNB_FSDP_SKIP_ZEROS}};
  const float rate = 1e-3f;
  const float* rates[2] = {static_cast<const float*>(device(&rate, 4)), nullptr};
  for (int step = 0; step < 2; ++step) {
    if (step == 1) made.gradients[0] = nullptr;
    check(bnb_fsdp_cuda_bucket_step(bucket, memory, made.gradients.data(), hypers, step == 1 ? rates : nullptr,
                                    nullptr, stream),
          rule);
  }
  if (!steps_on_device && (strcmp(rule, "adam") == 0 || strcmp(rule, "momentum") == 0)) {
    const auto tiles = static_cast<size_t>(bnb_fsdp_cuda_bucket_tiles(bucket));
    check(bnb_fsdp_cuda_bucket_norms(bucket, memory, made.gradients.data(), hypers,
                                     static_cast<float*>(zeros(8 * tiles)),
                                     static_cast<float*>(zeros(8 * sizes.size())), stream),
          rule);
  }
  check(cudaStreamSynchronize(stream));
  bnb_fsdp_cuda_bucket_destroy(bucket);
  free_all();
}

}  // namespace

int main(int argc, char** argv) {
  const bool brief = argc > 1 && strcmp(argv[1], "short") == 0;
  const char* names[] = {"adam", "lion", "momentum", "rmsprop", "adagrad", "ademamix"};
  const int states[] = {2, 1, 1, 1, 1, 3};
  const std::vector<int64_t> sizes = {300, 0, 1, 255, 256, 257, 4096, 4100, 17408, 70001, 600000};
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int runs = 0;
  for (const char* kernels : {"auto", "portable"}) {
    check(bnb_fsdp_cuda_set_kernels(kernels), kernels);
    for (int rule = 0; rule < 6; ++rule)
      for (const int bits : {8, 32})
        for (int p = 0; p < 3; ++p)
          for (int g = 0; g < 3; ++g)
            for (const int shift : {0, 1, 3}) {
              if (brief && (p != g || shift == 3 || rule > 1)) continue;
              run(names[rule], states[rule], bits, p, g, shift, sizes, false, stream);
              ++runs;
            }
  }
  check(bnb_fsdp_cuda_set_kernels("auto"), "auto");
  run("adam", 2, 8, 0, 0, 0, sizes, true, stream);
  run("lion", 1, 8, 1, 1, 0, std::vector<int64_t>(brief ? 1600 : 3200, 256), false, stream);
  printf("%d runs\n", runs + 2);
  return 0;
}
