// A linear layer in float32 or bfloat16: out = residual + activation(x @ weight.T + bias). cpu_dense.py lays out the weight.
//
// At one row a layer takes the time of reading its weights, so they are stored in the order in which they are read. At many
// rows it takes the time of the products: the sums of ROWS rows and a tile of outputs stay in the machine's registers.
//
// Rows are independent by construction. For any number of rows, an output is one sum in fp32 over the inputs in their order.

// With AVX-512 there are 32 vector registers: 24 for sums, 3 for weights and one for x. Otherwise there are 16: 12, 3 and one.
#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 8, VECTORS = 3;
#else
constexpr int LANES = 8, ROWS = 4, VECTORS = 3;
#endif
#include "vectors.h"

#if defined(BF16) && !defined(__AVX512BF16__)
#error "bfloat16 needs a processor with AVX512-BF16"
#endif

namespace {

constexpr int TILE = VECTORS * LANES;  // outputs
constexpr int TASK_ROWS = 12 * ROWS;   // that a thread computes at a time

enum Activation { NONE, SILU, GELU_TANH };

struct Layer {
    const Terms* weight;     // [num_out / TILE, num_in / PER_TERM, VECTORS]
    const Number* bias;      // [num_out] or null
    const Number* residual;  // [num_rows, num_out] or null
    int64_t num_out, num_in;
    int activation;
};

Floats sigmoid(Floats x) {
    const Floats e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : Floats{} + 1.0f) / (e + 1.0f);
}

Floats activated(Floats x, int activation) {
    if (activation == SILU) return x * sigmoid(x);
    if (activation == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // 2 * sqrt(2 / pi)
    return x;
}

// Outputs of a tile for NUM rows from `row` on. For each term, num_ahead vectors from `ahead` on are fetched meanwhile.
template <int NUM>
void compute(const Layer& layer, int64_t tile, int64_t row, const Number* x, Number* out, const Terms* ahead, int num_ahead) {
    const int64_t num_terms = layer.num_in / PER_TERM;
    Floats sums[NUM][VECTORS] = {};
    multiply(sums, (const Term*)(x + row * layer.num_in), num_terms, 1, layer.weight + tile * num_terms * VECTORS, VECTORS,
             num_terms, ahead, num_ahead);
    for (int i = 0; i < NUM; i++) {
        for (int j = 0; j < VECTORS; j++) {
            const int64_t first = tile * TILE + j * LANES, place = (row + i) * layer.num_out + first;
            const int num = std::clamp<int64_t>(layer.num_out - first, 0, LANES);
            Floats result = sums[i][j];
            if (layer.bias) result += load(layer.bias + first, num);
            result = activated(result, layer.activation);
            if (layer.residual) result += load(layer.residual + place, num);
            store(out + place, result, num);
        }
    }
}

// A task: a tile for the rows first .. last - 1. The passes over the rows fetch the next tile from memory meanwhile, num_ahead
// vectors for each term. Without this, reading and multiplying alternate: 16 rows took 1.3 to 1.6 times as long. With one row
// there is too little to do meanwhile, and the processor fetches ahead by itself.
void compute_rows(const Layer& layer, int64_t tile, int64_t first, int64_t last, const Number* x, Number* out, bool is_last) {
    static_assert(ROWS <= 8);
    constexpr decltype(&compute<1>) FORMS[] = {compute<1>, compute<2>, compute<3>, compute<4>,
                                               compute<5>, compute<6>, compute<7>, compute<8>};
    const int64_t num_terms = layer.num_in / PER_TERM, num_passes = (last - first + ROWS - 1) / ROWS;
    const Terms* next = layer.weight + (tile + 1) * num_terms * VECTORS;
    const int num_ahead = !is_last || last - first == 1 ? 0 : (VECTORS + num_passes - 1) / num_passes;
    for (int64_t row = first, fetched = 0; row < last; row += ROWS, fetched += num_ahead) {
        const int64_t num = std::min<int64_t>(ROWS, last - row);
        FORMS[num - 1](layer, tile, row, x, out, next + fetched * num_terms, fetched < VECTORS ? num_ahead : 0);
    }
}

}  // namespace

extern "C" const int tile_size = TILE, num_per_term = PER_TERM;

// x: [num_rows, num_in], with num_in a multiple of PER_TERM. out: [num_rows, num_out]. The weight is aligned to 64 bytes.
extern "C" void linear(
    const Number* x, const Number* residual, Number* out, const Terms* weight, const Number* bias, int64_t num_rows,
    int64_t num_out, int64_t num_in, int activation, int num_threads) {
    const Layer layer{weight, bias, residual, num_out, num_in, activation};
    const int64_t num_tiles = (num_out + TILE - 1) / TILE, num_parts = (num_rows + TASK_ROWS - 1) / TASK_ROWS;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t task = 0; task < num_tiles * num_parts; task++) {
        const int64_t part = task % num_parts, last = std::min((part + 1) * TASK_ROWS, num_rows);
        compute_rows(layer, task / num_parts, part * TASK_ROWS, last, x, out, part == num_parts - 1);
    }
}
