// SPDX-License-Identifier: MIT OR Apache-2.0
// Rows of activations: reading them as fp32, and writing fp32 into their format.

#pragma once

#include "api.h"
#include "vectors.h"

namespace MR_ISA {

MR_INLINE size_t item_bytes(int32_t format) { return format == FP32 ? 4 : format == BF16 ? 2 : 1; }

MR_INLINE char* row_at(const Rows& rows, int64_t row) {
    return static_cast<char*>(rows.items) + size_t(row) * size_t(rows.stride) * item_bytes(rows.format);
}

MR_INLINE float item_at(const void* items, int32_t format, int64_t index) {
    return format == FP32 ? static_cast<const float*>(items)[index] : bf16_to_f32(static_cast<const uint16_t*>(items)[index]);
}

MR_INLINE void set_item(void* items, int32_t format, int64_t index, float value) {
    if (format == FP32) static_cast<float*>(items)[index] = value;
    else static_cast<uint16_t*>(items)[index] = f32_to_bf16(value);
}

MR_INLINE f32v load_items(const void* items, int32_t format, int64_t index) {
    return format == FP32 ? load(static_cast<const float*>(items) + index) : load_bf16(static_cast<const uint16_t*>(items) + index);
}

MR_INLINE void store_items(void* items, int32_t format, int64_t index, f32v value) {
    if (format == FP32) store(static_cast<float*>(items) + index, value);
    else store_bf16(static_cast<uint16_t*>(items) + index, value);
}

// `width` items as fp32, and zeros up to `padded`.
MR_INLINE void widen_row(const void* items, int32_t format, int width, int padded, float* to) {
    int i = 0;
    for (; i + W <= width; i += W) store(to + i, load_items(items, format, i));
    for (; i < width; i++) to[i] = item_at(items, format, i);
    for (; i < padded; i++) to[i] = 0;
}

// A vector of a block's outputs into a row that ends at `width`, added to what is there when `add`.
MR_INLINE void put_block(void* row, int32_t format, int first, int width, const f32v (&values)[NV], bool add) {
    for (int v = 0; v < NV; v++) {
        int at = first + v * W;
        if (at + W <= width) {
            store_items(row, format, at, add ? values[v] + load_items(row, format, at) : values[v]);
            continue;
        }
        for (int i = 0; i < W && at + i < width; i++)
            set_item(row, format, at + i, add ? values[v][i] + item_at(row, format, at + i) : values[v][i]);
    }
}

MR_INLINE f32v activate(f32v x, int32_t activation) {
    switch (activation) {
        case SILU: return x * reciprocal(splat(1.0f) + exp(-x));
        case RELU: return select(x < splat(0.0f), splat(0.0f), x);  // what is no number stays none
        case GELU_TANH: {
            // 0.5 x (1 + tanh(u)) = x · sigmoid(2u)
            f32v u = splat(0.7978845608028654f) * (x + splat(0.044715f) * x * x * x);
            return x * reciprocal(splat(1.0f) + exp(u * splat(-2.0f)));
        }
        default: {
            f32v result;
            for (int i = 0; i < W; i++) result[i] = 0.5f * x[i] * (1.0f + __builtin_erff(x[i] * 0.7071067811865476f));
            return result;
        }
    }
}

}  // namespace MR_ISA
