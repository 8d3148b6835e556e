// Drives largest.cpp: the largest logits with their ids.

#include "numbers.h"

namespace {

void drive(Size size, int64_t rows, int64_t vocab_size, int64_t num, Values values) {
    Random random;
    Exact<Number> logits(rows * vocab_size);
    for (Number& logit : logits) logit = number_of(value_of(random, 9, values, 3 * vocab_size));
    for (int threads : threads_of(size)) {
        Exact<float> largest(rows * num);
        Exact<int64_t> ids(rows * num);
        const LargestCall call{{0, 0, vocab_size}, {1, 0, num}, {2, 0, num}, vocab_size, num};
        run_kernel(find_largest, call, rows, threads, logits, largest, ids);
        Digest digest;
        digest.add_bytes(largest.data(), rows * num * sizeof(float));
        digest.add_bytes(ids.data(), rows * num * sizeof(int64_t));
        print(text("find_largest %ld of %ld x %ld values %d", num, rows, vocab_size, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, std::atoi(arguments[2]), 5001, 1, Values::ORDINARY);
        return 0;
    }
    for (int64_t rows : rows_of(size)) {
        for (int64_t vocab_size : {1, 15, 16, 17, 1023, 1024, 1025, 2049}) {
            for (Values values : {Values::ORDINARY, Values::SPECIAL}) {
                for (int64_t num : {int64_t(1), std::min<int64_t>(40, vocab_size)}) drive(size, rows, vocab_size, num, values);
            }
        }
    }
}
