// SPDX-License-Identifier: MIT OR Apache-2.0
// Vectors of the width that this translation unit is compiled for, and the number formats that weights come in.
//
// Compiler vector extensions only, no intrinsics: the same text serves every instruction set, and the 16-lane form runs
// anywhere, slower. Everything is in the namespace MR_ISA, so that units for several instruction sets link together.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define MR_INLINE inline __attribute__((always_inline))

namespace MR_ISA {

constexpr int W = MR_WIDTH;  // lanes of 32 bits
constexpr int BLOCK = 16;    // outputs of a packed block, see pack.h
constexpr int NV = BLOCK / W;

typedef float f32v __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t i32v __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t u32v __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t u16v __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef int8_t i8v __attribute__((vector_size(W), aligned(1), may_alias));

MR_INLINE f32v splat(float value) { return value - f32v{}; }
MR_INLINE f32v load(const float* from) { return *reinterpret_cast<const f32v*>(from); }
MR_INLINE void store(float* to, f32v value) { *reinterpret_cast<f32v*>(to) = value; }
MR_INLINE f32v as_f32(u32v bits) { return reinterpret_cast<f32v&>(bits); }
MR_INLINE u32v as_u32(f32v value) { return reinterpret_cast<u32v&>(value); }
MR_INLINE f32v select(i32v mask, f32v yes, f32v no) {
    return as_f32((as_u32(yes) & reinterpret_cast<u32v&>(mask)) | (as_u32(no) & ~reinterpret_cast<u32v&>(mask)));
}
MR_INLINE f32v max(f32v a, f32v b) { return select(a > b, a, b); }
MR_INLINE f32v min(f32v a, f32v b) { return select(a < b, a, b); }

MR_INLINE float sum(f32v v) {
    float total = 0;
    float lanes[W];
    store(lanes, v);
    for (int width = W / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    total = lanes[0];
    return total;
}

MR_INLINE float bf16_to_f32(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// To the nearest, ties to even; what is no number stays none.
MR_INLINE uint16_t f32_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

MR_INLINE f32v load_bf16(const uint16_t* from) {
    u16v narrow = *reinterpret_cast<const u16v*>(from);
    return as_f32(__builtin_convertvector(narrow, u32v) << 16);
}

MR_INLINE void store_bf16(uint16_t* to, f32v value) {
    u32v bits = as_u32(value);
    u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32v quiet = (bits >> 16) | 0x40u;
    u32v is_none = reinterpret_cast<const u32v&>(static_cast<const i32v&>((bits & 0x7fffffffu) > 0x7f800000u));
    *reinterpret_cast<u16v*>(to) = __builtin_convertvector((rounded & ~is_none) | (quiet & is_none), u16v);
}

// exp for |x| up to about 88, within 2 units in the last place; smaller ones give 0, larger ones the largest.
MR_INLINE f32v exp(f32v x) {
    x = min(max(x, splat(-87.3f)), splat(88.3f));
    f32v n = x * splat(1.44269504088896341f);
    const f32v magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to a whole number
    n = (n + magic) - magic;
    f32v r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    f32v p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    i32v whole = __builtin_convertvector(n, i32v);
    u32v scale = reinterpret_cast<u32v&>(whole) + 127u;
    return p * as_f32(scale << 23);
}

MR_INLINE f32v reciprocal(f32v x) { return splat(1.0f) / x; }

}  // namespace MR_ISA
