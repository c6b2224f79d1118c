// SPDX-License-Identifier: MIT OR Apache-2.0
// What a step does with each row by itself: norms, rotation of queries and keys, the choice of experts.

#pragma once

#include "parallel.h"
#include "rows.h"

namespace MR_ISA {

constexpr int MIN_ROWS_PER_THREAD = 8;  // fewer are done sooner than another thread wakes

MR_INLINE int threads_for(int rows, int threads) {
    const int useful = rows / MIN_ROWS_PER_THREAD;
    return useful < 1 ? 1 : useful < threads ? useful : threads;
}

MR_INLINE float inverse_rms(const void* items, int32_t format, int width, float eps) {
    f32v squares = {};
    float rest = 0;
    int i = 0;
    for (; i + W <= width; i += W) {
        f32v value = load_items(items, format, i);
        squares += value * value;
    }
    for (; i < width; i++) rest += item_at(items, format, i) * item_at(items, format, i);
    return 1.0f / __builtin_sqrtf((sum(squares) + rest) / float(width) + eps);
}

MR_INLINE float rounded(float value, int32_t format) { return format == BF16 ? bf16_to_f32(f32_to_bf16(value)) : value; }
MR_INLINE f32v rounded(f32v value, int32_t format) {
    if (format != BF16) return value;
    uint16_t narrow[W];
    store_bf16(narrow, value);
    return load_bf16(narrow);
}

// The row over its root mean square, rounded to its format before the weight is applied.
MR_INLINE void norm_row(const void* x, int32_t format, const void* weight, int width, float eps, void* to) {
    const float scale = inverse_rms(x, format, width, eps);
    int i = 0;
    for (; i + W <= width; i += W)
        store_items(to, format, i, rounded(load_items(x, format, i) * splat(scale), format) * load_items(weight, format, i));
    for (; i < width; i++)
        set_item(to, format, i, rounded(item_at(x, format, i) * scale, format) * item_at(weight, format, i));
}

inline void norm(const Rows* x, const void* weight, int32_t width, float eps, const Rows* out, int32_t threads) {
    parallel(threads_for(x->count, threads), [&](Team& team) {
        int64_t from, to;
        team.share(x->count, from, to);
        for (int64_t row = from; row < to; row++)
            norm_row(row_at(*x, row), x->format, weight, width, eps, row_at(*out, row));
    });
}

// Each head's vector turned by its token's angles, in the halves form: out = x · cos + swapped(x) · sin, the sine's first
// half being negated already. `norms` [heads, head_dim] or null: each vector is normalised before.
inline void rotate(const Rows* x, int32_t heads, int32_t head_dim, const void* norms, float eps, const void* cos,
                   const void* sin, int32_t threads) {
    const int32_t format = x->format;
    const int half = head_dim / 2;
    parallel(threads_for(x->count * 2, threads), [&](Team& team) {
        int64_t from, to;
        team.share(x->count, from, to);
        float head[MAX_HEAD_DIM], swapped[MAX_HEAD_DIM];
        for (int64_t row = from; row < to; row++) {
            for (int h = 0; h < heads; h++) {
                char* at = row_at(*x, row) + size_t(h) * head_dim * item_bytes(format);
                if (norms != nullptr) {
                    const char* weight = static_cast<const char*>(norms) + size_t(h) * head_dim * item_bytes(format);
                    norm_row(at, format, weight, head_dim, eps, at);
                }
                widen_row(at, format, head_dim, head_dim, head);
                std::memcpy(swapped, head + half, half * sizeof(float));
                std::memcpy(swapped + half, head, half * sizeof(float));
                const int64_t angle = row * head_dim;
                int i = 0;
                for (; i + W <= head_dim; i += W)
                    store_items(at, format, i,
                                load(head + i) * load_items(cos, format, angle + i) +
                                    load(swapped + i) * load_items(sin, format, angle + i));
                for (; i < head_dim; i++)
                    set_item(at, format, i, head[i] * item_at(cos, format, angle + i) + swapped[i] * item_at(sin, format, angle + i));
            }
        }
    });
}

// Softmax over all experts, then the `per_token` largest, the one with the lower number first on a tie. Where a score is no
// number, or the largest is infinite, the weights are none, as of softmax, and the first experts are chosen.
MR_INLINE void route_row(const Rows& scores, int64_t row, int experts, int per_token, bool normalize, bool round,
                         int32_t* chosen, float* weights) {
    float wide[MAX_EXPERTS + W];
    wide[0] = 0;
    widen_row(row_at(scores, row), scores.format, experts, experts, wide);
    float largest = wide[0];
    for (int e = 1; e < experts; e++) largest = wide[e] > largest || wide[e] != wide[e] ? wide[e] : largest;
    const bool is_none = !(largest - largest == 0);
    for (int e = experts; e < experts + W; e++) wide[e] = largest;
    float total = 0;
    for (int e = 0; e < experts; e += W) store(wide + e, exp(load(wide + e) - splat(largest)));
    for (int e = 0; e < experts; e++) total += wide[e];
    float chosen_total = 0;
    for (int k = 0; k < per_token; k++) {
        int best = 0;
        for (int e = 1; e < experts; e++) best = wide[e] > wide[best] ? e : best;
        chosen[k] = best;
        weights[k] = wide[best] / total;
        chosen_total += weights[k];
        wide[best] = -1.0f;
    }
    for (int k = 0; k < per_token; k++) {
        if (is_none) chosen[k] = k;
        if (is_none) weights[k] = __builtin_nanf("");
        if (normalize) weights[k] /= chosen_total;
        if (round) weights[k] = rounded(weights[k], scores.format);
    }
}

inline void route(const Rows* scores, int32_t experts, int32_t per_token, int32_t normalize, int32_t round, int32_t* chosen,
                  float* weights, int32_t threads) {
    parallel(threads_for(scores->count, threads), [&](Team& team) {
        int64_t from, to;
        team.share(scores->count, from, to);
        for (int64_t row = from; row < to; row++)
            route_row(*scores, row, experts, per_token, normalize, round, chosen + row * per_token, weights + row * per_token);
    });
}

}  // namespace MR_ISA
