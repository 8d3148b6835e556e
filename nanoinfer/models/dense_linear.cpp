// A linear layer in float32 or bfloat16: out = residual + factor * activation(x @ weight.T + bias). cpu_dense.py lays out the
// weight.
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
#include <omp.h>

#include "activations.h"
#include "program.h"

#if defined(BF16) && !defined(__AVX512BF16__)
#error "bfloat16 needs a processor with AVX512-BF16"
#endif

namespace {

constexpr int TILE = VECTORS * LANES;  // outputs
constexpr int TASK_ROWS = 12 * ROWS;   // that a thread computes at a time, at most
constexpr int FETCH_AHEAD = 4096 / sizeof(Terms);

struct Layer {
    const Terms* weight;     // [num_out / TILE, num_in / PER_TERM, VECTORS]
    const Number* bias;      // [num_out] or null
    int64_t num_out, num_in, activation;
};

// The rows of a batch. factor and residual: null if there is none.
struct Rows {
    const Number* x;                   // [num_rows, num_in]
    const Number *factor, *residual;  // [num_rows, num_out]
    Number* out;                       // [num_rows, num_out]
};

// Outputs of a tile for NUM rows from `row` on. For each term, num_ahead vectors from `ahead` on are fetched meanwhile.
template <int NUM>
void compute(const Layer& layer, const Rows& rows, int64_t tile, int64_t row, const Terms* ahead, int num_ahead) {
    const int64_t num_terms = layer.num_in / PER_TERM;
    Floats sums[NUM][VECTORS] = {};
    multiply(sums, (const Term*)(rows.x + row * layer.num_in), num_terms, 1, layer.weight + tile * num_terms * VECTORS, VECTORS,
             num_terms, ahead, num_ahead);
    for (int i = 0; i < NUM; i++) {
        for (int j = 0; j < VECTORS; j++) {
            const int64_t first = tile * TILE + j * LANES, place = (row + i) * layer.num_out + first;
            const int num = std::clamp<int64_t>(layer.num_out - first, 0, LANES);
            Floats result = sums[i][j];
            if (layer.bias) result += load(layer.bias + first, num);
            result = activated(result, layer.activation);
            if (rows.factor) result *= load(rows.factor + place, num);
            if (rows.residual) result += load(rows.residual + place, num);
            store(rows.out + place, result, num);
        }
    }
}

// A task: a tile for the rows first .. last - 1. The passes over the rows fetch the next tile from memory meanwhile, num_ahead
// vectors for each term. Without this, reading and multiplying alternate: 16 rows took 1.3 to 1.6 times as long. With one row
// there is nothing to do meanwhile, and what is fetched is FETCH_AHEAD vectors ahead in the same tile. Only the last part of the
// rows fetches the next tile: the others are computed with the same one again.
void compute_rows(const Layer& layer, const Rows& rows, int64_t tile, int64_t first, int64_t last, bool is_last_part) {
    static_assert(ROWS <= 8);
    constexpr decltype(&compute<1>) FORMS[] = {compute<1>, compute<2>, compute<3>, compute<4>,
                                               compute<5>, compute<6>, compute<7>, compute<8>};
    const int64_t num_terms = layer.num_in / PER_TERM, num_passes = (last - first + ROWS - 1) / ROWS;
    const Terms* weight = layer.weight + tile * num_terms * VECTORS;
    if (last - first == 1) {
        compute<1>(layer, rows, tile, first, weight + FETCH_AHEAD, VECTORS);
        return;
    }
    const Terms* next = weight + num_terms * VECTORS;
    const int num_ahead = is_last_part ? (VECTORS + num_passes - 1) / num_passes : 0;
    for (int64_t row = first, fetched = 0; row < last; row += ROWS, fetched += num_ahead) {
        const int64_t num = std::min<int64_t>(ROWS, last - row);
        FORMS[num - 1](layer, rows, tile, row, next + fetched * num_terms, fetched < VECTORS ? num_ahead : 0);
    }
}

}  // namespace

extern "C" const int tile_size = TILE, num_per_term = PER_TERM;

// num_in is a multiple of PER_TERM, and the weight is aligned to 64 bytes.
struct Arguments {
    int64_t x, factor, residual, out;  // arrays of the batch, or -1. out may be factor or residual.
    Layer layer;
};  // CompiledLinear.step adds an array for scratch memory, which this kernel does not need

extern "C" void linear(const Arguments* arguments, const Batch& batch) {
    const Layer& layer = arguments->layer;
    const Rows rows{batch.at<Number>(arguments->x), batch.at<Number>(arguments->factor), batch.at<Number>(arguments->residual),
                    batch.at<Number>(arguments->out)};
    const int64_t num_tiles = (layer.num_out + TILE - 1) / TILE;
    // A small layer has few tiles. Its rows are divided then, so that every thread has some.
    const int64_t least_parts = std::max<int64_t>(4 * omp_get_num_threads() / num_tiles, 1);
    const int64_t part_rows = batch.num_rows / least_parts;
    const int64_t task_rows = std::clamp<int64_t>((part_rows + ROWS - 1) / ROWS * ROWS, ROWS, TASK_ROWS);
    const int64_t num_parts = (batch.num_rows + task_rows - 1) / task_rows;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < num_tiles * num_parts; task++) {
        const int64_t part = task % num_parts, last = std::min((part + 1) * task_rows, batch.num_rows);
        compute_rows(layer, rows, task / num_parts, part * task_rows, last, part == num_parts - 1);
    }
}
