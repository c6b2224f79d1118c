// SPDX-License-Identifier: MIT OR Apache-2.0
// Memory of one calling thread that kernels work in: it grows to the largest step and is kept, so steps allocate nothing.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

// Inlined always: kernels of several instruction sets are linked together, and a shared copy would be of one of them.
#define SCRATCH_INLINE inline __attribute__((always_inline))

class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    // Everything given out before becomes invalid.
    SCRATCH_INLINE void reset(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = static_cast<char*>(std::aligned_alloc(4096, size_));
        if (memory_ == nullptr) {
            size_ = 0;
            throw std::bad_alloc();
        }
    }
    template <class T> SCRATCH_INLINE T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes_of<T>(count);
        return taken;
    }
    template <class T> SCRATCH_INLINE static size_t bytes_of(size_t count) { return (count * sizeof(T) + 63) / 64 * 64; }

  private:
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

Scratch& scratch();       // the calling thread's
Scratch& tile_scratch();  // the running thread's, for rows as tiles
