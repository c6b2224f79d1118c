// SPDX-License-Identifier: MIT OR Apache-2.0
// Products of 16 rows and more with packed bf16 weights by tile instructions (Intel AMX).
//
// A tile of rows is 16 rows of 32 inputs, a tile of weights is 16 pairs of inputs of 16 outputs, which is how packed
// blocks lie. Two tiles of rows times two of weights are summed at once, as there are eight tile registers.
//
// Rules. Sums are fp32. Rows are rounded to bf16 first, which changes only an inner layer's values, and pairs are added in
// the order of the instruction: a row's last bits differ from those of a product of fewer rows. With MR_TILES_EMULATED the instructions are plain loops, so that the rest can be tested
// anywhere.

#pragma once

#include "rows.h"
#include "scratch.h"

#ifndef MR_TILES_EMULATED
#include <immintrin.h>
#endif

namespace MR_ISA {

constexpr int TILE_ROWS = 16;
constexpr int TILE_INPUTS = 32;
constexpr int TILE_ITEMS = TILE_ROWS * TILE_INPUTS;
constexpr int MIN_TILE_ROWS = 16;  // fewer are read as fast without

// Compilers are not told that tile instructions read and write memory: this tells them.
MR_INLINE void memory_is_written(void* at) { __asm__ volatile("" : : "r"(at) : "memory"); }

// Sums of two tiles of rows times two tiles of weights: [0] and [1] the first rows', [2] and [3] the second rows'.
#ifdef MR_TILES_EMULATED

class Tiles {
  public:
    void clear() { std::memset(sums_, 0, sizeof(sums_)); }
    void add(const uint16_t* x0, const uint16_t* x1, const uint16_t* w0, const uint16_t* w1) {
        dot(x0, w0, sums_[0]);
        dot(x0, w1, sums_[1]);
        dot(x1, w0, sums_[2]);
        dot(x1, w1, sums_[3]);
    }
    void store(float (*to)[TILE_ROWS * BLOCK]) const { std::memcpy(to, sums_, sizeof(sums_)); }

  private:
    static void dot(const uint16_t* x, const uint16_t* w, float* sums) {
        for (int m = 0; m < TILE_ROWS; m++)
            for (int n = 0; n < BLOCK; n++)
                for (int k = 0; k < TILE_INPUTS; k++)
                    sums[m * BLOCK + n] += bf16_to_f32(x[m * TILE_INPUTS + k]) * bf16_to_f32(w[(k / 2 * BLOCK + n) * 2 + k % 2]);
    }
    float sums_[4][TILE_ROWS * BLOCK];
};

#else

// The eight tile registers, each of 16 rows of 64 bytes, are this thread's from construction to destruction. The
// instructions name their registers, which no variable can.
class Tiles {
  public:
    MR_INLINE Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        memory_is_written(&shape);
        _tile_loadconfig(&shape);
    }
    MR_INLINE ~Tiles() { _tile_release(); }
    MR_INLINE void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    MR_INLINE void add(const uint16_t* x0, const uint16_t* x1, const uint16_t* w0, const uint16_t* w1) {
        _tile_loadd(4, x0, 64);
        _tile_loadd(5, x1, 64);
        _tile_loadd(6, w0, 64);
        _tile_loadd(7, w1, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    MR_INLINE void store(float (*to)[TILE_ROWS * BLOCK]) const {
        _tile_stored(0, to[0], 64);
        _tile_stored(1, to[1], 64);
        _tile_stored(2, to[2], 64);
        _tile_stored(3, to[3], 64);
        memory_is_written(to);
    }
};

#endif

// Rows as tiles: [rows/16][inputs/32][16][32], the last rows filled up with zeros.
inline void rows_as_tiles(const float* const* x, int rows, int inputs, uint16_t* to) {
    for (int row = 0; row < (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; row++)
        for (int k = 0; k < inputs; k += W) {
            uint16_t* at = to + (size_t(row / TILE_ROWS) * (inputs / TILE_INPUTS) + k / TILE_INPUTS) * TILE_ITEMS +
                           row % TILE_ROWS * TILE_INPUTS + k % TILE_INPUTS;
            store_bf16(at, row < rows ? load(x[row] + k) : f32v{});
        }
}

// See product(). `inputs` is a multiple of TILE_INPUTS.
template <class Done>
inline void tile_product(const float* const* x, int rows, const uint16_t* w, int blocks, int inputs, Done&& done) {
    const size_t stride = size_t(inputs) * BLOCK, row_stride = size_t(inputs) * TILE_ROWS;
    const int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, steps = inputs / TILE_INPUTS;
    Scratch& memory = tile_scratch();
    memory.reset(Scratch::bytes_of<uint16_t>(size_t(row_tiles) * row_stride));
    uint16_t* as_tiles = memory.take<uint16_t>(size_t(row_tiles) * row_stride);
    rows_as_tiles(x, rows, inputs, as_tiles);
    memory_is_written(as_tiles);
    Tiles tiles;
    alignas(64) float sums[4][TILE_ROWS * BLOCK];
    for (int block = 0; block < blocks; block += 2) {
        const uint16_t* w0 = w + block * stride;
        const uint16_t* w1 = block + 1 < blocks ? w0 + stride : w0;  // the second of a pair that is none is not used
        for (int tile = 0; tile < row_tiles; tile += 2) {
            const uint16_t* x0 = as_tiles + tile * row_stride;
            const uint16_t* x1 = tile + 1 < row_tiles ? x0 + row_stride : x0;
            tiles.clear();
            for (int step = 0; step < steps; step++) {
                const int at = step * TILE_ITEMS;
                tiles.add(x0 + at, x1 + at, w0 + at, w1 + at);
            }
            tiles.store(sums);
            for (int t = 0; t < 2; t++)
                for (int b = 0; b < 2 && block + b < blocks; b++)
                    for (int m = 0; m < TILE_ROWS && (tile + t) * TILE_ROWS + m < rows; m++) {
                        f32v values[NV];
                        for (int v = 0; v < NV; v++) values[v] = load(sums[t * 2 + b] + m * BLOCK + v * W);
                        done((tile + t) * TILE_ROWS + m, block + b, values);
                    }
        }
    }
}

}  // namespace MR_ISA
