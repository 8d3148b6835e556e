// A team of threads, as a kernel sees it. program.cpp has the threads. Every member of the team makes every call of a program:
//
//     for (int64_t row : me.share(n))      the same part of 0 .. n - 1 in every run, for short loops over rows
//     for (int64_t task : me.tasks(n))     parts that are given out while the loop runs, for the loops that take the time
//     me.wait()                            returns when every member has called it: what they wrote before can be read
//
// The system may take the core of any thread for milliseconds. Then the other members do the tasks that it has not begun.

#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <utility>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <condition_variable>
#include <mutex>
#endif

constexpr int LINE_BYTES = 128;  // two cache lines, because some processors fetch lines in pairs

// A number that a thread advances and that others wait for. They spin first, because it may be a matter of microseconds, and
// then sleep. How long they spin is adapted to what pays: a wait that ends asleep halves the spins, because the late thread may
// need this core, and any other wait raises them slowly.
struct alignas(LINE_BYTES) Round {
    static constexpr int LEAST_SPINS = 200;
    const int most_spins;
    std::atomic<int> num_spins{most_spins}, num_sleeping{0};
    std::atomic<uint32_t> count{0};

    explicit Round(int most_spins) : most_spins(most_spins) {}

    uint32_t number() const { return count.load(std::memory_order_acquire); }

    // Return when the number is no longer `old`.
    void wait(uint32_t old) {
        const int num = num_spins.load(std::memory_order_relaxed);
        for (int i = 0; i < num; i++) {
            if (number() != old) {
                num_spins.store(std::min(num + num / 64, most_spins), std::memory_order_relaxed);
                return;
            }
            pause_briefly();
        }
        num_spins.store(std::max(num / 2, LEAST_SPINS), std::memory_order_relaxed);
        // Either this thread sees the new number, or `advance` sees that it sleeps: these operations have one order.
        num_sleeping.fetch_add(1);
        while (count.load() == old) sleep(old);
        num_sleeping.fetch_sub(1);
    }

    void advance() {
        count.fetch_add(1);
        if (num_sleeping.load() > 0) wake();
    }

    static void pause_briefly() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }

#ifdef __linux__
    void sleep(uint32_t old) {  // unless the number is another
        syscall(SYS_futex, &count, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }

    void wake() {
        syscall(SYS_futex, &count, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    std::mutex mutex;
    std::condition_variable changed;

    void sleep(uint32_t old) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return count.load() != old; });
    }

    void wake() {
        { std::lock_guard lock(mutex); }  // a thread that has read the old number now sleeps
        changed.notify_all();
    }
#endif
};

// Where the members of a job wait for each other.
struct Barrier {
    Round round{200000};
    alignas(LINE_BYTES) std::atomic<int> num_arrived{0};

    void wait(int num_threads) {
        const uint32_t current = round.number();
        if (!arrive(num_threads)) round.wait(current);
    }

    // Do not wait, but let others go on. Returns whether this thread is the last to arrive.
    bool arrive(int num_threads) {
        if (num_arrived.fetch_add(1, std::memory_order_acq_rel) < num_threads - 1) return false;
        num_arrived.store(0, std::memory_order_relaxed);
        round.advance();
        return true;
    }
};

// Tasks first .. last - 1. It is aligned so that every compiler changes it in a single instruction.
struct alignas(8) Range {
    uint32_t first, last;
};

// What a member has not begun of its tasks, in this round of the barrier and in the next, alternately.
struct alignas(LINE_BYTES) Remaining {
    static constexpr Range UNTOUCHED{1, 0};  // nobody has asked for a task yet: the whole share
    std::atomic<Range> ranges[2]{UNTOUCHED, UNTOUCHED};
};

// A thread's part in a job.
struct Member {
    const int index, num_threads;
    Barrier& barrier;
    Remaining* remaining;  // of each member, untouched
    uint32_t num_waits = 0;
    bool has_tasks = false;  // since the last wait

    void wait() {
        num_waits++;
        range_of(index).store(Remaining::UNTOUCHED, std::memory_order_relaxed);
        barrier.wait(num_threads);
        has_tasks = false;
    }

    struct Share {
        int64_t i, last;
        Share begin() const { return *this; }
        int64_t end() const { return last; }
        int64_t operator*() const { return i; }
        void operator++() { i++; }
        bool operator!=(int64_t end) const { return i != end; }
    };

    // This member's part of 0 .. n - 1. It depends on the number of threads only.
    Share share(int64_t n) const { return {n * index / num_threads, n * (index + 1) / num_threads}; }

    struct Tasks {
        Member& me;
        int64_t task, n;
        Tasks begin() const { return *this; }
        int64_t end() const { return n; }
        int64_t operator*() const { return task; }
        void operator++() { task = me.next_task(n); }
        bool operator!=(int64_t end) const { return task != end; }
    };

    // The tasks of 0 .. n - 1 that this member comes to do: its share, in order, and then those that others have not begun. At
    // most one such loop between two waits, with fewer than 2^32 tasks.
    Tasks tasks(int64_t n) {
        assert(!std::exchange(has_tasks, true) && "a loop over tasks follows another without a wait");
        return {*this, next_task(n), n};
    }

    std::atomic<Range>& range_of(int member) { return remaining[member].ranges[num_waits % 2]; }

    // Take the next of this member's tasks, or else the far half of those of another, which goes on with the near half, whose
    // weights it may have begun to fetch. n: all tasks have begun.
    int64_t next_task(int64_t n) {
        for (int i = 0; i < num_threads; i++) {
            const int owner = (index + i) % num_threads;
            std::atomic<Range>& range = range_of(owner);
            Range seen = range.load(std::memory_order_relaxed);
            while (true) {
                Range left = seen;
                if (seen.first > seen.last) left = {uint32_t(n * owner / num_threads), uint32_t(n * (owner + 1) / num_threads)};
                if (left.first == left.last) break;
                const uint32_t taken = i == 0 ? left.first : left.first + (left.last - left.first) / 2;
                const Range rest{taken + 1, left.last}, kept = i == 0 ? rest : Range{left.first, taken};
                if (!range.compare_exchange_weak(seen, kept, std::memory_order_relaxed)) continue;
                if (i > 0) range_of(index).store(rest, std::memory_order_relaxed);
                return taken;
            }
        }
        return n;
    }
};
