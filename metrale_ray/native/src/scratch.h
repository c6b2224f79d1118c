// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory of one calling thread that kernels work in: it grows to the largest step and is kept, so steps allocate nothing.

#pragma once

#include <cstddef>

// Inlined always: kernels of several instruction sets are linked together, and a shared copy would be of one of them.
#define SCRATCH_INLINE inline __attribute__((always_inline))

class Scratch {
  public:
    ~Scratch();
    // Everything given out before becomes invalid.
    SCRATCH_INLINE void reset(size_t bytes) {
        used_ = 0;
        if (bytes > size_) grow(bytes);
    }
    template <class T> SCRATCH_INLINE T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes_of<T>(count);
        return taken;
    }
    template <class T> SCRATCH_INLINE static size_t bytes_of(size_t count) { return (count * sizeof(T) + 63) / 64 * 64; }

  private:
    void grow(size_t bytes);  // throws std::bad_alloc

    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

Scratch& scratch();       // the calling thread's
Scratch& tile_scratch();  // the running thread's, for rows as tiles
