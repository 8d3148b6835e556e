// A linear layer with weights in 8 or 4 bits: out = residual + factor * activation(x @ weight.T + bias). quantized.py lays
// out its arrays, and says how x is rounded. The groups are added in fp32, one after the other.
//
// The weight is [num_out / TILE, num_in / 4, TILE, 4] in 8 bits, and [num_out / TILE, num_in / 8, TILE, 4] in 4 bits, the first
// four of eight inputs in the low halves of the bytes. Scales and zeros are [num_out / TILE, num_in / group_size, TILE].

constexpr int LANES = 16;

#include "integers.h"
#include "linear.h"
#include "tiles.h"

namespace {

constexpr int GROUPS_AHEAD = 8;    // whose scales and zeros are fetched
constexpr int MOST_ROWS = 8;       // rows that are computed together, so that a weight is loaded once for all of them

// The rounded rows.
struct RoundedRows {
    int8_t* integers;  // [num_rows, num_in]
    float* scales;     // [num_rows, num_in / group_size]
    int32_t* sums;     // [num_rows, num_in / group_size], of the integers
};

void quantize(const Number* x, int group_size, int8_t* integers, float* scale, int32_t* sum) {
    alignas(64) float values[MOST_INPUTS];
    for (int i = 0; i < group_size; i += LANES) put(values + i, load(x + i));
    uint32_t bits[MOST_INPUTS], largest = 0;  // as bits, so that NaN is larger than any number
    std::memcpy(bits, values, sizeof bits);
    for (int i = 0; i < group_size; i++) largest = std::max(largest, bits[i] & 0x7fffffff);
    float limit;
    std::memcpy(&limit, &largest, sizeof limit);
    const float factor = limit > 0 ? 127 / limit : 0;
    *scale = limit / 127;
    int32_t total = 0;
    for (int i = 0; i < group_size; i++) {  // number by number, which the compiler turns into vectors
        integers[i] = int8_t(nearest(values[i] * factor));
        total += integers[i];
    }
    *sum = total;
}

// The scales and zeros of LANES outputs.
struct Outputs {
    Floats scales;
    Ints zeros;

    Outputs(const LinearCall& layer, int64_t place) : scales(vector_at<Floats>(layer.scales + place)) {
        __builtin_prefetch(layer.scales + place + GROUPS_AHEAD * TILE);
        __builtin_prefetch(layer.zeros + place + GROUPS_AHEAD * TILE);
        for (int i = 0; i < LANES; i++) zeros[i] = layer.zeros[place + i];  // GCC converts a vector of bytes one by one
    }

    // What the zeros contribute to the products of a row, which has the same group at `place`.
    Ints offsets(const RoundedRows& rows, int64_t place) const { return -zeros * rows.sums[place]; }

    // Add the products of a row, from which the zeros are subtracted.
    void add(Floats& total, Ints products, const RoundedRows& rows, int64_t place) const {
        total = multiply_add(__builtin_convertvector(products, Floats) * rows.scales[place], scales, total);
    }
};

// Outputs of one tile for NUM rows.
template <int NUM, int BITS>
void compute(const LinearCall& layer, const Batch& batch, int64_t tile, const RoundedRows& rows, int64_t first) {
    const int64_t num_in = layer.num_in, group_size = layer.group_size, num_groups = num_in / group_size;
    const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + tile * TILE * num_in * BITS / 8;
    const int8_t* x = rows.integers + first * num_in;
    for (int row = 0; row < NUM; row++) fetch_outputs(layer, batch, first + row, tile * TILE, TILE);
    Floats total[NUM][2] = {};
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t index = tile * num_groups + g, place = first * num_groups + g;
        const Outputs outputs[2] = {{layer, index * TILE}, {layer, index * TILE + LANES}};
        Ints products[NUM][2];
#pragma GCC unroll 8
        for (int row = 0; row < NUM; row++) {
            for (int half = 0; half < 2; half++) products[row][half] = outputs[half].offsets(rows, place + row * num_groups);
        }
        add_products<BITS, NUM == 1>(products, weight, x, num_in, g * group_size, (g + 1) * group_size);
#pragma GCC unroll 8
        for (int row = 0; row < NUM; row++) {
            for (int half = 0; half < 2; half++) {
                outputs[half].add(total[row][half], products[row][half], rows, place + row * num_groups);
            }
        }
    }
    for (int row = 0; row < NUM; row++) write_outputs(layer, batch, first + row, tile * TILE, total[row]);
}

#ifdef TILES
constexpr int BLOCK = 2 * TILE_ROWS;  // rows that are computed together in tiles

// The weights of `num` inputs in 8 bits, [num / 4, TILE, 4].
template <int BITS>
const uint8_t* in_8_bits(const uint8_t* weight, int64_t num, uint8_t* scratch) {
    if (BITS == 8) return weight;
    for (int64_t word = 0; word < num / WORD; word++) {
        for (int byte = 0; byte < TILE * WORD; byte++) {
            scratch[word * TILE * WORD + byte] = weight[word / 2 * TILE * WORD + byte] >> (word % 2 * 4) & 15;
        }
    }
    return scratch;
}

// Outputs of one tile for up to BLOCK rows.
template <int BITS>
void compute_in_tiles(const LinearCall& layer, const Batch& batch, int64_t tile, const RoundedRows& rows, int64_t first,
                      int num_rows) {
    const int64_t num_in = layer.num_in, group_size = layer.group_size, num_groups = num_in / group_size;
    const int64_t step = std::min<int64_t>(group_size, TILE_BYTES);  // inputs that an instruction multiplies
    set_shapes(num_rows, step, step / WORD);
    const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + tile * TILE * num_in * BITS / 8;
    const int8_t *x = rows.integers + first * num_in, *second = x + TILE_ROWS * num_in;
    Floats total[BLOCK][2] = {};
    Ints products[2][2][TILE_ROWS];
    alignas(64) uint8_t scratch[TILE_BYTES * TILE];
    for (int64_t g = 0; g < num_groups; g++) {
        zero_sums();
        for (int64_t in = g * group_size; in < (g + 1) * group_size; in += step, weight += step * TILE * BITS / 8) {
            const uint8_t* weights = in_8_bits<BITS>(weight, step, scratch);
            load_tile(6, weights, 2 * TILE_BYTES);
            load_tile(7, weights + TILE_BYTES, 2 * TILE_BYTES);
            load_tile(4, x + in, num_in);
            add_int8_products(0, 4, 6);
            add_int8_products(1, 4, 7);
            if (num_rows > TILE_ROWS) {
                load_tile(5, second + in, num_in);
                add_int8_products(2, 5, 6);
                add_int8_products(3, 5, 7);
            }
        }
        store_sums(products);
        for (int half = 0; half < 2; half++) {
            const Outputs outputs(layer, (tile * num_groups + g) * TILE + half * LANES);
            for (int row = 0; row < num_rows; row++) {
                const int64_t place = (first + row) * num_groups + g;
                const Ints& sums = products[row / TILE_ROWS][half][row % TILE_ROWS];
                outputs.add(total[row][half], sums + outputs.offsets(rows, place), rows, place);
            }
        }
    }
    for (int row = 0; row < num_rows; row++) write_outputs(layer, batch, first + row, tile * TILE, total[row]);
}
#endif

template <int BITS>
void compute_rows(const LinearCall& layer, const Batch& batch, int64_t tile, const RoundedRows& rows) {
    const int64_t num_rows = batch.num_rows;
    int64_t row = 0;
#ifdef TILES
    for (; num_rows - row >= TILE_ROWS; row += std::min<int64_t>(BLOCK, num_rows - row)) {
        compute_in_tiles<BITS>(layer, batch, tile, rows, row, std::min<int64_t>(BLOCK, num_rows - row));
    }
#endif
    for (; row + MOST_ROWS <= num_rows; row += MOST_ROWS) compute<MOST_ROWS, BITS>(layer, batch, tile, rows, row);
    if (num_rows - row >= 4) compute<4, BITS>(layer, batch, tile, rows, row), row += 4;
    if (num_rows - row >= 2) compute<2, BITS>(layer, batch, tile, rows, row), row += 2;
    if (num_rows - row >= 1) compute<1, BITS>(layer, batch, tile, rows, row);
}

}  // namespace

extern "C" void linear(const LinearCall* call, const Batch& batch, Member& me) {
    const LinearCall& layer = *call;
    const int64_t num_rows = batch.num_rows, num_groups = layer.num_in / layer.group_size;
    int8_t* integers = static_cast<int8_t*>(batch.arrays[layer.scratch]);
    float* scales = (float*)(integers + num_rows * layer.num_in);
    const RoundedRows rows{integers, scales, (int32_t*)(scales + num_rows * num_groups)};
    multiply_by_a(layer, batch, me);
    for (int64_t i : me.share(num_rows * num_groups)) {
        const Number* x = layer.x.row<Number>(batch, i / num_groups) + i % num_groups * layer.group_size;
        quantize(x, layer.group_size, rows.integers + i * layer.group_size, &rows.scales[i], &rows.sums[i]);
    }
    me.wait();
    for (int64_t tile : me.tasks(ceil_div(layer.num_out, TILE))) {
        if (layer.bits == 8) {
            compute_rows<8>(layer, batch, tile, rows);
        } else {
            compute_rows<4>(layer, batch, tile, rows);
        }
    }
#ifdef TILES
    release_tiles();
#endif
}
