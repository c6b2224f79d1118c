// SPDX-License-Identifier: MIT OR Apache-2.0
// What the library exports: a C interface on raw pointers. Python binds it by name, see ../library.py.

#pragma once

#include <cstddef>
#include <cstdint>

#define MR_API extern "C" __attribute__((visibility("default")))

// Number formats, of activations and of packed weights. Python has the same numbers, see ../library.py.
enum Format : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, FP16 = 3 };  // FP16 in sums between ranks alone

enum Activation : int32_t { SILU = 0, RELU = 1, GELU = 2, GELU_TANH = 3 };

// Packed weights [outputs, inputs], see product.h. `scales` [outputs] only for INT8. `bias` [outputs] or null.
struct Matrix {
    const void* items;
    const float* scales;
    const void* bias;  // of the activations' format
    int32_t outputs, inputs;
    int32_t format;
};

// A layer's experts, or one gated mlp. Both are packed expert by expert: gate_up [count][2, gate first][inner, hidden],
// down [count][hidden, inner]. `first` is the number of the first of them among all.
struct Experts {
    const void* gate_up;
    const void* down;
    const float* gate_up_scales;  // [count, 2, inner padded to blocks]
    const float* down_scales;     // [count, hidden padded to blocks]
    int32_t first, count, hidden, inner;
    int32_t format, activation;
};

// Rows of activations: `stride` items from one to the next.
struct Rows {
    void* items;
    int64_t stride;
    int32_t count, format;
};

// One layer's keys and values: [places, 2, kv heads, head_dim], a token's place being block · block_size + offset.
struct Cache {
    void* items;
    int32_t kv_heads, head_dim, block_size, num_blocks, format;
};

// A step's spans: span i has rows first_row[i] .. first_row[i + 1] - 1, its first token at position start[i], and its
// block table at blocks[first_block[i]]. `num_blocks` counts all entries of the tables.
struct Spans {
    const int32_t* first_row;
    const int32_t* start;
    const int32_t* first_block;
    const int32_t* blocks;
    int32_t count, num_blocks;
};
