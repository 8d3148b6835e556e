// Drives delta.cpp: the recurrence of prompts and decode steps, whose states are read from one state_slot and written to another.

#include "numbers.h"

namespace {

struct Piece {
    int64_t num_tokens, read, write;  // state slots
};

void drive(Size size, const std::vector<std::vector<Piece>>& sequences, int64_t num_key_heads, Values values) {
    const int64_t num_state_slots = 5, layer = 1, num_heads = num_key_heads * GROUP, num_values = num_heads * VALUE_DIM;
    const int64_t num_channels = 2 * num_key_heads * KEY_DIM + num_values;
    std::vector<int64_t> of_sequences = {0}, of_pieces;
    int64_t num_tokens = 0;
    for (const auto& pieces : sequences) {
        for (const auto& [num, read, write] : pieces) {
            of_pieces.insert(of_pieces.end(), {num_tokens, num_tokens + num, read, write});
            num_tokens += num;
        }
        of_sequences.push_back(of_pieces.size() / 4);
    }
    const Exact<int64_t> first_pieces = exact(of_sequences), pieces = exact(of_pieces);
    for (int threads : threads_of(size)) {
        Random random;
        const auto windows = floats(random, num_state_slots * BEFORE * num_channels);
        const auto memories = floats(random, num_state_slots * num_heads * KEY_DIM * VALUE_DIM, 0.1);
        const auto convolution = floats(random, KERNEL * num_channels);
        const auto rates = floats(random, num_heads), biases = floats(random, num_heads);
        const auto norm = floats(random, VALUE_DIM);
        const int64_t stride = num_channels + 3;
        const auto qkv = numbers(random, extent(2, num_tokens, stride, num_channels), 2, values);
        const auto z = numbers(random, num_tokens * num_values, 2, values);
        const auto b = numbers(random, num_tokens * num_heads, 4), a = numbers(random, num_tokens * num_heads, 30);
        Exact<Number> out(num_tokens * num_values);
        const Exact<float*> tensors = exact<float*>({nullptr, nullptr, windows.data(), memories.data()});
        const DeltaArguments rows{first_pieces.data(), (const int64_t(*)[4])pieces.data(), int64_t(sequences.size()),
                                  (float* const(*)[2])tensors.data()};
        const DeltaCall call{{0, 2, stride}, {1, 0, num_values}, {2, 0, num_heads}, {3, 0, num_heads}, {4, 0, num_values}, 5,
                             convolution.data(), rates.data(), biases.data(), norm.data(), layer, num_key_heads, 1e-6};
        run_kernel(advance, call, num_tokens, threads, qkv, z, b, a, out, (const void*)&rows);
        Digest digest;
        add(digest, out);
        add(digest, windows);
        add(digest, memories);
        print(text("advance %ld tokens of %zu heads %ld values %d", num_tokens, sequences.size(), num_key_heads, int(values)),
              threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, {{{std::atoi(arguments[2]), 0, 0}}}, 2, Values::ORDINARY);
        return 0;
    }
    for (int64_t num_key_heads : {1, 3}) {
        for (Values values : {Values::ORDINARY, Values::SPECIAL}) {
            drive(size, {{{1, 0, 0}}}, num_key_heads, values);
            drive(size, {{{1, 0, 0}}, {{2, 4, 1}}, {{7, 2, 2}, {1, 2, 3}}}, num_key_heads, values);
            drive(size, {{{65, 4, 4}, {64, 4, 0}}, {{33, 1, 2}}}, num_key_heads, values);
        }
    }
}
