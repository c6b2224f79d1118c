// SPDX-License-Identifier: MIT OR Apache-2.0
// Adding up what several ranks give: out[i] = in[0][i] + in[1][i] + …, in fp32 in that order, rounded once.
//
// Rules. The order of the additions depends on nothing but the number of ranks, so whoever adds gets the same bits.
// `out` may be one of the inputs. Items are FP32, BF16 or FP16. Items of 16 bits are taken as pairs, the even ones and the
// odd ones apart: nothing has to be moved between lanes. So a piece is of two vectors whatever the format.

#pragma once

#include "api.h"
#include "vectors.h"

namespace MR_ISA {

constexpr int PIECE = 2 * W;  // items

struct Fp32Items {
    typedef float Type;
    static MR_INLINE void widen(const float* from, f32v (&piece)[2]) {
        piece[0] = load(from);
        piece[1] = load(from + W);
    }
    static MR_INLINE void narrow(const f32v (&piece)[2], float* to) {
        store(to, piece[0]);
        store(to + W, piece[1]);
    }
};

MR_INLINE i32v as_i32(u32v bits) { return reinterpret_cast<i32v&>(bits); }
MR_INLINE u32v choose(i32v mask, u32v yes, u32v no) { return as_u32(select(mask, as_f32(yes), as_f32(no))); }
MR_INLINE u32v load_pairs(const uint16_t* from) { return *reinterpret_cast<const u32v*>(from); }
MR_INLINE void store_pairs(uint16_t* to, u32v pairs) { *reinterpret_cast<u32v*>(to) = pairs; }

struct Bf16Items {
    typedef uint16_t Type;

    static MR_INLINE void widen(const uint16_t* from, f32v (&piece)[2]) {
        u32v pairs = load_pairs(from);
        piece[0] = as_f32(pairs << 16);
        piece[1] = as_f32(pairs & 0xffff0000u);
    }

    static MR_INLINE void narrow(const f32v (&piece)[2], uint16_t* to) {
        store_pairs(to, (rounded(piece[0]) >> 16) | (rounded(piece[1]) & 0xffff0000u));
    }

    // The item in the upper half: to the nearest, ties to even; what is no number stays none.
    static MR_INLINE u32v rounded(f32v value) {
        u32v bits = as_u32(value);
        u32v nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
        return choose(value != value, bits | 0x400000u, nearest);
    }
};

// IEEE's 16 bits, without the instructions for them: 5 bits of exponent whose bias is 15, and 10 of fraction.
struct Fp16Items {
    typedef uint16_t Type;

    static MR_INLINE void widen(const uint16_t* from, f32v (&piece)[2]) {
        u32v pairs = load_pairs(from);
        piece[0] = wide(pairs & 0xffffu);
        piece[1] = wide(pairs >> 16);
    }

    static MR_INLINE void narrow(const f32v (&piece)[2], uint16_t* to) {
        store_pairs(to, rounded(piece[0]) | (rounded(piece[1]) << 16));
    }

    static MR_INLINE f32v wide(u32v item) {
        u32v size = item & 0x7fffu;
        i32v number = as_i32(size);  // signed, which compares faster; there is no sign left
        u32v normal = (size << 13) + (112u << 23);
        u32v endless = (size << 13) + (224u << 23);  // infinities and what is no number
        u32v tiny = as_u32(__builtin_convertvector(number, f32v) * splat(0x1p-24f));
        u32v bits = choose(number < 0x400, tiny, choose(number < 0x7c00, normal, endless));
        return as_f32(bits | ((item & 0x8000u) << 16));
    }

    // To the nearest, ties to even; from 65520 on infinite.
    static MR_INLINE u32v rounded(f32v value) {
        u32v bits = as_u32(value);
        u32v size = bits & 0x7fffffffu;
        i32v number = as_i32(size);
        u32v normal = (size + 0xfffu + ((size >> 13) & 1u) - (112u << 23)) >> 13;
        u32v tiny = as_u32(as_f32(size) + splat(0.5f)) - 0x3f000000u;  // the addition rounds to steps of 2**-24
        u32v item = choose(number < 0x38800000, tiny, normal);
        item = choose(number >= 0x477ff000, u32v{} + 0x7c00u, item);
        item = choose(number > 0x7f800000, u32v{} + 0x7e00u, item);
        return item | ((bits >> 16) & 0x8000u);
    }
};

// N pieces from `from` on; their sums stay in registers.
template <class F, int N>
MR_INLINE void add_pieces(const void* const* in, int ranks, int64_t from, void* out) {
    typedef typename F::Type Type;
    f32v total[N][2];
    for (int p = 0; p < N; p++) F::widen(static_cast<const Type*>(in[0]) + from + p * PIECE, total[p]);
    for (int rank = 1; rank < ranks; rank++) {
        for (int p = 0; p < N; p++) {
            f32v more[2];
            F::widen(static_cast<const Type*>(in[rank]) + from + p * PIECE, more);
            total[p][0] += more[0];
            total[p][1] += more[1];
        }
    }
    for (int p = 0; p < N; p++) F::narrow(total[p], static_cast<Type*>(out) + from + p * PIECE);
}

// The last items, fewer than a piece: copied to where zeros follow them.
template <class F> MR_INLINE void add_rest(const void* const* in, int ranks, int64_t from, int64_t count, void* out) {
    typedef typename F::Type Type;
    const size_t bytes = size_t(count) * sizeof(Type);
    f32v total[2] = {};
    for (int rank = 0; rank < ranks; rank++) {
        Type padded[PIECE] = {};
        f32v more[2];
        std::memcpy(padded, static_cast<const Type*>(in[rank]) + from, bytes);
        F::widen(padded, more);
        for (int half = 0; half < 2; half++) total[half] = rank == 0 ? more[half] : total[half] + more[half];
    }
    Type padded[PIECE];
    F::narrow(total, padded);
    std::memcpy(static_cast<Type*>(out) + from, padded, bytes);
}

template <class F> MR_INLINE void add_items(const void* const* in, int ranks, int64_t items, void* out) {
    int64_t from = 0;
    for (; from + 2 * PIECE <= items; from += 2 * PIECE) add_pieces<F, 2>(in, ranks, from, out);
    for (; from + PIECE <= items; from += PIECE) add_pieces<F, 1>(in, ranks, from, out);
    if (from < items) add_rest<F>(in, ranks, from, items - from, out);
}

static void add_up(const void* const* in, int32_t ranks, int64_t items, int32_t format, void* out) {
    if (format == FP32) add_items<Fp32Items>(in, ranks, items, out);
    else if (format == BF16) add_items<Bf16Items>(in, ranks, items, out);
    else add_items<Fp16Items>(in, ranks, items, out);
}

}  // namespace MR_ISA
