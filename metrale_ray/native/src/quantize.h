// SPDX-License-Identifier: MIT OR Apache-2.0
// Rows of floats into packed 8-bit blocks (see product.h), in steps of scales that the caller gives.
//
// Rules. An item is its weight over its output's scale, rounded to the nearest, to even on a tie; the scale is at least
// the row's largest magnitude over 127. Where it is 0 or no finite number the items are 0.

#pragma once

#include "pack.h"

namespace MR_ISA {

constexpr int QUANTIZED_AT_ONCE = 256;  // inputs of 16 rows that stay in the cache between rounding and packing

// To whole numbers of at most 127; what is no number becomes 0.
MR_INLINE i32v steps(f32v quotient) {
    const f32v magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds, to even on a tie
    f32v whole = (quotient + magic) - magic;
    return __builtin_convertvector(select(quotient == quotient, whole, splat(0.0f)), i32v);
}

// `count` items of a row from `at` on.
MR_INLINE void quantize_run(const void* row, int32_t format, int at, int count, float scale, int8_t* to) {
    // A quotient, not a product: a product and the rounding could become one operation, with another result.
    const f32v divisor = splat(scale > 0 ? scale : INFINITY);
    int32_t whole[QUANTIZED_AT_ONCE];
    int i = 0;
    for (; i + W <= count; i += W)
        *reinterpret_cast<i32v*>(whole + i) = steps(load_items(row, format, at + i) / divisor);
    for (; i < count; i++) whole[i] = steps(splat(item_at(row, format, at + i)) / divisor)[0];
    for (; i % Int8::STEP != 0; i++) whole[i] = 0;
    for (int n = 0; n < i; n++) to[n] = int8_t(whole[n]);  // a loop of its own, which compilers narrow many at a time
}

// The outputs `first_lane` .. `last_lane` - 1 of a block.
inline void quantize_block(const char* const* rows, int32_t format, int first_lane, int last_lane, int inputs,
                           const float* scales, int8_t* block) {
    alignas(64) int8_t runs[BLOCK][QUANTIZED_AT_ONCE];
    const char* units[BLOCK];
    for (int lane = 0; lane < BLOCK; lane++) units[lane] = reinterpret_cast<const char*>(runs[lane]);
    for (int at = 0; at < inputs; at += QUANTIZED_AT_ONCE) {
        const int count = inputs - at < QUANTIZED_AT_ONCE ? inputs - at : QUANTIZED_AT_ONCE;
        for (int lane = first_lane; lane < last_lane; lane++)
            quantize_run(rows[lane], format, at, count, scales[lane], runs[lane]);
        // Four inputs of an output are one unit, the last ones filled up with zeros.
        pack_units(units, first_lane, last_lane, padded_inputs<Int8>(count) / Int8::STEP,
                   reinterpret_cast<uint32_t*>(block + size_t(at) * BLOCK));
    }
}

// `rows` become the outputs from `first_output` on of a matrix that has `scales` [outputs, padded to blocks].
inline void quantize(const Rows* rows, int32_t inputs, int32_t first_output, const float* scales, void* items,
                     int32_t threads) {
    const int64_t end = int64_t(first_output) + rows->count;
    const int64_t first_block = first_output / BLOCK, last_block = (end + BLOCK - 1) / BLOCK;
    parallel(threads, [&](Team& team) {
        int64_t from, to;
        team.share(last_block - first_block, from, to);
        for (int64_t block = first_block + from; block < first_block + to; block++) {
            const int64_t begin = block * BLOCK;
            const int first = begin < first_output ? int(first_output - begin) : 0;
            const int last = end - begin < BLOCK ? int(end - begin) : BLOCK;
            const char* at[BLOCK] = {};
            for (int lane = first; lane < last; lane++) at[lane] = row_at(*rows, begin + lane - first_output);
            quantize_block(at, rows->format, first, last, inputs, scales + begin,
                           static_cast<int8_t*>(items) + size_t(block) * block_items<Int8>(inputs));
        }
    });
}

}  // namespace MR_ISA
