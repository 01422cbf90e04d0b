#include "encode_table.h"

#include <string.h>

#include <algorithm>

namespace bnb_fsdp {
namespace {

constexpr uint32_t kScale = 10u << 23;  // 1024 in units of the float32 exponent

uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

float from_bits(uint32_t b) {
  float x;
  memcpy(&x, &b, sizeof x);
  return x;
}

// What the low half of a bucket's words counts, at magnitude bits b.
uint32_t count_at(const Codebook& book, bool is_signed, bool negative, uint32_t b) {
  const uint32_t code = quantize_one(book, is_signed, from_bits(b), 1.0f);
  if (!is_signed) return code;
  const uint32_t away = code - 127;  // 0 to 128
  if (!negative) return away;
  return std::min(away > 0 ? away - 1 : 0, 126u);  // there is no code for -1, and none for -0
}

// First magnitude in (low, low + 65536) where the count changes, or 0; `changes` counts the changes.
uint32_t bound_in(const Codebook& book, bool is_signed, bool negative, uint32_t low, int& changes) {
  uint32_t bound = 0;
  changes = 0;
  for (int k = book.first; k < 255; ++k) {
    const float threshold = (book.values[k] + book.values[k + 1]) * 0.5f;
    const uint32_t b = bits_of(threshold) + (k % 2 == 0 ? 1u : 0u);  // smallest float32 with code k + 1
    if (b <= low || b >= low + 0x10000u) continue;
    if (count_at(book, is_signed, negative, b - 1) == count_at(book, is_signed, negative, b)) continue;
    bound = b;
    ++changes;
  }
  return bound;
}

bool fill(const Codebook& book, bool is_signed, uint32_t* entries) {
  const uint32_t size = is_signed ? kSignedEntries : kUnsignedEntries;
  for (uint32_t index = 0; index < size; ++index) {
    const bool negative = is_signed && (index >> 12) != 0;
    const uint32_t exponent = index >> 7 & 31, mantissa = index & 127;
    const uint32_t sign = negative ? 0x80000000u : 0u;
    if (exponent == 0) {  // the sum is negative, whatever the value
      entries[index] = negative ? 0u : 0x80000000u;
      continue;
    }
    const uint32_t low = ((exponent + 127 - 15) << 23 | mantissa << 16) - kScale;
    int changes;
    const uint32_t bound = bound_in(book, is_signed, negative, low, changes);
    if (changes > 1) return false;
    const uint32_t carry = changes == 1 ? 0x10000u - (bound - low) : 0u;
    entries[index] = (count_at(book, is_signed, negative, low) << 16) + carry - (sign | (low + kScale));
  }
  return true;
}

}  // namespace

bool fill_map_tables(MapTables& tables) {
  for (int is_signed = 0; is_signed < 2; ++is_signed)
    memcpy(tables.values[is_signed], codebook(is_signed != 0).values, sizeof tables.values[0]);
  return fill(codebook(true), true, tables.encode_signed) &&
         fill(codebook(false), false, tables.encode_unsigned);
}

}  // namespace bnb_fsdp
