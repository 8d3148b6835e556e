// Drives greedy.cpp: the ids of the largest logits.

#include "numbers.h"

namespace {

void drive(Size size, int64_t rows, int64_t vocab_size, Values values) {
    Random random;
    Exact<Number> logits(rows * vocab_size);
    for (Number& logit : logits) logit = number_of(value_of(random, 9, values, 3 * vocab_size));
    for (int threads : threads_of(size)) {
        Exact<int64_t> ids(rows);
        const GreedyCall call{{0, 0, vocab_size}, {1, 0, 1}, vocab_size};
        run_kernel(find_largest, call, rows, threads, logits, ids);
        Digest digest;
        digest.add_bytes(ids.data(), rows * sizeof(int64_t));
        print(text("find_largest %ld x %ld values %d", rows, vocab_size, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, std::atoi(arguments[2]), 5001, Values::ORDINARY);
        return 0;
    }
    for (int64_t rows : rows_of(size)) {
        for (int64_t vocab_size : {1, 15, 16, 17, 1023, 1024, 1025, 2049}) {
            for (Values values : {Values::ORDINARY, Values::SPECIAL}) drive(size, rows, vocab_size, values);
        }
    }
}
