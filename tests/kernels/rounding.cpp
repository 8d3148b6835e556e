// Drives rounding.cpp: weights in 4 bits by how much each input counts, and the sums that say how much.

#include "numbers.h"

namespace {

void nothing(const void*, const Batch&, Member&) {}

void drive(Size size, int64_t rows, int64_t num_groups, int64_t group, Values values) {
    Random random;
    const int64_t num_in = num_groups * group, stride = num_in + 6;
    const auto weights = floats(random, rows * num_in, 3, values), x = floats(random, extent(0, rows, stride, num_in), 2);
    auto counts = floats(random, num_in);
    for (float& count : counts) count *= count;
    for (int threads : threads_of(size)) {
        Exact<uint8_t> integers(rows * num_in), zeros(rows * num_groups);
        Exact<float> scales(rows * num_groups), sums(num_in);
        RoundingCall call{num_groups, group};
        Program rounding;
        rounding.add(round_weights, call);
        rounding.run(rows, threads, weights, counts, integers, scales, zeros);
        LinearCall layer{};
        layer.x = {0, 0, stride};
        layer.num_in = num_in;
        MeasuredCall measured{{nothing, &layer}, sums.data()};
        Program measuring;
        measuring.add(measure, measured);
        measuring.run(rows, threads, x);
        Digest digest;
        add(digest, scales);
        add(digest, sums);
        digest.add_bytes(integers.data(), integers.size());
        digest.add_bytes(zeros.data(), zeros.size());
        print(text("rounding %ld x %ld groups of %ld values %d", rows, num_groups, group, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, std::atoi(arguments[2]), 2, 64, Values::ORDINARY);
        return 0;
    }
    for (int64_t rows : rows_of(size)) {
        for (int64_t group : {32, 64}) {
            for (Values values : {Values::ORDINARY, Values::SPECIAL}) drive(size, rows, 3, group, values);
        }
    }
}
