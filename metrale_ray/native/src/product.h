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

struct Bf16 {
    typedef uint16_t Item;
    static constexpr int STEP = 2;  // inputs that are widened together
    static constexpr float UNIT = 1;
    static MR_INLINE void widen(const Item* at, f32v (&wide)[STEP][NV]) {
        for (int v = 0; v < NV; v++) {
            u32v pairs = *reinterpret_cast<const u32v*>(at + v * W * 2);
            wide[0][v] = as_f32(pairs << 16);
            wide[1][v] = as_f32(pairs & 0xffff0000u);
        }
    }
};

struct Fp32 {
    typedef float Item;
    static constexpr int STEP = 1;
    static constexpr float UNIT = 1;
    static MR_INLINE void widen(const Item* at, f32v (&wide)[STEP][NV]) {
        for (int v = 0; v < NV; v++) wide[0][v] = load(at + v * W);
    }
};

struct Int8 {
    typedef int8_t Item;
    static constexpr int STEP = 4;
    static constexpr float UNIT = 0x1p-24f;
    // Each item at the top of 32 bits: that is 2**24 times itself, and one shift less than itself.
    static MR_INLINE void widen(const Item* at, f32v (&wide)[STEP][NV]) {
        for (int v = 0; v < NV; v++) {
            u32v fours = *reinterpret_cast<const u32v*>(at + v * W * 4);
            wide[0][v] = signed_to_f32(fours << 24);
            wide[1][v] = signed_to_f32((fours << 16) & 0xff000000u);
            wide[2][v] = signed_to_f32((fours << 8) & 0xff000000u);
            wide[3][v] = signed_to_f32(fours & 0xff000000u);
        }
    }
    static MR_INLINE f32v signed_to_f32(u32v bits) { return __builtin_convertvector(reinterpret_cast<i32v&>(bits), f32v); }
};

// The scales of a vector of outputs, for sums in the format's units.
template <class F> MR_INLINE f32v scales_at(const float* scales) { return load(scales) * splat(F::UNIT); }

template <class F> constexpr int padded_inputs(int inputs) { return (inputs + F::STEP - 1) / F::STEP * F::STEP; }
template <class F> constexpr size_t block_items(int inputs) { return size_t(padded_inputs<F>(inputs)) * BLOCK; }
MR_INLINE int num_blocks(int outputs) { return (outputs + BLOCK - 1) / BLOCK; }

constexpr int MAX_ROWS = W == 16 ? 8 : 6;  // of one product: their sums stay in registers
constexpr int PANEL_ROWS = 8 * MAX_ROWS;   // rows that stay in the cache while blocks of weights pass
constexpr int AHEAD_BYTES = 1024;          // how far ahead of a stream its lines are asked for

template <class F, int M, int NB>
MR_INLINE void dot(const float* const* x, const typename F::Item* w, size_t stride, int inputs, f32v (&sums)[M][NB][NV]) {
    const float* rows[M];
    for (int m = 0; m < M; m++) {
        rows[m] = x[m];
        for (int b = 0; b < NB; b++)
            for (int v = 0; v < NV; v++) sums[m][b][v] = f32v{};
    }
    for (int k = 0; k < inputs; k += F::STEP) {
        for (int b = 0; b < NB; b++) {
            const typename F::Item* at = w + b * stride + size_t(k) * BLOCK;
            __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD_BYTES);
            f32v wide[F::STEP][NV];
            F::widen(at, wide);
            for (int s = 0; s < F::STEP; s++)
                for (int m = 0; m < M; m++)
                    for (int v = 0; v < NV; v++) sums[m][b][v] += rows[m][k + s] * wide[s][v];
        }
    }
}

// `rows` rows, at most MAX_ROWS, times `NB` blocks that lie `stride` items apart; calls done(row, block, sums[NV]).
template <class F, int NB, int M, class Done>
MR_INLINE void product_of(const float* const* x, const typename F::Item* w, size_t stride, int inputs, Done&& done) {
    f32v sums[M][NB][NV];
    dot<F, M, NB>(x, w, stride, padded_inputs<F>(inputs), sums);
    for (int m = 0; m < M; m++)
        for (int b = 0; b < NB; b++) done(m, b, sums[m][b]);
}

// Rows up to MAX_ROWS of one block.
template <class F, class Done>
MR_INLINE void one_block(const float* const* x, int rows, const typename F::Item* w, int inputs, Done&& done) {
    switch (rows) {
        case 1: return product_of<F, 1, 1>(x, w, 0, inputs, done);
        case 2: return product_of<F, 1, 2>(x, w, 0, inputs, done);
        case 3: return product_of<F, 1, 3>(x, w, 0, inputs, done);
        case 4: return product_of<F, 1, 4>(x, w, 0, inputs, done);
        case 5: return product_of<F, 1, 5>(x, w, 0, inputs, done);
        case 6: return product_of<F, 1, 6>(x, w, 0, inputs, done);
        case 7: if constexpr (MAX_ROWS > 6) return product_of<F, 1, 7>(x, w, 0, inputs, done); break;
        case 8: if constexpr (MAX_ROWS > 6) return product_of<F, 1, 8>(x, w, 0, inputs, done); break;
    }
}

// Any number of rows times consecutive blocks; calls done(row, block, sums[NV]) for each row and block. Few rows go over
// several blocks at once, so that enough sums are under way to hide each other's latency.
template <class F, class Done>
MR_INLINE void product(const float* const* x, int rows, const typename F::Item* w, int blocks, int inputs, Done&& done) {
#ifdef MR_TILES
    if constexpr (std::is_same<F, Bf16>::value)
        if (rows >= MIN_TILE_ROWS && inputs % TILE_INPUTS == 0) return tile_product(x, rows, w, blocks, inputs, done);
#endif
    const size_t stride = block_items<F>(inputs);
    int block = 0;
    auto at_once = [&](auto num_rows, auto num_blocks) {
        constexpr int M = decltype(num_rows)::value, NB = decltype(num_blocks)::value;
        for (; block + NB <= blocks; block += NB)
            product_of<F, NB, M>(x, w + size_t(block) * stride, stride, inputs,
                                 [&](int m, int b, const f32v(&sums)[NV]) { done(m, block + b, sums); });
    };
    typedef std::integral_constant<int, 1> One;
    typedef std::integral_constant<int, 2> Two;
    typedef std::integral_constant<int, 3> Three;
    typedef std::integral_constant<int, 4> Four;
    if (rows == 1) at_once(One(), Four());
    if (rows == 2) at_once(Two(), Two());
    if (rows == 3) at_once(Three(), Two());
    for (; block < blocks; block++)
        for (int row = 0; row < rows; row += MAX_ROWS)
            one_block<F>(x + row, rows - row < MAX_ROWS ? rows - row : MAX_ROWS, w + size_t(block) * stride, inputs,
                         [&](int m, int, const f32v(&sums)[NV]) { done(row + m, block, sums); });
}

}  // namespace MR_ISA
