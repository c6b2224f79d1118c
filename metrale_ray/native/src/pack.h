// SPDX-License-Identifier: MIT OR Apache-2.0
// Between rows as checkpoints store them and packed blocks (see product.h).

#pragma once

#include "parallel.h"
#include "product.h"
#include "rows.h"

namespace MR_ISA {

typedef uint32_t Octet __attribute__((vector_size(32), aligned(1), may_alias));  // 16-bit rows may begin anywhere

template <int A, int B, int C, int D, int E, int F, int G, int H> MR_INLINE Octet shuffle(Octet x, Octet y) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, A, B, C, D, E, F, G, H);
#else
    typedef uint32_t Mask __attribute__((vector_size(32)));
    return __builtin_shuffle(x, y, Mask{A, B, C, D, E, F, G, H});
#endif
}

// 8 units of 8 rows, `to_stride` units from one column to the next.
MR_INLINE void transpose(const char* const* rows, int at, uint32_t* to, int to_stride) {
    Octet r[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) r[i] = *reinterpret_cast<const Octet*>(rows[i] + size_t(at) * 4);
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = shuffle<0, 8, 1, 9, 4, 12, 5, 13>(r[i], r[i + 1]);
        pairs[i + 1] = shuffle<2, 10, 3, 11, 6, 14, 7, 15>(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(pairs[i + j], pairs[i + j + 2]);
        }
    for (int c = 0; c < 4; c++) {
        *reinterpret_cast<Octet*>(to + c * to_stride) = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(fours[c], fours[c + 4]);
        *reinterpret_cast<Octet*>(to + (c + 4) * to_stride) = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(fours[c], fours[c + 4]);
    }
}

// One block of 16 outputs from up to 16 rows of units of 32 bits; lanes without a row stay as they are.
inline void pack_units(const char* const* rows, int first_lane, int last_lane, int units, uint32_t* block) {
    int begin = 0;
    if (first_lane == 0 && last_lane == BLOCK)
        for (; begin + 8 <= units; begin += 8) {
            transpose(rows, begin, block + begin * BLOCK, BLOCK);
            transpose(rows + 8, begin, block + begin * BLOCK + 8, BLOCK);
        }
    for (; begin < units; begin++)
        for (int lane = first_lane; lane < last_lane; lane++)
            std::memcpy(block + begin * BLOCK + lane, rows[lane] + size_t(begin) * 4, 4);
}

// Rows without gaps, of the format of the matrix, which is not INT8 (see quantize.h).
inline void pack(const void* rows, int32_t format, int32_t first_row, int32_t num_rows, int32_t inputs, void* items,
                 int32_t threads) {
    const int first_block = first_row / BLOCK, last_block = (first_row + num_rows + BLOCK - 1) / BLOCK;
    const size_t row_bytes = size_t(inputs) * item_bytes(format);
    parallel(threads, [&](Team& team) {
        int64_t from, to;
        team.share(last_block - first_block, from, to);
        for (int64_t block = first_block + from; block < first_block + to; block++) {
            const int first = int(block * BLOCK > first_row ? 0 : first_row - block * BLOCK);
            const int64_t left = first_row + num_rows - block * BLOCK;
            const int last = int(left < BLOCK ? left : BLOCK);
            const char* at[BLOCK] = {};
            for (int lane = first; lane < last; lane++)
                at[lane] = static_cast<const char*>(rows) + size_t(block * BLOCK + lane - first_row) * row_bytes;
            if (format == FP32) {
                float* to_block = static_cast<float*>(items) + size_t(block) * block_items<Fp32>(inputs);
                pack_units(at, first, last, inputs, reinterpret_cast<uint32_t*>(to_block));
            } else {
                uint16_t* to_block = static_cast<uint16_t*>(items) + size_t(block) * block_items<Bf16>(inputs);
                for (int lane = first; lane < last && inputs % 2; lane++) {
                    uint16_t* pair = to_block + (size_t(inputs / 2) * BLOCK + lane) * 2;
                    pair[0] = reinterpret_cast<const uint16_t*>(at[lane])[inputs - 1];
                    pair[1] = 0;
                }
                // Rows of an odd number of inputs begin in the middle of a unit.
                if (inputs % 2)
                    for (int lane = first; lane < last; lane++)
                        for (int i = 0; i < inputs - 1; i++)
                            to_block[(size_t(i / 2) * BLOCK + lane) * 2 + i % 2] = reinterpret_cast<const uint16_t*>(at[lane])[i];
                else
                    pack_units(at, first, last, inputs / 2, reinterpret_cast<uint32_t*>(to_block));
            }
        }
    });
}

// Rows `numbers` of packed weights, for tables such as embeddings.
inline void unpack_rows(const Matrix* matrix, const int64_t* numbers, int32_t count, const Rows* out) {
    const int inputs = matrix->inputs;
    for (int row = 0; row < count; row++) {
        const size_t block = size_t(numbers[row]) / BLOCK;
        const int lane = int(size_t(numbers[row]) % BLOCK);
        for (int i = 0; i < inputs; i++) {
            float value;
            if (matrix->format == FP32)
                value = static_cast<const float*>(matrix->items)[block * block_items<Fp32>(inputs) + size_t(i) * BLOCK + lane];
            else if (matrix->format == BF16)
                value = bf16_to_f32(static_cast<const uint16_t*>(
                    matrix->items)[block * block_items<Bf16>(inputs) + (size_t(i / 2) * BLOCK + lane) * 2 + i % 2]);
            else
                value = matrix->scales[numbers[row]] *
                        static_cast<const int8_t*>(
                            matrix->items)[block * block_items<Int8>(inputs) + (size_t(i / 4) * BLOCK + lane) * 4 + i % 4];
            set_item(row_at(*out, row), out->format, i, value);
        }
    }
}

}  // namespace MR_ISA
