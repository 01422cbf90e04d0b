// Compares one instruction set with plain code, bit for bit, without Python: it also runs under an emulator.
//
// Built by tests/test_native_kernels.py with BNB_FSDP_ISA, BNB_FSDP_LANES_* and the instruction set's flags,
// and linked with kernels.cpp as `generic`. Prints what it compared; exit status 1 on the first difference.
#include <stdio.h>
#include <stdlib.h>

#include <random>
#include <vector>

#include "../../bnb_fsdp/csrc/cpu/flush.h"
#include "../../bnb_fsdp/csrc/cpu/kernels.cpp"

using namespace bnb_fsdp;

namespace {

constexpr int64_t kNumel = 5 * kBlock + 77;
long compared = 0;

uint32_t bits(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}

template <bool Signed>
void encode(const Codebook& book, const float* values, uint8_t* codes) {
  for (int i = 0; i < kBlock; i += BNB_FSDP_ISA::kGroup)
    BNB_FSDP_ISA::encode_group<Signed>(book, values + i, BNB_FSDP_ISA::Lane(1.0f), codes + i);
}

// Every float32 from below the smallest code to above 1 (each sign where the map has one), `stride` apart.
void check_encoding(uint32_t stride) {
  alignas(64) float values[kBlock];
  uint8_t codes[kBlock];
  for (int is_signed = 0; is_signed < 2; ++is_signed)
    for (uint32_t sign = 0; sign <= (is_signed ? 0x80000000u : 0u); sign += 0x80000000u) {
      for (uint64_t b = 0x33000000u; b <= 0x3f800100u; b += static_cast<uint64_t>(kBlock) * stride) {
        for (uint32_t i = 0; i < kBlock; ++i) {
          const uint32_t value = (static_cast<uint32_t>(b) + i * stride) | sign;
          memcpy(values + i, &value, 4);
        }
        const Codebook& book = codebook(is_signed);
        if (is_signed)
          encode<true>(book, values, codes);
        else
          encode<false>(book, values, codes);
        for (int i = 0; i < kBlock; ++i, ++compared) {
          const uint8_t expected = quantize_one(book, is_signed, values[i], 1.0f);
          if (codes[i] == expected) continue;
          printf("encode signed=%d value=%08x: code %d, expected %d\n", is_signed, bits(values[i]), codes[i],
                 expected);
          exit(1);
        }
      }
      if (sign) break;  // the next step would wrap to 0
    }
}

// 16-bit data is random bits: every kind of number, NaN and infinity included.
struct Data {
  std::vector<char> parameter, gradient, states[3];
  std::vector<float> absmax[3];
};

Data make(std::mt19937& random, int bit_width, int parameter_dtype, int gradient_dtype, bool wild) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-6.0f, 0.0f);
  Data d;
  const auto fill = [&](std::vector<char>& out, int dtype, int64_t n, bool positive) {
    out.resize(n * 4);
    for (int64_t i = 0; i < n; ++i) {
      float x = normal(random) * powf(10.0f, exponent(random));
      if (positive) x = fabsf(x);
      if (wild && random() % 8 == 0) {
        const uint32_t any = random();
        memcpy(&x, &any, 4);
        if (positive) x = isnan(x) ? 0.0f : fabsf(x);
      }
      if (dtype == BNB_FSDP_FLOAT32)
        memcpy(out.data() + 4 * i, &x, 4);
      else {
        const uint16_t h =
            dtype == BNB_FSDP_BFLOAT16 ? BNB_FSDP_ISA::float_to_bfloat16(x) : BNB_FSDP_ISA::float_to_float16(x);
        memcpy(out.data() + 2 * i, &h, 2);
      }
    }
  };
  fill(d.parameter, parameter_dtype, kNumel, false);
  fill(d.gradient, gradient_dtype, kNumel, false);
  for (int s = 0; s < 3; ++s) {
    if (bit_width == 32) {
      fill(d.states[s], BNB_FSDP_FLOAT32, kNumel, s > 0);
      continue;
    }
    d.states[s].resize(kNumel);
    for (char& code : d.states[s]) code = static_cast<char>(random());
    for (int64_t b = 0; b * kBlock < kNumel; ++b)
      d.absmax[s].push_back(fabsf(normal(random)) * powf(10.0f, exponent(random)));
    if (wild) d.absmax[s][1] = 0.0f, d.absmax[s][2] = INFINITY;
  }
  if (wild && gradient_dtype == BNB_FSDP_FLOAT32) memset(d.gradient.data() + 4 * kBlock, 0, 4 * kBlock);
  return d;
}

void run(const Kernel& kernel, Data& d, int gradient_dtype, float at, int flags) {
  const bnb_fsdp_hyper hyper = {1e-3f, 0.9f, 0.999f, 0.9999f, 5.0f, 1e-8f, 0.01f, flags};
  float step = 0.0f;
  bnb_fsdp_tensor t = {d.parameter.data(), {}, {}, &step, kNumel, 0};
  for (int s = 0; s < 3; ++s) t.state[s] = d.states[s].data(), t.absmax[s] = d.absmax[s].data();
  ScalarBlock scalars;
  kernel.scalars(hyper, at, 0.75f, scalars);
  const FlushScope flush;
  kernel.run(Range{&t, d.gradient.data(), &scalars, 0, kNumel}, gradient_dtype);
}

bool both_nan(uint32_t a, uint32_t b, int dtype) {
  const uint32_t limit = dtype == BNB_FSDP_FLOAT32    ? 0x7f800000u
                         : dtype == BNB_FSDP_BFLOAT16 ? 0x7f80u
                                                      : 0x7c00u;
  const uint32_t mask = dtype == BNB_FSDP_FLOAT32 ? 0x7fffffffu : 0x7fffu;
  return (a & mask) > limit && (b & mask) > limit;
}

void compare(const char* what, const char* rule, int width, int pd, int gd, const void* a, const void* b,
             int64_t n, int dtype) {
  const int size = dtype == BNB_FSDP_FLOAT32 ? 4 : dtype < 0 ? 1 : 2;
  for (int64_t i = 0; i < n; ++i, ++compared) {
    uint32_t x = 0, y = 0;
    memcpy(&x, static_cast<const char*>(a) + i * size, size);
    memcpy(&y, static_cast<const char*>(b) + i * size, size);
    if (x == y || (dtype >= 0 && both_nan(x, y, dtype))) continue;
    printf("%s %d-bit p=%d g=%d: %s[%ld] is %08x, plain code has %08x\n", rule, width, pd, gd, what,
           static_cast<long>(i), x, y);
    exit(1);
  }
}

// Ordinary values at step 3; wild ones at step 1, zeros skipped.
void check_rule(const InstructionSet& set, const char* rule, int width, int pd, int gd, bool wild) {
  std::mt19937 random(1234u + 100 * width + 10 * pd + gd);
  Data a = make(random, width, pd, gd, wild), b = a;
  const Kernel mine = set.find(rule, width, pd), plain = generic_set.find(rule, width, pd);
  const float at = wild ? 1.0f : 3.0f;
  const int flags = wild ? BNB_FSDP_SKIP_ZEROS : 0;
  run(mine, a, gd, at, flags);
  run(plain, b, gd, at, flags);
  compare("parameter", rule, width, pd, gd, a.parameter.data(), b.parameter.data(), kNumel, pd);
  for (int s = 0; s < mine.states; ++s) {
    compare("state", rule, width, pd, gd, a.states[s].data(), b.states[s].data(), kNumel, width == 8 ? -1 : 0);
    compare("absmax", rule, width, pd, gd, a.absmax[s].data(), b.absmax[s].data(), a.absmax[s].size(), 0);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const InstructionSet& set = BNB_FSDP_JOIN(BNB_FSDP_ISA, _set);
  if (!set.supported()) return printf("%s: not supported by this processor\n", set.name), 2;
  const FlushScope flush;
  check_encoding(count > 1 ? static_cast<uint32_t>(atoi(arguments[1])) : 1);
  for (const char* rule : {"adam", "ademamix", "lion", "momentum", "rmsprop", "adagrad"})
    for (int width : {8, 32})
      for (int pd = 0; pd < 3; ++pd)
        for (int gd = 0; gd < 3; ++gd)
          for (bool wild : {false, true}) check_rule(set, rule, width, pd, gd, wild);
  printf("%s: %ld values equal\n", set.name, compared);
  return 0;
}
