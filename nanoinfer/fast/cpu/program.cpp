// Run a program. One team of threads makes all calls, because waking a team for each would take longer than many kernels do.

#include "program.h"

#include <pthread.h>

#include <cfenv>
#include <climits>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// While it lives, this thread computes with the default settings: it rounds to the nearest number, and does not flush denormal
// numbers to zero. They are settings of each thread, so otherwise a result would depend on which thread computes it.
class DefaultFloats {
  public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }

  private:
    std::fenv_t before_;
};

// Threads that do one job after the other, together with the thread that calls `run`. Between jobs they wait in the dock: each
// for its own number, so that a job wakes no more threads than it needs.
class Team {
  public:
    typedef std::function<void(Member&)> Job;

    // Do a job. While another thread has the team, the caller does it alone: it waits for nobody, and the bits are the same.
    // Returns true if the system has started fewer threads, which then do the whole job.
    bool run(int num_wanted, const Job& job) {
        std::unique_lock lock(in_use_, std::try_to_lock);
        if (!lock) return Team().run(1, job);
        for (int i = dock_.size() + 1; i < std::min(num_wanted, most_threads_); i++) {
            dock_.emplace_back(20000);
            try {
                std::thread(&Team::work, this, i, std::ref(dock_.back())).detach();
            } catch (...) {  // the system refuses it, such as at a container's limit of pids, and is not asked again
                dock_.pop_back();
                most_threads_ = i;
            }
        }
        const int num_threads = std::min(num_wanted, most_threads_);
        remaining_ = std::vector<Remaining>(num_threads);
        num_threads_ = num_threads, job_ = &job;
        for (int i = 1; i < num_threads; i++) dock_[i - 1].advance();
        do_part(0);
        barrier_.wait(num_threads);
        return num_threads < num_wanted;
    }

  private:
    void work(int index, Round& round) {
        for (uint32_t number = 0;; number++) {
            round.wait(number);
            do_part(index);
            barrier_.arrive(num_threads_);
        }
    }

    void do_part(int index) {
        const DefaultFloats settings;
        Member me{index, num_threads_, barrier_, remaining_.data()};
        (*job_)(me);
    }

    std::mutex in_use_;
    std::deque<Round> dock_;  // of all members but the caller
    Barrier barrier_;
    std::vector<Remaining> remaining_;
    int num_threads_ = 1, most_threads_ = INT_MAX;
    const Job* job_ = nullptr;
};

// It is never deleted, because its threads wait in it when the process ends. A forked process has none of them and needs another.
Team* team = new Team;
const int is_registered = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

// Make the calls. Returns 0, 1 if there was no memory, or 2 if there were fewer threads. No exception leaves a member or reaches
// ctypes: a member without memory for a kernel goes on to the next wait, and then nobody makes further calls.
extern "C" int run(const KernelCall* calls, int64_t num_calls, const Batch* batch, int num_threads) try {
    std::atomic<bool> lacks_memory{false};
    const bool is_small = team->run(num_threads, [&](Member& me) {
        for (const KernelCall *call = calls, *end = calls + num_calls; call < end; call++) {
            if (call > calls) me.wait();
            try {
                if (!lacks_memory) call->kernel(call->arguments, *batch, me);
            } catch (...) {
                lacks_memory = true;
            }
        }
    });
    return lacks_memory ? 1 : is_small ? 2 : 0;
} catch (...) {
    return 1;
}

// Whether this process may use tiles (tiles.h). Linux keeps them for a process only after it has asked, once for all threads.
extern "C" int has_tiles() {
#if defined(EMULATE_TILES)
    return 1;
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 0;
#endif
}

extern "C" const int64_t sizeof_KernelCall = sizeof(KernelCall);
