// SPDX-License-Identifier: MIT OR Apache-2.0
// Products of a few rows with blocks of packed weights: what the other kernels are made of.
//
// Packed weights. 16 outputs form a block; a block holds its inputs one after another, so a product reads memory front
// to back. The formats:
//   BF16  [outputs/16][inputs/2][16][2]  pairs of inputs lie together, as tile instructions want them
//   FP32  [outputs/16][inputs][16]
//   INT8  [outputs/16][inputs/4][16][4]  and one fp32 scale for each output; sums are in units of Int8::UNIT scales
// Outputs and inputs are padded with zeros.
//
// Rules. Each output is one running sum over the inputs in order, in fp32, whatever the number of rows or blocks: a
// row's result does not depend on the rows beside it (but see tiles.h). Rows are fp32, their inputs padded to the format's
// step.

#pragma once

#include <type_traits>

#include "vectors.h"
#ifdef MR_TILES
#include "tiles.h"
#endif

namespace MR_ISA {

// Each format: the items of STEP inputs lie together, and widen<S> gives those of the S-th, in units of UNIT.
struct Bf16 {
    typedef uint16_t Item;
    static constexpr int STEP = 2;
    static constexpr float UNIT = 1;
    template <int S> static MR_INLINE void widen(const Item* at, f32v (&wide)[NV]) {
        for (int v = 0; v < NV; v++) {
            u32v pairs = *reinterpret_cast<const u32v*>(at + v * W * 2);
            wide[v] = as_f32(S == 0 ? pairs << 16 : pairs & 0xffff0000u);
        }
    }
};

struct Fp32 {
    typedef float Item;
    static constexpr int STEP = 1;
    static constexpr float UNIT = 1;
    template <int S> static MR_INLINE void widen(const Item* at, f32v (&wide)[NV]) {
        for (int v = 0; v < NV; v++) wide[v] = load(at + v * W);
    }
};

struct Int8 {
    typedef int8_t Item;
    static constexpr int STEP = 4;
    static constexpr float UNIT = 0x1p-24f;
    // Each item at the top of 32 bits: that is 2**24 times itself, and one shift less than itself.
    template <int S> static MR_INLINE void widen(const Item* at, f32v (&wide)[NV]) {
        for (int v = 0; v < NV; v++) {
            u32v fours = *reinterpret_cast<const u32v*>(at + v * W * 4);
            u32v top = S == 0 ? fours << 24 : (fours << (24 - 8 * S)) & 0xff000000u;
            wide[v] = __builtin_convertvector(reinterpret_cast<i32v&>(top), f32v);
        }
    }
};

// The scales of a vector of outputs, for sums in the format's units.
template <class F> MR_INLINE f32v scales_at(const float* scales) { return load(scales) * splat(F::UNIT); }

template <class F> constexpr int padded_inputs(int inputs) { return (inputs + F::STEP - 1) / F::STEP * F::STEP; }
template <class F> constexpr size_t block_items(int inputs) { return size_t(padded_inputs<F>(inputs)) * BLOCK; }
MR_INLINE int num_blocks(int outputs) { return (outputs + BLOCK - 1) / BLOCK; }

constexpr int MAX_ROWS = W == 16 ? 8 : 6;  // of one product: their sums stay in registers
constexpr int PANEL_ROWS = 8 * MAX_ROWS;   // rows that stay in the cache while blocks of weights pass
constexpr int AHEAD_BYTES = 1024;          // how far ahead of a stream its lines are asked for

// The S-th of the inputs that lie together, added to all sums. One at a time, so that few registers hold what is widened.
template <class F, int S, int M, int NB>
MR_INLINE void add_input(const float* const (&rows)[M], int k, int b, const typename F::Item* at, f32v (&total)[M][NB][NV]) {
    if constexpr (S < F::STEP) {
        f32v wide[NV];
        F::template widen<S>(at, wide);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < NV; v++) total[m][b][v] += rows[m][k + S] * wide[v];
    }
}

// The sums of M rows times NB blocks that lie `stride` items apart: into `sums` [M][NB][BLOCK]. They stay in registers
// while the inputs pass. Kernels call it instead of inlining it, so its few forms are compiled once.
template <class F, int M, int NB>
__attribute__((noinline)) void dot(const float* const* x, const typename F::Item* w, size_t stride, int inputs, float* sums) {
    const float* rows[M];
    f32v total[M][NB][NV];
    for (int m = 0; m < M; m++) {
        rows[m] = x[m];
        for (int b = 0; b < NB; b++)
            for (int v = 0; v < NV; v++) total[m][b][v] = f32v{};
    }
    for (int k = 0; k < inputs; k += F::STEP) {
        for (int b = 0; b < NB; b++) {
            const typename F::Item* at = w + b * stride + size_t(k) * BLOCK;
            __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD_BYTES);
            add_input<F, 0>(rows, k, b, at, total);
            add_input<F, 1>(rows, k, b, at, total);
            add_input<F, 2>(rows, k, b, at, total);
            add_input<F, 3>(rows, k, b, at, total);
        }
    }
    for (int m = 0; m < M; m++)
        for (int b = 0; b < NB; b++)
            for (int v = 0; v < NV; v++) store(sums + (m * NB + b) * BLOCK + v * W, total[m][b][v]);
}

// `rows` rows times `blocks` blocks: up to MAX_ROWS times one, and as many blocks as blocks_at_once() says.
template <class F>
MR_INLINE void dot_some(const float* const* x, int rows, const typename F::Item* w, size_t stride, int blocks, int inputs, float* sums) {
    switch (rows) {
        case 1: return blocks > 1 ? dot<F, 1, 4>(x, w, stride, inputs, sums) : dot<F, 1, 1>(x, w, stride, inputs, sums);
        case 2: return blocks > 1 ? dot<F, 2, 2>(x, w, stride, inputs, sums) : dot<F, 2, 1>(x, w, stride, inputs, sums);
        case 3: return blocks > 1 ? dot<F, 3, 2>(x, w, stride, inputs, sums) : dot<F, 3, 1>(x, w, stride, inputs, sums);
        case 4: return dot<F, 4, 1>(x, w, stride, inputs, sums);
        case 5: return dot<F, 5, 1>(x, w, stride, inputs, sums);
        case 6: return dot<F, 6, 1>(x, w, stride, inputs, sums);
        case 7: if constexpr (MAX_ROWS > 6) return dot<F, 7, 1>(x, w, stride, inputs, sums); break;
        case 8: if constexpr (MAX_ROWS > 6) return dot<F, 8, 1>(x, w, stride, inputs, sums); break;
    }
}
// Few rows go over several blocks at once, so that enough sums are under way to hide each other's latency.
MR_INLINE int blocks_at_once(int rows) { return rows == 1 ? 4 : rows == 2 || rows == 3 ? 2 : 1; }

// Calls done(row, block, sums[NV]) for each of `rows` rows and `blocks` blocks of `sums`, the rows from `row` on and the
// blocks from `block` on.
template <class Done> MR_INLINE void hand_over(const float* sums, int row, int rows, int block, int blocks, Done&& done) {
    for (int m = 0; m < rows; m++)
        for (int b = 0; b < blocks; b++) {
            f32v values[NV];
            for (int v = 0; v < NV; v++) values[v] = load(sums + (m * blocks + b) * BLOCK + v * W);
            done(row + m, block + b, values);
        }
}

// Up to MAX_ROWS rows times one block; calls done(row, 0, sums[NV]) for each row.
template <class F, class Done>
MR_INLINE void one_block(const float* const* x, int rows, const typename F::Item* w, int inputs, Done&& done) {
    alignas(64) float sums[MAX_ROWS * BLOCK];
    dot_some<F>(x, rows, w, 0, 1, padded_inputs<F>(inputs), sums);
    hand_over(sums, 0, rows, 0, 1, done);
}

// Any number of rows times consecutive blocks; calls done(row, block, sums[NV]) for each row and block.
template <class F, class Done>
MR_INLINE void product(const float* const* x, int rows, const typename F::Item* w, int blocks, int inputs, Done&& done) {
#ifdef MR_TILES
    if constexpr (std::is_same<F, Bf16>::value)
        if (rows >= MIN_TILE_ROWS && inputs % TILE_INPUTS == 0) return tile_product(x, rows, w, blocks, inputs, done);
#endif
    const size_t stride = block_items<F>(inputs);
    alignas(64) float sums[MAX_ROWS * BLOCK];
    for (int block = 0, some_blocks; block < blocks; block += some_blocks) {
        some_blocks = block + blocks_at_once(rows) <= blocks ? blocks_at_once(rows) : 1;
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int some_rows = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            dot_some<F>(x + row, some_rows, w + size_t(block) * stride, stride, some_blocks, padded_inputs<F>(inputs), sums);
            hand_over(sums, row, some_rows, block, some_blocks, done);
        }
    }
}

}  // namespace MR_ISA
