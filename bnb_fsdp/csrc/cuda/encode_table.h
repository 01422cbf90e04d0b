// Tables that find the code of a value x in [-1, 1] in O(1), for CUDA.
//
// y = 1024 x, truncated to float16, gives an index of sign, exponent and seven bits of mantissa: a bucket of
// 65,536 neighbouring float32 values. Within one, a map has at most one bound, so that
//     max(int(entry + bits(y)), 0) >> 16
// is the code (unsigned map) or, for the signed map, the number q of codes away from zero: code 127 + q for
// x >= 0, 126 - q for x < 0 (a negative value is never coded as zero). The low bits of y carry into the code
// when they pass the bound. Values too small for a normal float16 give 0.
#pragma once
#include "../quantize/codebook.h"
#include "table.h"

namespace bnb_fsdp {

// Both maps. False if a bucket had two bounds, which the maps of bitsandbytes do not have.
bool fill_map_tables(MapTables& tables);

}  // namespace bnb_fsdp
