// Drives exponentials.cpp: exponentials of numbers up to 0, of which some are not finite.

constexpr int LANES = 16;
#include "vectors.h"

#include "numbers.h"

namespace {

void drive(Size size, int64_t num, int64_t row_size) {
    Random random;
    Exact<float> below(num);
    for (float& number : below) number = -std::fabs(value_of(random, 40, Values::SPECIAL));
    Exact<double> table(34 * 256);
    double value = 4294967296.0;
    for (double& entry : table) entry = value *= 0.99729605608547012;  // 2^(-1 / 256)
    for (int threads : threads_of(size)) {
        Exact<int64_t> out(num);
        const ExponentialsCall call{{0, 0, row_size}, {1, 0, row_size}, num, row_size, table.data(), 1.0 - table.size(), 369.33,
                                    0.0027, 3.6e-6};
        run_kernel(exponentials, call, (num + row_size - 1) / row_size, threads, below, out);
        Digest digest;
        digest.add_bytes(out.data(), num * sizeof(int64_t));
        print(text("exponentials %ld by %ld", num, row_size), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, 1000 * std::atoi(arguments[2]), 1000);
        return 0;
    }
    for (int64_t num : {1, 7, 64, 5001}) {
        for (int64_t row_size : {1, 8, 1000}) drive(size, num, row_size);
    }
}
