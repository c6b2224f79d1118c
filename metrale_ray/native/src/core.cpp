// SPDX-License-Identifier: MIT OR Apache-2.0
// The library's entry points: which instruction set runs, and each kernel under its exported name.

#include <cstdlib>
#include <cstring>
#include <new>

#ifdef MR_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "api.h"
#include "kernels.h"
#include "scratch.h"

#ifdef MR_HAS_WIDE
extern const Kernels kernels_of_wide;
#endif
#ifdef MR_HAS_GENERIC
extern const Kernels kernels_of_generic;
#endif
#ifdef MR_HAS_AVX2
extern const Kernels kernels_of_avx2;
#endif
#ifdef MR_HAS_AVX512
extern const Kernels kernels_of_avx512;
#endif

#ifdef MR_HAS_AMX
extern const Kernels kernels_of_amx;
#endif

namespace {

#ifdef MR_HAS_AMX
// Whether the processor has AVX-512 and tiles for bf16, and the system lets this process use them.
bool has_tiles() {
    constexpr unsigned TILE = 1u << 24, TILE_BF16 = 1u << 22;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return false;
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & TILE) == 0 || (d & TILE_BF16) == 0) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

struct Choice {
    const char* name;
    const Kernels* kernels;
    bool runs;
};

// Best last.
const Choice* choices(int& count) {
    static const Choice all[] = {
#ifdef MR_HAS_WIDE
        {"wide", &kernels_of_wide, true},
#endif
#ifdef MR_HAS_GENERIC
        {"generic", &kernels_of_generic, true},
#endif
#ifdef MR_HAS_AVX2
        {"avx2", &kernels_of_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
#ifdef MR_HAS_AVX512
        {"avx512", &kernels_of_avx512,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq")},
#endif
#ifdef MR_HAS_AMX
        {"amx", &kernels_of_amx, has_tiles()},
#endif
    };
    count = int(sizeof(all) / sizeof(all[0]));
    return all;
}

const Choice* best() {
    int count;
    const Choice* all = choices(count);
    while (count > 0 && !all[count - 1].runs) count--;
    return count > 0 ? &all[count - 1] : nullptr;
}

const Choice* chosen = best();

}  // namespace

Scratch::~Scratch() { std::free(memory_); }

void Scratch::grow(size_t bytes) {
    std::free(memory_);
    size_ = (bytes + 4095) / 4096 * 4096;
    memory_ = static_cast<char*>(std::aligned_alloc(4096, size_));
    if (memory_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
    }
}

Scratch& scratch() {
    thread_local Scratch own;
    return own;
}

Scratch& tile_scratch() {
    thread_local Scratch own;
    return own;
}

const Kernels* running_kernels() { return chosen == nullptr ? nullptr : chosen->kernels; }

// The name of the instruction set that runs here; null when none that was built does.
MR_API const char* mr_instructions() { return chosen == nullptr ? nullptr : chosen->name; }

// Run another set that this processor has; 0 when it has it.
MR_API int mr_use_instructions(const char* name) {
    int count;
    const Choice* all = choices(count);
    for (int i = 0; i < count; i++)
        if (std::strcmp(all[i].name, name) == 0 && all[i].runs) {
            chosen = &all[i];
            return 0;
        }
    return 1;
}

// The instruction sets that were built, whether or not they run here.
MR_API const char* mr_sets() { return MR_SETS; }

// What the library was built from and with.
MR_API const char* mr_build() { return MR_SOURCES " " __VERSION__; }

MR_API void mr_pack(const void* rows, int32_t format, int32_t first_row, int32_t num_rows, int32_t inputs, void* items,
                    int32_t threads) {
    chosen->kernels->pack(rows, format, first_row, num_rows, inputs, items, threads);
}

MR_API void mr_quantize(const Rows* rows, int32_t inputs, int32_t first_output, const float* scales, void* items,
                        int32_t threads) {
    chosen->kernels->quantize(rows, inputs, first_output, scales, items, threads);
}

MR_API void mr_unpack_rows(const Matrix* matrix, const int64_t* numbers, int32_t count, const Rows* out) {
    chosen->kernels->unpack_rows(matrix, numbers, count, out);
}

MR_API void mr_linear(const Matrix* matrix, const Rows* x, const Rows* out, int32_t add, int32_t threads) {
    chosen->kernels->linear(matrix, x, out, add, threads);
}

MR_API void mr_experts(const Experts* experts, const Rows* x, const int32_t* numbers, const float* weights, int32_t per_token,
                       const Rows* out, int32_t add, int64_t* counts, int32_t threads) {
    chosen->kernels->experts(experts, x, numbers, weights, per_token, out, add, counts, threads);
}

MR_API void mr_norm(const Rows* x, const void* weight, int32_t width, float eps, const Rows* out, int32_t threads) {
    chosen->kernels->norm(x, weight, width, eps, out, threads);
}

MR_API void mr_rotate(const Rows* x, int32_t heads, int32_t head_dim, const void* norms, float eps, const void* cos,
                      const void* sin, int32_t threads) {
    chosen->kernels->rotate(x, heads, head_dim, norms, eps, cos, sin, threads);
}

MR_API void mr_route(const Rows* scores, int32_t experts, int32_t per_token, int32_t normalize, int32_t round,
                     int32_t* numbers, float* weights, int32_t threads) {
    chosen->kernels->route(scores, experts, per_token, normalize, round, numbers, weights, threads);
}

MR_API int32_t mr_store_kv(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t threads) {
    return chosen->kernels->store_kv(cache, spans, qkv, heads, threads);
}

MR_API void mr_attend(const Cache* cache, const Spans* spans, const Rows* qkv, int32_t heads, int32_t window, float scale,
                      const Rows* out, int32_t threads) {
    chosen->kernels->attend(cache, spans, qkv, heads, window, scale, out, threads);
}
