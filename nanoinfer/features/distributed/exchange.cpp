// An all-gather of bytes among processes of this machine, through shared memory. communicator.py calls it.
//
//     flags      the number of exchanges that each rank has published, each in a cache line of its own
//     buffers    two per rank, used alternately. A rank publishes exchange n + 1 when it has read all of exchange n, so no
//                rank reads a buffer any more when exchange n + 2 overwrites it
//
// A rank that waits spins at first, because the others are usually microseconds behind, and then yields its core.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace {

constexpr int64_t LINE = 64;  // bytes
constexpr int SPINS = 4000;
constexpr int YIELDS = 400;

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

// Publish `num_bytes` of `source` as exchange `number`, which counts from 1.
extern "C" void publish(char* shared, int rank, int size, int64_t capacity, int64_t number, const char* source,
                        int64_t num_bytes) {
    char* buffer = shared + size * LINE + ((number & 1) * size + rank) * capacity;
    std::memcpy(buffer, source, num_bytes);
    reinterpret_cast<std::atomic<int64_t>*>(shared + rank * LINE)->store(number, std::memory_order_release);
}

// Wait until all ranks have published exchange `number`. Return 0 if they have not after about that many milliseconds.
extern "C" int await_all(char* shared, int size, int64_t number, int milliseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    int count = 0;
    for (int rank = 0; rank < size; rank++) {
        auto* flag = reinterpret_cast<std::atomic<int64_t>*>(shared + rank * LINE);
        while (flag->load(std::memory_order_acquire) < number) {
            if (++count < SPINS) {
                pause_briefly();
            } else if (count < SPINS + YIELDS) {
                std::this_thread::yield();
            } else if (std::chrono::steady_clock::now() < end) {
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            } else {
                return 0;
            }
        }
    }
    return 1;
}
