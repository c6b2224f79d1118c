// SPDX-License-Identifier: MIT OR Apache-2.0
// See parallel.h.

#include "parallel.h"

#include <sched.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "api.h"

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

typedef void (*OmpParallel)(void (*function)(void*), void* context, unsigned threads, unsigned flags);
typedef int (*OmpNumber)();
std::atomic<OmpParallel> omp_parallel{nullptr};
OmpNumber omp_thread_num, omp_num_threads;

struct Job {
    TeamFunction function;
    void* context;
    Barrier barrier;
};

void run_omp_member(void* context) {
    Job& job = *static_cast<Job*>(context);
    Team team{omp_thread_num(), omp_num_threads(), &job.barrier};
    job.function(team, job.context);
}

// Threads of our own, for a process without OpenMP. One team runs at a time.
class Pool {
  public:
    void run(int threads, TeamFunction function, void* context) {
        std::lock_guard<std::mutex> one_team(running_);
        Job job{function, context, {}};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(threads_.size()) < threads - 1) start();
            job_ = &job;
            size_ = threads;
            left_ = threads - 1;
            number_++;
        }
        wake_.notify_all();
        Team team{0, threads, &job.barrier};
        function(team, context);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return left_ == 0; });
    }

  private:
    void start() {
        int index = int(threads_.size()) + 1;
        uint64_t seen = number_;
        threads_.emplace_back([this, index, seen] { serve(index, seen); });
        threads_.back().detach();
    }

    void serve(int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return number_ != seen; });
            seen = number_;
            if (index >= size_) continue;
            Job& job = *job_;
            Team team{index, size_, &job.barrier};
            lock.unlock();
            job.function(team, job.context);
            lock.lock();
            if (--left_ == 0) done_.notify_one();
        }
    }

    std::mutex running_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> threads_;
    Job* job_ = nullptr;
    int size_ = 0, left_ = 0;
    uint64_t number_ = 0;
};

Pool& pool() {
    static Pool* kept = new Pool;  // never destroyed: its threads outlive the library's end
    return *kept;
}

}  // namespace

void Barrier::wait(int size) {
    int mine = phase.load(std::memory_order_relaxed);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
        waiting.store(0, std::memory_order_relaxed);
        phase.store(mine + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == mine; spins++) {
        if (spins < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    }
}

void run_team(int threads, TeamFunction function, void* context) {
    OmpParallel start = omp_parallel.load(std::memory_order_acquire);
    if (start == nullptr) {
        pool().run(threads, function, context);
        return;
    }
    Job job{function, context, {}};
    start(run_omp_member, &job, unsigned(threads), 0);
}

// The process's own OpenMP: GOMP_parallel, omp_get_thread_num and omp_get_num_threads; nulls for threads of our own.
MR_API void mr_use_openmp(void* parallel, void* thread_num, void* num_threads) {
    omp_thread_num = reinterpret_cast<OmpNumber>(thread_num);
    omp_num_threads = reinterpret_cast<OmpNumber>(num_threads);
    omp_parallel.store(reinterpret_cast<OmpParallel>(parallel), std::memory_order_release);
}
