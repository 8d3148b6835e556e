// A linear layer in bfloat16, as dense_linear.cpp has it, with the products in tiles (tiles.h).
//
// An instruction multiplies 32 inputs of up to 16 rows by the weights of 16 outputs. It takes as long for one row as for 16,
// but at few rows a layer takes the time of reading its weights, which are fetched FETCH_AHEAD bytes before they are
// multiplied. At many rows, x is first laid out as the tiles that are multiplied, and these are fetched ahead.
//
// Rows are independent by construction: each is a row of its tiles, with one order of additions for any number of rows.

constexpr int LANES = 16;
#include "linear.h"
#include "tiles.h"

namespace {

constexpr int STEP = 32;        // inputs that an instruction multiplies
constexpr int TILE = 32;        // outputs that are computed together,
constexpr int BLOCK = 32;       // and rows: two tiles of each
constexpr int FEW_ROWS = 64;    // up to this many rows, x is read where it is
constexpr int TASK_BLOCKS = 8;  // the maximum number of blocks that a thread computes at a time
constexpr int FETCH_AHEAD = 4096, LINE = 64;  // bytes
constexpr int64_t WEIGHT_BYTES = STEP * TILE * sizeof(Number), X_BYTES = STEP * BLOCK * sizeof(Number);  // of a step

// The tiles of a block of rows. A tile of the next step begins step_bytes later.
struct Block {
    const char* x;
    int64_t row_bytes, step_bytes;
};

// sums: [two of rows, two of outputs, TILE_ROWS]. `ahead` is fetched meanwhile.
void multiply_block(Floats (&sums)[2][2][TILE_ROWS], const Block& block, int num_rows, const char* weight,
                    int64_t num_steps, const char* ahead) {
    const int64_t second = TILE_ROWS * block.row_bytes;
    zero_sums();
    const char* x = block.x;
    for (int64_t step = 0; step < num_steps; step++) {
        for (int64_t byte = 0; byte < WEIGHT_BYTES; byte += LINE) __builtin_prefetch(ahead + byte);
        load_tile(6, weight, 2 * TILE_BYTES);
        load_tile(4, x, block.row_bytes);
        add_bfloat16_products(0, 4, 6);
        load_tile(7, weight + TILE_BYTES, 2 * TILE_BYTES);
        add_bfloat16_products(1, 4, 7);
        if (num_rows > TILE_ROWS) {
            load_tile(5, x + second, block.row_bytes);
            add_bfloat16_products(2, 5, 6);
            add_bfloat16_products(3, 5, 7);
        }
        x += block.step_bytes, weight += WEIGHT_BYTES, ahead += WEIGHT_BYTES;
    }
    store_sums(sums);
}

// Lay out x as [blocks of rows, steps, BLOCK, STEP], filled up with zeros.
void lay_out(const LinearCall& call, const Batch& batch, char* blocks, Member& me) {
    const int64_t num_steps = call.num_in / STEP, num_blocks = ceil_div(batch.num_rows, BLOCK);
    for (int64_t row : me.share(num_blocks * BLOCK)) {
        char* to = blocks + row / BLOCK * num_steps * X_BYTES + row % BLOCK * TILE_BYTES;
        for (int64_t step = 0; step < num_steps; step++, to += X_BYTES) {
            if (row < batch.num_rows) {
                std::memcpy(to, call.x.row<Number>(batch, row) + step * STEP, TILE_BYTES);
            } else {
                std::memset(to, 0, TILE_BYTES);
            }
        }
    }
    me.wait();
}

}  // namespace

// Scratch: x with its rows rounded up to whole blocks, less than twice as many if there are more than FEW_ROWS.
extern "C" const int64_t tile_size = TILE, num_per_term = 2;
extern "C" const int64_t scratch_bytes_per_input = 2 * sizeof(Number), packed_bytes_per_input = scratch_bytes_per_input;

extern "C" void linear(const LinearCall* call, const Batch& batch, Member& me) {
    const int64_t num_tiles = ceil_div(call->num_out, TILE), num_steps = call->num_in / STEP;
    const int64_t num_blocks = ceil_div(batch.num_rows, BLOCK), num_parts = ceil_div(num_blocks, TASK_BLOCKS);
    const bool is_laid_out = batch.num_rows > FEW_ROWS;
    multiply_by_a(*call, batch, me);
    char* blocks = static_cast<char*>(batch.arrays[call->scratch]);
    if (is_laid_out) lay_out(*call, batch, blocks, me);
    Floats sums[2][2][TILE_ROWS];
    int num_set = 0;
    for (int64_t task : me.tasks(num_tiles * num_parts)) {
        const int64_t tile = task % num_tiles, part = task / num_tiles;
        if (!call->needs(batch, tile * TILE, TILE)) continue;
        const char* weight = static_cast<const char*>(call->weight) + tile * num_steps * WEIGHT_BYTES;
        for (int64_t i = part * TASK_BLOCKS; i < std::min(num_blocks, (part + 1) * TASK_BLOCKS); i++) {
            const int num_rows = std::min<int64_t>(BLOCK, batch.num_rows - i * BLOCK);
            const int num_multiplied = is_laid_out ? BLOCK : num_rows;
            Block block{blocks + i * num_steps * X_BYTES, TILE_BYTES, X_BYTES};
            if (!is_laid_out) block = {(const char*)call->x.row<Number>(batch, i * BLOCK), call->x.stride * 2, TILE_BYTES};
            if (num_multiplied != num_set) set_shapes(num_set = num_multiplied, TILE_BYTES, TILE_ROWS);
            multiply_block(sums, block, num_multiplied, weight, num_steps, (is_laid_out ? block.x : weight) + FETCH_AHEAD);
            for (int row = 0; row < num_rows; row++) {
                const auto& tiles = sums[row / TILE_ROWS];
                const Floats of_row[] = {tiles[0][row % TILE_ROWS], tiles[1][row % TILE_ROWS]};
                write_outputs(*call, batch, i * BLOCK + row, tile * TILE, of_row);
            }
        }
    }
    release_tiles();
}
