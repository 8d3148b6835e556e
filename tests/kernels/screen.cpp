// Drives screen.cpp: the bounds of logits, and the choice of those that are needed.

#include "numbers.h"

namespace {

void drive(Size size, int64_t rows, int64_t num_in, int64_t num_out, int64_t k, Values values) {
    Random random;
    const int64_t stride = num_in + 6, group = 32, num_groups = num_in / group, units = (num_out + TILE - 1) / TILE * 2;
    const auto x = numbers(random, extent(0, rows, stride, num_in), 3, values);
    Exact<uint8_t> weight(units * UNIT * num_in, 64);
    for (uint8_t& integer : weight) integer = 1 + random.below(255);
    const auto scales = floats(random, units * UNIT * num_groups, 0.1);
    const auto logits = numbers(random, rows * num_out);
    for (int threads : threads_of(size)) {
        Exact<float> lowest(rows * units), highest(rows * units), scratch(rows * (3 * num_groups + num_in / 2));
        Exact<Number> out(rows * num_out);
        std::copy(logits.begin(), logits.end(), out.begin());
        Exact<uint8_t> needed(units);
        Exact<int64_t> num_largest(1);
        num_largest[0] = k;
        ScreenCall calls[2];
        for (int64_t known = 0; known < 2; known++) {
            calls[known] = {{0, 0, stride}, {1, 0, units}, {2, 0, units}, {4, 0, num_out}, 3, 5, 6, weight.data(), scales.data(),
                            num_out, num_in, group, known};
        }
        Program program;
        program.add(bound, calls[0]);
        for (const ScreenCall& call : calls) program.add(choose, call);
        program.run(rows, threads, x, lowest, highest, scratch, out, needed, num_largest);
        Digest digest;
        add(digest, lowest);
        add(digest, highest);
        add(digest, out);
        digest.add_bytes(needed.data(), units);
        print(text("screen %ld x %ld to %ld for %ld values %d", rows, num_in, num_out, k, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, std::atoi(arguments[2]), 128, 96, 1, Values::ORDINARY);
        return 0;
    }
    for (int64_t rows : rows_of(size)) {
        for (int64_t num_out : {1, 101}) {
            for (int64_t k : {1, 3}) {
                drive(size, rows, 64, num_out, k, Values::ORDINARY);
                drive(size, rows, 96, num_out, k, Values::SPECIAL);
            }
        }
    }
}
