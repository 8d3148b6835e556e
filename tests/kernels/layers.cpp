// Drives layers.cpp: norms, sums, gates and rotations.

#include "numbers.h"

namespace {

void drive_norms(Size size, int64_t rows, int64_t width, Values values) {
    const int64_t stride = width + 5, first = 3;
    Random random;
    const auto x = numbers(random, extent(first, rows, stride, width), 3, values);
    const auto weight = numbers(random, width), bias = numbers(random, width);
    Exact<Number> out(rows * width);
    for (int is_zero_centred : {0, 1}) {
        const NormCall call{{0, first, stride}, {1, 0, width}, weight.data(), bias.data(), width, 1e-6, is_zero_centred};
        for (int threads : threads_of(size)) {
            for (const auto& [name, kernel] : {std::pair{"rms_norm", &rms_norm}, std::pair{"layer_norm", &layer_norm}}) {
                fill(out, 7);
                run_kernel(kernel, call, rows, threads, x, out);
                Digest digest;
                add(digest, out);
                print(text("%s %ld x %ld values %d centred %d", name, rows, width, int(values), is_zero_centred), threads,
                      digest);
            }
        }
    }
}

void drive_add(Size size, int64_t rows, int64_t width, Values values) {
    Random random;
    const auto x = numbers(random, extent(1, rows, width + 1, width), 3, values), y = numbers(random, rows * width, 3, values);
    for (int threads : threads_of(size)) {
        Exact<Number> out(rows * width);  // out is also y
        std::copy(y.begin(), y.end(), out.begin());
        run_kernel(add, AddCall{{0, 1, width + 1}, {1, 0, width}, {1, 0, width}, width}, rows, threads, x, out);
        Digest digest;
        add(digest, out);
        print(text("add %ld x %ld values %d", rows, width, int(values)), threads, digest);
    }
}

void drive_gate(Size size, int64_t rows, int64_t head_dim, Values values) {
    const int64_t num_heads = 3, step = 2 * head_dim, width = num_heads * head_dim, stride = num_heads * step;
    Random random;
    const auto x = numbers(random, rows * width, 3, values);
    const auto gates = numbers(random, extent(head_dim, rows, stride, (num_heads - 1) * step + head_dim), 9, values);
    for (int threads : threads_of(size)) {
        Exact<Number> out(rows * width);
        const GateCall call{{0, 0, width}, {1, head_dim, stride}, {2, 0, width}, num_heads, head_dim, step};
        run_kernel(gate, call, rows, threads, x, gates, out);
        Digest digest;
        add(digest, out);
        print(text("gate %ld x %ld values %d", rows, head_dim, int(values)), threads, digest);
    }
}

void drive_rotate(Size size, int64_t rows, int64_t head_dim, int64_t num_rotated, int64_t gap, bool has_norm, Values values) {
    const int64_t num_heads = 5, step = head_dim + gap;
    const int64_t width = (num_heads - 1) * step + head_dim, stride = width + 3, first = 2;
    Random random;
    const auto heads = numbers(random, extent(first, rows, stride, width), 3, values);
    const auto cos = numbers(random, rows * num_rotated), sin = numbers(random, rows * num_rotated);
    const auto weight = numbers(random, head_dim);
    for (int threads : threads_of(size)) {
        Exact<Number> out(rows * num_heads * head_dim);
        const RotateCall call{
            {0, first, stride}, {1, 0, num_rotated}, {2, 0, num_rotated}, {3, 0, num_heads * head_dim},
            has_norm ? weight.data() : nullptr, num_heads, head_dim, step, num_rotated, 1e-6, gap > 0};
        run_kernel(rotate, call, rows, threads, heads, cos, sin, out);
        Digest digest;
        add(digest, out);
        print(text("rotate %ld of %ld x %ld gap %ld norm %d values %d", num_rotated, rows, head_dim, gap, has_norm,
                   int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        const int64_t rows = std::atoi(arguments[2]);
        drive_norms(size, rows, 1024, Values::ORDINARY);
        drive_add(size, rows, 1024, Values::ORDINARY);
        drive_gate(size, rows, 128, Values::ORDINARY);
        drive_rotate(size, rows, 128, 128, 0, true, Values::ORDINARY);
        return 0;
    }
    std::vector<int64_t> head_dims = {16, 40, 256};
    if (size == Size::FULL) head_dims = {16, 40, 64, 80, 128, 256};
    for (int64_t rows : rows_of(size)) {
        for (Values values : {Values::ORDINARY, Values::SPECIAL}) {
            for (int64_t width : {1, 16, 17, 200}) {
                drive_norms(size, rows, width, values);
                drive_add(size, rows, width, values);
            }
            for (int64_t head_dim : head_dims) {
                drive_gate(size, rows, head_dim, values);
                for (bool has_norm : {false, true}) {
                    drive_rotate(size, rows, head_dim, head_dim, 0, has_norm, values);
                    drive_rotate(size, rows, head_dim, head_dim / 4 * 2, 5, has_norm, values);
                }
            }
        }
    }
}
