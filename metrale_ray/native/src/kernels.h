// SPDX-License-Identifier: MIT OR Apache-2.0
// The kernels of one instruction set. kernels.cpp is compiled once for each; core.cpp chooses.

#pragma once

#include "api.h"

struct Kernels {
    void (*pack)(const void* rows, int32_t format, int32_t first_row, int32_t num_rows, int32_t inputs, void* items,
                 int32_t threads);
    void (*quantize)(const Rows* rows, int32_t inputs, int32_t first_output, const float* scales, void* items,
                     int32_t threads);
    void (*unpack_rows)(const Matrix* matrix, const int64_t* numbers, int32_t count, const Rows* out);
    void (*linear)(const Matrix* matrix, const Rows* x, const Rows* out, int32_t add, int32_t threads);
    void (*experts)(const Experts* experts, const Rows* x, const int32_t* chosen, const float* weights, int32_t per_token,
                    const Rows* out, int32_t add, int64_t* counts, int32_t threads);
    void (*norm)(const Rows* x, const void* weight, int32_t width, float eps, const Rows* out, int32_t threads);
    void (*rotate)(const Rows* x, int32_t heads, int32_t head_dim, const void* norms, float eps, const void* cos,
                   const void* sin, int32_t threads);
    void (*route)(const Rows* scores, int32_t experts, int32_t per_token, int32_t normalize, int32_t round, int32_t* chosen,
                  float* weights, int32_t threads);
    int32_t (*store_kv)(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t threads);
    void (*attend)(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t window, float scale,
                   const Rows* out, int32_t threads);
    void (*add_up)(const void* const* in, int32_t ranks, int64_t items, int32_t format, void* out);
};

// Those that run here; null when the processor has none of the sets that were built.
const Kernels* running_kernels();
