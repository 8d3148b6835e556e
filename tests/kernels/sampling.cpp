// Drives fast/sampling/kernels.cpp: the largest logits with their ids, and the draw from all weights.

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
        if (num > 1) continue;
        Exact<float> temperatures(rows);
        Exact<double> u(rows);
        Exact<int64_t> totals(2 * rows);
        for (int64_t row = 0; row < rows; row++) temperatures[row] = row % 2 ? 1.0f : 0.5f, u[row] = 0.37;
        const DrawCall draw_call{{0, 0, vocab_size}, {1, 0, 1}, {2, 0, 1}, {3, 0, 1}, {4, 0, 1}, {5, 0, 1}, vocab_size};
        run_kernel(draw, draw_call, rows, threads, logits, temperatures, u, ids, totals, largest);
        Digest drawn;
        drawn.add_bytes(ids.data(), rows * sizeof(int64_t));
        drawn.add_bytes(totals.data(), 2 * rows * sizeof(int64_t));
        print(text("draw %ld x %ld values %d", rows, vocab_size, int(values)), threads, drawn);
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
