// Drives exchange.cpp: ranks in threads of their own that exchange bytes through shared memory.

#include SOURCE

#include "driver.h"

namespace {

struct Rank {
    char* shared;
    int rank, size;
    int64_t capacity, num_exchanges, num_bytes;
    Digest digest;

    void run() {
        Random random{uint32_t(rank + 1)};
        Exact<char> source(num_bytes);
        for (int64_t number = 1; number <= num_exchanges; number++) {
            for (char& byte : source) byte = char(random.next());
            publish(shared, rank, size, capacity, number, source.data(), num_bytes);
            while (!await_all(shared, size, number, 100)) {
            }
            const char* buffers = shared + size * LINE + (number & 1) * size * capacity;
            for (int other = 0; other < size; other++) digest.add_bytes(buffers + other * capacity, num_bytes);
        }
    }
};

void drive(int size, int64_t capacity, int64_t num_bytes, int64_t num_exchanges) {
    Exact<char> shared(size * (LINE + 2 * capacity), 64);
    std::vector<Rank> ranks;
    for (int rank = 0; rank < size; rank++) {
        ranks.push_back({shared.data(), rank, size, capacity, num_exchanges, num_bytes, {}});
    }
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&rank] { rank.run(); });
    for (std::thread& thread : threads) thread.join();
    for (const Rank& rank : ranks) {  // every rank has read the same
        print(text("exchange of %ld among %d, %ld times", num_bytes, size, num_exchanges), rank.rank, rank.digest);
    }
}

// Wait for an exchange that does not come.
void wait_in_vain() {
    Exact<char> shared(2 * LINE, 64);
    std::printf("a rank that is late: %d\n", await_all(shared.data(), 2, 1, 1));
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(1, 1024, 1000, std::atoi(arguments[2]));
        return 0;
    }
    const int64_t num_exchanges = size == Size::FULL ? 200 : 9;
    for (int num_ranks = 1; num_ranks <= 5; num_ranks++) {
        for (int64_t capacity : {64, 4096}) {
            for (int64_t num_bytes : {int64_t(1), int64_t(63), capacity}) drive(num_ranks, capacity, num_bytes, num_exchanges);
        }
    }
    wait_in_vain();
}
