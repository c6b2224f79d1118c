// SPDX-License-Identifier: MIT OR Apache-2.0
// out = x · W^T (+ bias) (+ out): each thread computes a run of W's blocks, for all rows.

#pragma once

#include "parallel.h"
#include "product.h"
#include "rows.h"
#include "scratch.h"

namespace MR_ISA {

// The rows of `x` as fp32, one after another, padded; `starts` points at each.
template <class F> struct WideRows {
    float* items;
    const float** starts;
    int padded;

    static size_t bytes(int rows, int width) {
        return Scratch::bytes_of<float>(size_t(rows) * padded_inputs<F>(width)) + Scratch::bytes_of<const float*>(rows);
    }
    WideRows(Scratch& memory, int rows, int width)
        : items(memory.take<float>(size_t(rows) * padded_inputs<F>(width))),
          starts(memory.take<const float*>(rows)),
          padded(padded_inputs<F>(width)) {}
    void fill(const Rows& x, int width, int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) {
            starts[row] = items + row * padded;
            widen_row(row_at(x, row), x.format, width, padded, items + row * padded);
        }
    }
};

template <class F> void linear_of(const Matrix& matrix, const Rows& x, const Rows& out, bool add, int threads) {
    typedef typename F::Item Item;
    const int inputs = matrix.inputs, outputs = matrix.outputs;
    Scratch& memory = scratch();
    memory.reset(WideRows<F>::bytes(x.count, inputs));
    WideRows<F> wide(memory, x.count, inputs);
    parallel(threads, [&](Team& team) {
        int64_t from, to;
        team.share(x.count, from, to);
        wide.fill(x, inputs, from, to);
        team.barrier();
        team.share(num_blocks(outputs), from, to);
        const Item* w = static_cast<const Item*>(matrix.items) + size_t(from) * block_items<F>(inputs);
        for (int row = 0; row < x.count; row += PANEL_ROWS) {
            int rows = x.count - row < PANEL_ROWS ? x.count - row : PANEL_ROWS;
            product<F>(wide.starts + row, rows, w, int(to - from), inputs, [&](int r, int b, const f32v(&sums)[NV]) {
                int first = (int(from) + b) * BLOCK;
                f32v values[NV];
                for (int v = 0; v < NV; v++) {
                    values[v] = sums[v];
                    if (matrix.scales != nullptr) values[v] *= scales_at<F>(matrix.scales + first + v * W);
                    if (matrix.bias != nullptr)
                        for (int i = 0; i < W && first + v * W + i < outputs; i++)
                            values[v][i] += item_at(matrix.bias, x.format, first + v * W + i);
                }
                put_block(row_at(out, row + r), out.format, first, outputs, values, add);
            });
        }
    });
}

inline void linear(const Matrix* matrix, const Rows* x, const Rows* out, int32_t add, int32_t threads) {
    switch (matrix->format) {
        case FP32: return linear_of<Fp32>(*matrix, *x, *out, add, threads);
        case BF16: return linear_of<Bf16>(*matrix, *x, *out, add, threads);
        case INT8: return linear_of<Int8>(*matrix, *x, *out, add, threads);
    }
}

}  // namespace MR_ISA
