#include "codebook.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace bnb_fsdp {
namespace {

uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

// torch.linspace(0.1, 1, count)[k] in float32: one fused multiply-add from the nearer end.
float point(int count, int k) {
  const float step = (1.0f - 0.1f) / static_cast<float>(count - 1);
  return k < count / 2 ? fmaf(step, static_cast<float>(k), 0.1f)
                       : fmaf(-step, static_cast<float>(count - 1 - k), 1.0f);
}

void fill_values(bool is_signed, float* values) {
  static const double scales[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  int n = 0;
  values[n++] = 0.0f;
  values[n++] = 1.0f;
  for (int decade = 0; decade < 7; ++decade) {
    const int count = (is_signed ? 1 << decade : 2 << decade) + 1;
    for (int k = 0; k + 1 < count; ++k) {
      const float middle = (point(count, k) + point(count, k + 1)) / 2.0f;
      const float value = static_cast<float>(scales[decade]) * middle;
      values[n++] = value;
      if (is_signed) values[n++] = -value;
    }
  }
  std::sort(values, values + 256);
}

// Bits of the smallest float32 with code k + 1 or more (k >= the code of zero, so the bound is positive).
uint32_t bound_after(const Codebook& book, int k) {
  const float threshold = (book.values[k] + book.values[k + 1]) * 0.5f;
  return bits_of(threshold) + (k % 2 == 0 ? 1u : 0u);
}

uint32_t magnitude_code(const Codebook& book, float magnitude) {
  const uint32_t b = std::min(std::max(bits_of(magnitude), kLowBits), kHighBits);
  return (book.buckets[(b >> 16) - (kLowBits >> 16)] + b) >> 16;
}

void fill_decades(bool is_signed, Codebook& book) {
  const float one =
      static_cast<float>(1 << (23 - kFractionBits));  // the last mantissa bit is 2^-kFractionBits here
  // starts[d]: bits of the smallest float32 whose code belongs to decade d.
  uint32_t starts[9] = {kLowBits};
  for (int d = 0; d < 16; ++d) {
    int top = d == 0 ? book.first : 255;
    book.slope[d] = 0.0f;
    book.offset[d] = one + static_cast<float>(top) + 0.5f;
    if (d >= 1 && d <= 7) {
      const int cells = is_signed ? 1 << (d - 1) : 1 << d;
      const int base = is_signed ? 127 + cells : cells - 1;  // code of the decade's first value
      book.slope[d] = static_cast<float>(cells * pow(10.0, 7 - d) / 0.9);
      book.offset[d] = static_cast<float>(one + base - cells * 0.1 / 0.9);
      top = base + cells - 1;
    }
    book.top[d] = static_cast<int32_t>(bits_of(one + static_cast<float>(top) + 0.5f));
    if (d < 8) starts[d + 1] = bound_after(book, top);
  }
  for (uint32_t exponent = 96; exponent < 128; ++exponent) {
    int decade = 0;
    while (decade < 8 && starts[decade + 1] <= exponent << 23) ++decade;
    book.binade_decade[exponent & 31] = decade;
    const bool ends = decade < 8 && starts[decade + 1] < (exponent + 1) << 23;
    book.binade_bound[exponent & 31] = ends ? static_cast<int32_t>(starts[decade + 1]) : INT32_MAX;
  }
}

void fill_buckets(Codebook& book) {
  int code = book.first;
  for (int i = 0; i < kBuckets; ++i) {
    const uint32_t top = (kLowBits >> 16) + static_cast<uint32_t>(i);
    const uint32_t start = top << 16;
    while (code < 255 && bound_after(book, code) <= start) ++code;
    uint32_t entry = static_cast<uint32_t>(code) << 16;
    if (code < 255 && bound_after(book, code) < start + 0x10000u)
      entry += 0x10000u - (bound_after(book, code) - start);
    book.buckets[i] = entry - start;
  }
}

void build(bool is_signed, Codebook& book) {
  fill_values(is_signed, book.values);
  book.first = is_signed ? 127 : 0;
  fill_buckets(book);
  fill_decades(is_signed, book);
  for (int i = 0; i < 256; ++i) {
    const uint32_t b = bits_of(book.values[i]);
    for (int plane = 0; plane < 4; ++plane) book.planes[plane][i] = static_cast<uint8_t>(b >> (8 * plane));
  }
}

}  // namespace

const Codebook& codebook(bool is_signed) {
  struct Both {
    Codebook books[2];
    Both() {
      build(false, books[0]);
      build(true, books[1]);
    }
  };
  static const Both both;
  return both.books[is_signed ? 1 : 0];
}

uint8_t quantize_one(const Codebook& book, bool is_signed, float state, float inverse_absmax) {
  const float x = state * inverse_absmax;
  if (!is_signed) return isnan(x) || x <= 0.0f ? 0 : static_cast<uint8_t>(magnitude_code(book, x));
  uint32_t code = 0;  // NaN, as upstream's search falls through to the first code
  if (!isnan(x)) {
    code = magnitude_code(book, fabsf(x));
    if (signbit(x)) code = 254u - std::min(code, 254u);
  }
  const bool negative = signbit(state) && !isnan(state);
  if (signbit(book.values[code]) != negative) code += state > 0.0f ? 1u : 255u;
  return static_cast<uint8_t>(code);
}

}  // namespace bnb_fsdp
