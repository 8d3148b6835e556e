// Drives dense_linear.cpp and tile_linear.cpp, and with QUANTIZED quantized_linear.cpp: linear layers with and without bias,
// factor, residual, activation and adapters.

#include "numbers.h"

namespace {

struct Case {
    int64_t rows, num_in, num_out, activation;
    bool has_others;          // bias, factor and residual
    int64_t num_layers;       // that requests may adapt. 0: none
    int64_t bits = 0, group = 0;  // of a quantized weight
    Values values = Values::ORDINARY;
};

// Two adapters for layers side by side, and the adapter indices of rows (lora.h). A row of products has room for `spare` other
// numbers.
struct Adapters {
    Exact<int64_t> indices, starts;
    Exact<float> products;
    std::vector<Exact<Number>> matrices;
    Exact<LowRank> changes;
    MappingArguments mapping;
    Adapted adapted;

    Adapters(Random& random, const Case& given) : indices(given.rows), starts(given.num_layers + 1) {
        const int64_t num_adapters = 2, ranks[] = {4, 0, 8}, max_rank = 8;
        for (int64_t& index : indices) index = random.below(num_adapters + 1) - 1;
        for (int64_t i = 0; i <= given.num_layers; i++) starts[i] = given.num_out * i / given.num_layers;
        products = Exact<float>(given.rows * given.num_layers * max_rank);
        changes = Exact<LowRank>(num_adapters * given.num_layers);
        for (int64_t i = 0; i < changes.size(); i++) {
            const int64_t layer = i % given.num_layers, rank = ranks[i % 3], start = starts[layer], end = starts[layer + 1];
            if (rank == 0) continue;
            matrices.push_back(numbers(random, rank * given.num_in, 1, given.values));
            const int64_t first = start / OUTPUTS, last = (end + OUTPUTS - 1) / OUTPUTS;
            Exact<Number> b((last - first) * rank * OUTPUTS);
            for (int64_t output = start; output < end; output++) {
                for (int64_t j = 0; j < rank; j++) {
                    b[((output / OUTPUTS - first) * rank + j) * OUTPUTS + output % OUTPUTS] = number_of(random.uniform());
                }
            }
            matrices.push_back(std::move(b));
            changes[i] = {matrices[matrices.size() - 2].data(), matrices.back().data(), 0.5, rank};
        }
        mapping = {given.rows, indices.data(), products.data()};
        adapted = {&mapping, changes.data(), starts.data(), given.num_layers, max_rank};
    }
};

#ifdef QUANTIZED
struct Layer {
    Exact<uint8_t> weight, zeros;
    Exact<float> scales;

    Layer(Random& random, const Case& given) {
        const int64_t num_tiles = (given.num_out + TILE - 1) / TILE, num_groups = given.num_in / given.group;
        weight = Exact<uint8_t>(num_tiles * TILE * given.num_in * given.bits / 8, 64);
        for (uint8_t& integer : weight) integer = random.next();
        zeros = Exact<uint8_t>(num_tiles * num_groups * TILE);
        for (uint8_t& zero : zeros) zero = random.below(given.bits == 8 ? 256 : 17);
        scales = floats(random, num_tiles * num_groups * TILE, 0.1);
    }

    LinearCall call(const Case& given, Slice x, Slice factor, Slice residual, Slice out, const Number* bias,
                    const Adapted* adapted) const {
        return {x, factor, residual, out, 4, weight.data(), scales.data(), zeros.data(), bias, given.num_out, given.num_in,
                given.group, given.bits, given.activation, adapted, 0, -1};
    }

    int64_t scratch_bytes(const Case& given) const { return given.rows * (given.num_in + 8 * (given.num_in / given.group)); }
};
#else
struct Layer {
    Exact<Number> weight;

    Layer(Random& random, const Case& given) {
        const int64_t num_terms = given.num_in / num_per_term, num_tiles = (given.num_out + tile_size - 1) / tile_size;
        weight = Exact<Number>(num_tiles * num_terms * tile_size * num_per_term, 64);
        for (int64_t output = 0; output < given.num_out; output++) {
            for (int64_t i = 0; i < given.num_in; i++) {
                const int64_t term = (output / tile_size * num_terms + i / num_per_term) * tile_size + output % tile_size;
                weight[term * num_per_term + i % num_per_term] = number_of(value_of(random, 1, given.values, 1009));
            }
        }
    }

    LinearCall call(const Case& given, Slice x, Slice factor, Slice residual, Slice out, const Number* bias,
                    const Adapted* adapted) const {
        return {x, factor, residual, out, 4, weight.data(), nullptr, nullptr, bias, given.num_out, given.num_in, 0, 0,
                given.activation, adapted, 0, -1};
    }

    int64_t scratch_bytes(const Case& given) const { return given.rows * given.num_in * packed_bytes_per_input; }
};
#endif

void drive(Size size, const Case& given) {
    const auto [rows, num_in, num_out, activation, has_others, num_layers, bits, group, values] = given;
    Random random;
    const int64_t stride = num_in + 6, first = 2;  // multiples of num_per_term
    const auto x = numbers(random, extent(first, rows, stride, num_in), 3, values);
    const auto factor = numbers(random, rows * num_out, 1, values), residual = numbers(random, rows * num_out, 1, values);
    const auto bias = numbers(random, num_out);
    const Layer layer(random, given);
    const Adapters adapters(random, num_layers ? given : Case{rows, num_in, num_out, 0, false, 1});
    for (int threads : threads_of(size)) {
        Exact<Number> out(rows * num_out);
        const Exact<char> scratch(layer.scratch_bytes(given), 64);
        const Slice others[] = {has_others ? Slice{1, 0, num_out} : NOTHING, has_others ? Slice{2, 0, num_out} : NOTHING};
        LinearCall call = layer.call(given, {0, first, stride}, others[0], others[1], {3, 0, num_out},
                                     has_others ? bias.data() : nullptr, num_layers ? &adapters.adapted : nullptr);
        run_kernel(linear, call, rows, threads, x, factor, residual, out, scratch);
        Digest digest;
        add(digest, out);
        if (size != Size::COUNT) {
            Exact<Number> packed(rows * num_out);
            call.is_packed = 1;
            run_kernel(linear, call, rows, threads, x, factor, residual, packed, scratch);
            if (std::memcmp(packed.data(), out.data(), rows * num_out * sizeof(Number))) std::abort();
        }
        print(text("linear %ld x %ld to %ld bits %ld group %ld activation %ld others %d adapted %ld values %d", rows, num_in,
                   num_out, bits, group, activation, has_others, num_layers, int(values)), threads, digest);
    }
}

// Layers whose weights are quantized in each way that the kernel knows, or in none.
void drive_layers(Size size, int64_t rows, int64_t num_in, int64_t num_out, int64_t activation, bool has_others,
                  int64_t num_layers, Values values = Values::ORDINARY) {
#ifdef QUANTIZED
    const auto bits = {8, 4};
#else
    const auto bits = {0};
#endif
    const int64_t group = num_in % 64 ? 32 : 64;
    for (int64_t given : bits) {
        drive(size, {rows, num_in, num_out, activation, has_others, num_layers, given, group, values});
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive_layers(size, std::atoi(arguments[2]), 128, 96, NONE, true, 3);
        return 0;
    }
#if defined(QUANTIZED) || defined(TILES)
    const std::vector<int64_t> inputs = {32, 64, 192};
#else
    const std::vector<int64_t> inputs = {2, 34, 32};
#endif
    std::vector<int64_t> outputs = {1, 101};
    if (size == Size::FULL) outputs = {1, 24, 48, 101, 131};
    for (int64_t rows : rows_of(size)) {
        for (int64_t num_in : inputs) {
            for (int64_t num_out : outputs) {
                drive_layers(size, rows, num_in, num_out, NONE, false, 0);
                drive_layers(size, rows, num_in, num_out, SILU, true, 0, Values::SPECIAL);
                drive_layers(size, rows, num_in, num_out, GELU_TANH, true, num_out > 2 ? 3 : 1);
            }
        }
    }
}
