// SPDX-License-Identifier: MIT OR Apache-2.0
// A team of threads that run one function together, with barriers.
//
// Rules. The threads are those of the OpenMP runtime that the process has already (torch brings one), because two
// runtimes in one process wait for each other's spinning threads; `mr_use_openmp` is told its entry points. Without one,
// the library keeps threads of its own. A team may be smaller than was asked for: `size` says how large it is.

#pragma once

#include <atomic>
#include <cstdint>

struct Barrier {
    alignas(64) std::atomic<int> waiting{0};
    alignas(64) std::atomic<int> phase{0};
    void wait(int size);
};

// Inlined always: kernels of several instruction sets are linked together, and a shared copy would be of one of them.
#define TEAM_INLINE inline __attribute__((always_inline))

struct Team {
    int index, size;
    Barrier* shared;
    TEAM_INLINE void barrier() {
        if (size > 1) shared->wait(size);
    }
    // This thread's share of `count` equal pieces.
    TEAM_INLINE void share(int64_t count, int64_t& from, int64_t& to) const {
        from = count * index / size;
        to = count * (index + 1) / size;
    }
};

typedef void (*TeamFunction)(Team& team, void* context);
void run_team(int threads, TeamFunction function, void* context);

template <class F> void parallel(int threads, F&& function) {
    if (threads <= 1) {
        Team alone{0, 1, nullptr};
        function(alone);
        return;
    }
    run_team(threads, [](Team& team, void* context) { (*static_cast<F*>(context))(team); }, &function);
}
