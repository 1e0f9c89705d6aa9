// Team: what the threads of one pass share to run in lockstep: a spin barrier and a fair split of work.
// It must never sleep in the kernel while its threads have processors, nor hang when they have not.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dspark {

inline void relax_processor() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Barrier {
   public:
    void wait(int num_threads) {
        if (num_threads == 1) return;
        const int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
            if (spins < 2000)
                relax_processor();
            else
                sched_yield();  // more threads than processors: let the others arrive
    }

   private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};

struct Range {
    int64_t begin, end;
};

// The part of 0 .. count - 1 that thread `tid` of `num_threads` does.
inline Range share(int64_t count, int tid, int num_threads) {
    return {count * tid / num_threads, count * (tid + 1) / num_threads};
}

}  // namespace dspark
