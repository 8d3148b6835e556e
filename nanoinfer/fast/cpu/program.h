// A program: calls of kernels that a team of threads makes one after the other. program.py builds and runs it.

#pragma once

#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

// Where the threads of a team wait for each other. They spin first, because the others are microseconds behind, and then sleep.
// How long they spin is adapted: on a quiet machine they spin for milliseconds, as in OpenMP's own barrier. On a busy machine
// the late thread may need the core, so a wait that ends asleep halves the spins, and any other raises them slowly.
struct Barrier {
    std::atomic<int> num_waiting{0}, num_sleeping{0}, round{0};

    void wait(int num_threads) {
        const int current = round.load(std::memory_order_acquire);
        if (num_waiting.fetch_add(1, std::memory_order_acq_rel) == num_threads - 1) {
            num_waiting.store(0, std::memory_order_relaxed);
            round.store(current + 1);
            if (num_sleeping.load() > 0) wake();
            return;
        }
        const int num_spins = spins.load(std::memory_order_relaxed);
        for (int i = 0; i < num_spins && round.load(std::memory_order_acquire) == current; i++) {
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
        const bool is_over = round.load() != current;
        spins.store(is_over ? std::min(num_spins + num_spins / 64, MOST_SPINS) : std::max(num_spins / 2, LEAST_SPINS));
        if (is_over) return;
        num_sleeping.fetch_add(1);
        while (round.load() == current) sleep(current);
        num_sleeping.fetch_sub(1);
    }

  private:
    static constexpr int LEAST_SPINS = 500, MOST_SPINS = 200000;
    static inline std::atomic<int> spins{MOST_SPINS};

#ifdef __linux__
    void sleep(int current) {  // unless the round is over
        syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, current, nullptr, nullptr, 0);
    }

    void wake() {
        syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    void sleep(int) {
        sched_yield();
    }

    void wake() {}
#endif
};

// What a run of a program is given: the number of rows, and arrays by their index. `run` sets the barrier.
struct Batch {
    int64_t num_rows;
    Barrier* barrier;
    void* arrays[];
};

// Where the rows of a value are: row i begins at number first + i * stride of an array. array: -1 if there is no value.
struct Slice {
    int64_t array, first, stride;

    template <class Number>
    Number* row(const Batch& batch, int64_t row) const {
        return array < 0 ? nullptr : static_cast<Number*>(batch.arrays[array]) + first + row * stride;
    }
};

// Every thread of the team makes every call, and `omp for nowait` divides the rows or outputs among them. After each call they
// wait for each other. The arguments of a call are the same in every run.
struct KernelCall {
    void (*kernel)(const void* arguments, const Batch& batch);
    const void* arguments;
};
