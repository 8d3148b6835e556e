// A linear layer in float32, bfloat16 or float16: out = residual + factor * activation(x @ weight.T + bias). linear.py lays out
// the weight: [num_out / TILE, num_in / PER_TERM, TILE, PER_TERM].
//
// At one row a layer takes the time of reading its weights, so they are stored in the order in which they are read. At many
// rows it takes the time of the products: the sums of ROWS rows and a tile of outputs stay in the machine's registers. Some
// processors do many rows in less time if x is packed and the weights are taken in blocks (linear.py tries it).
//
// bfloat16 numbers are multiplied in pairs where the processor can (AVX512-BF16). Otherwise numbers of 16 bits are
// widened to float, x once for all outputs, and the weights in registers, or with packed rows a block at a time.
//
// Rows are independent by construction. For any number of rows, an output is one sum in fp32 over the inputs in their order.

// With AVX-512 there are 32 vector registers: 24 for sums, 3 for weights and one for x. Otherwise there are 16: 12, 3 and one.
#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 8, VECTORS = 3;
#else
constexpr int LANES = 8, ROWS = 4, VECTORS = 3;
#endif
#include <type_traits>

#include "linear.h"

namespace {

typedef std::conditional_t<PER_TERM == 1, Number, Term> StoredTerm;

constexpr int TILE = VECTORS * LANES;  // outputs
constexpr int TASK_ROWS = 96;          // the maximum number of rows that a thread computes at a time
constexpr int TERM_BYTES = VECTORS * sizeof(StoredTerms), LINE = 64;  // of a tile, and of the cache
constexpr int FETCH_AHEAD = 4096 / sizeof(StoredTerms);
constexpr int BLOCK = 192;            // terms
constexpr int BLOCK_AHEAD = 48;       // vectors of a block that are fetched ahead, from the second cache
constexpr bool WIDENS = sizeof(StoredTerms) != sizeof(Terms);

// The rows of x as terms, as the products read them.
struct Terms2D {
    const Term* terms;
    int64_t stride;
};

const StoredTerms* weights(const LinearCall& call, int64_t tile) {
    return static_cast<const StoredTerms*>(call.weight) + tile * (call.num_in / PER_TERM) * VECTORS;
}

// As vectors.h has it, with one place ahead or VECTORS places for each term.
template <int NUM, int WIDTH, class Stored>
void multiply_ahead(Floats (&sums)[NUM][WIDTH], const Term* numbers, int64_t number_stride, int64_t term_stride,
                    const Stored* vectors, int64_t num_terms, const Ahead& ahead) {
    if (ahead.num == 1) {
        multiply<1>(sums, numbers, number_stride, term_stride, vectors, VECTORS, num_terms, ahead);
    } else {
        multiply<VECTORS>(sums, numbers, number_stride, term_stride, vectors, VECTORS, num_terms, ahead);
    }
}

// WIDTH vectors of a tile's outputs, from vector `first` on, for NUM rows from `row` on.
template <int NUM, int WIDTH>
void compute(const LinearCall& call, const Batch& batch, const Terms2D& x, int64_t tile, int64_t first, int64_t row,
             const Ahead& ahead) {
    const int64_t num_terms = call.num_in / PER_TERM;
    for (int i = 0; i < NUM; i++) fetch_outputs(call, batch, row + i, tile * TILE + first * LANES, WIDTH * LANES);
    Floats sums[NUM][WIDTH] = {};
    multiply_ahead(sums, x.terms + row * x.stride, x.stride, 1, weights(call, tile) + first, num_terms, ahead);
    for (int i = 0; i < NUM; i++) write_outputs(call, batch, row + i, tile * TILE + first * LANES, sums[i]);
}

template <int WIDTH>
constexpr decltype(&compute<1, WIDTH>) VARIANTS[] = {compute<1, WIDTH>, compute<2, WIDTH>, compute<3, WIDTH>, compute<4, WIDTH>,
                                                     compute<5, WIDTH>, compute<6, WIDTH>, compute<7, WIDTH>, compute<8, WIDTH>};
static_assert(ROWS <= 8);

// One of num_passes equal parts of a tile's next num_terms terms, which are fetched during the products of as many terms.
Ahead part_ahead(const StoredTerms* next, int64_t num_terms, int64_t pass, int64_t num_passes) {
    const int num = TERM_BYTES > num_passes * LINE ? VECTORS : 1;
    const int64_t step = ceil_div(TERM_BYTES, num_passes * num);
    return {reinterpret_cast<const char*>(next) + pass * num_terms * num * step, step, num};
}

// A task: a tile for the rows first .. last - 1. The passes over the rows fetch the next tile from memory meanwhile, each an equal
// part. Without this, reading and multiplying alternate: 16 rows took 1.3 to 1.6 times as long. With one row there is nothing to
// do meanwhile, and what is fetched is FETCH_AHEAD vectors ahead in the same tile. Only the last part of the rows fetches the
// next tile, because the same tile is used again after every other part.
void compute_rows(const LinearCall& call, const Batch& batch, const Terms2D& x, int64_t tile, int64_t first, int64_t last,
                  bool is_last_part) {
    const int64_t num_terms = call.num_in / PER_TERM, num_passes = ceil_div(last - first, ROWS);
    const StoredTerms *weight = weights(call, tile), *next = weight + num_terms * VECTORS;
    if (last - first == 1) {
        compute<1, VECTORS>(call, batch, x, tile, 0, first, {weight + FETCH_AHEAD, sizeof(StoredTerms), VECTORS});
        return;
    }
    for (int64_t pass = 0; pass < num_passes; pass++) {
        const int64_t row = first + pass * ROWS, num = std::min<int64_t>(ROWS, last - row);
        const Ahead ahead = is_last_part ? part_ahead(next, num_terms, pass, num_passes) : Ahead{weight, 0, 1};
        VARIANTS<VECTORS>[num - 1](call, batch, x, tile, 0, row, ahead);
    }
}

// Add the products of NUM rows of packed terms with a block of a tile's weights to the sums of the rows.
template <int NUM>
void add_block(Floats (*sums)[VECTORS], const Term* x, const Terms* weight, int64_t num_terms, const Ahead& ahead) {
    multiply_ahead(*reinterpret_cast<Floats(*)[NUM][VECTORS]>(sums), x, 1, NUM, weight, num_terms, ahead);
}

constexpr decltype(&add_block<1>) BLOCK_VARIANTS[] = {add_block<1>, add_block<2>, add_block<3>, add_block<4>,
                                                      add_block<5>, add_block<6>, add_block<7>, add_block<8>};

// A task with packed rows. The weights of BLOCK terms stay in the nearest cache while they are multiplied for all rows, and are
// widened once. The first passes over the rows fetch the block of the next tile, the others the weights that come next. A sum gets
// its terms in their order, so the bits are those of compute_rows.
void compute_blocks(const LinearCall& call, const Batch& batch, const Term* packed, int64_t tile, int64_t first, int64_t last,
                    bool is_last_part) {
    const int64_t num_terms = call.num_in / PER_TERM;
    const int64_t num_fetching = std::min<int64_t>(VECTORS, ceil_div(last - first, ROWS));
    Floats sums[TASK_ROWS][VECTORS] = {};
    Terms wide[WIDENS ? BLOCK * VECTORS : 1];
    for (int64_t start = 0; start < num_terms; start += BLOCK) {
        const int64_t num = std::min<int64_t>(BLOCK, num_terms - start);
        const StoredTerms *weight = weights(call, tile) + start * VECTORS, *next = weight + num_terms * VECTORS;
        for (int64_t i = 0; WIDENS && i < num * VECTORS; i++) wide[i] = loaded(weight[i]);
        const Terms* block = WIDENS ? wide : (const Terms*)weight;
        for (int64_t row = first; row < last; row += ROWS) {
            const int64_t num_rows = std::min<int64_t>(ROWS, last - row), pass = (row - first) / ROWS;
            const Term* x = packed + start * batch.num_rows + row * num;
            Ahead ahead{weight + BLOCK_AHEAD, sizeof(StoredTerms), VECTORS};
            if (WIDENS) ahead = {x + ROWS * num, ROWS * sizeof(Term), 1};
            if (is_last_part && pass < num_fetching) ahead = part_ahead(next, num, pass, num_fetching);
            BLOCK_VARIANTS[num_rows - 1](sums + row - first, x, block, num, ahead);
        }
    }
    for (int64_t row = first; row < last; row++) {
        fetch_outputs(call, batch, std::min(row + 4, last - 1), tile * TILE, TILE);
        write_outputs(call, batch, row, tile * TILE, sums[row - first]);
    }
}

// Put the terms of ROWS rows in turn: of each pair of rows, half of them apart, the lanes in turn, log2(ROWS) times. The bits of
// a number's place, those of its row and those of its lane, are rotated by one each time.
void interleave(Terms (&rows)[ROWS]) {
    for (int round = 1; round < ROWS; round *= 2) {
        Terms turned[ROWS];
        for (int i = 0; i < ROWS; i++) {
            const Terms &even = rows[i / 2], &odd = rows[i / 2 + ROWS / 2];
#ifdef __clang__
            for (int lane = 0; lane < LANES; lane++) turned[i][lane] = (lane % 2 ? odd : even)[i % 2 * LANES / 2 + lane / 2];
#else  // GCC makes no instruction of that loop
            Ints places;
            for (int lane = 0; lane < LANES; lane++) places[lane] = lane % 2 * LANES + i % 2 * LANES / 2 + lane / 2;
            turned[i] = __builtin_shuffle(even, odd, places);
#endif
        }
        std::memcpy(rows, turned, sizeof rows);
    }
}

// Pack x into scratch memory, each term of ROWS rows in turn: so the products read one row of memory and not ROWS, which share a
// set of the nearest cache if they are a multiple of 4,096 bytes apart. The last rows are fewer.
const Term* pack(const LinearCall& call, const Batch& batch, Member& me) {
    const int64_t num_terms = call.num_in / PER_TERM;
    Term* packed = static_cast<Term*>(batch.arrays[call.scratch]);
    for (int64_t group : me.share(ceil_div(batch.num_rows, ROWS))) {
        const int num_rows = std::min<int64_t>(ROWS, batch.num_rows - group * ROWS);
        for (int64_t start = 0; start < num_terms; start += LANES) {
            const int num = std::min<int64_t>(LANES, num_terms - start);
            const int64_t block = start / BLOCK * BLOCK, num_block = std::min<int64_t>(BLOCK, num_terms - block);
            Term* to = packed + block * batch.num_rows + group * ROWS * num_block + (start - block) * num_rows;
            Terms rows[ROWS] = {};
            for (int i = 0; i < num_rows; i++) {
                const Number* from = call.x.row<Number>(batch, group * ROWS + i) + start * PER_TERM;
                rows[i] = loaded(vector_at<StoredTerms>(reinterpret_cast<const StoredTerm*>(from), num));
            }
            if (num_rows == ROWS) {
                interleave(rows);
                std::memcpy(to, rows, num * sizeof(Term) * ROWS);
            } else {
                for (int term = 0; term < num; term++) {
                    for (int i = 0; i < num_rows; i++) *to++ = rows[i][term];
                }
            }
        }
    }
    me.wait();
    return packed;
}

// The needed outputs of a tile for the rows first .. last - 1. Their weights are fetched first, because processors do not foresee
// that they are apart.
void compute_needed(const LinearCall& call, const Batch& batch, const Terms2D& x, int64_t tile, int64_t first, int64_t last) {
    for (int64_t vector = 0; vector < VECTORS; vector++) {
        if (!call.needs(batch, tile * TILE + vector * LANES, LANES)) continue;
        const StoredTerms* weight = weights(call, tile) + vector;
        for (int64_t term = 0; term < call.num_in / PER_TERM; term++) __builtin_prefetch(weight + term * VECTORS);
        for (int64_t row = first; row < last; row += ROWS) {
            VARIANTS<1>[std::min<int64_t>(ROWS, last - row) - 1](call, batch, x, tile, vector, row, {weight, 0, 1});
        }
    }
}

// x as it is, or widened into scratch memory.
Terms2D terms_of_rows(const LinearCall& call, const Batch& batch, Member& me) {
    if constexpr (!WIDENS) return {(const Term*)call.x.row<Number>(batch, 0), call.x.stride / PER_TERM};
    float* wide = static_cast<float*>(batch.arrays[call.scratch]);
    const int64_t num_parts = ceil_div(call.num_in, LANES);
    for (int64_t task : me.share(batch.num_rows * num_parts)) {
        const int64_t row = task / num_parts, first = task % num_parts * LANES;
        const int num = std::min<int64_t>(call.num_in - first, LANES);
        put(wide + row * call.num_in + first, load(call.x.row<Number>(batch, row) + first, num), num);
    }
    me.wait();
    return {(const Term*)wide, call.num_in};
}

}  // namespace

extern "C" const int64_t tile_size = TILE, num_per_term = PER_TERM;
extern "C" const int64_t scratch_bytes_per_input = WIDENS ? sizeof(float) : 0, packed_bytes_per_input = sizeof(Term) / PER_TERM;

extern "C" void linear(const LinearCall* call, const Batch& batch, Member& me) {
    multiply_by_a(*call, batch, me);
    const bool is_packed = call->is_packed && call->needed < 0 && batch.num_rows > ROWS;
    const Term* packed = is_packed ? pack(*call, batch, me) : nullptr;
    const Terms2D x = is_packed ? Terms2D{} : terms_of_rows(*call, batch, me);
    const int64_t num_tiles = ceil_div(call->num_out, TILE);
    // A small layer has few tiles, so its rows are divided, too, and every thread has some work.
    const int64_t least_parts = std::max<int64_t>(4 * me.num_threads / num_tiles, 1);
    const int64_t part_rows = batch.num_rows / least_parts;
    const int64_t task_rows = std::clamp<int64_t>(ceil_div(part_rows, ROWS) * ROWS, ROWS, TASK_ROWS);
    const int64_t num_parts = ceil_div(batch.num_rows, task_rows);
    for (int64_t task : me.tasks(num_tiles * num_parts)) {
        const int64_t part = task % num_parts, last = std::min((part + 1) * task_rows, batch.num_rows);
        if (is_packed) {
            compute_blocks(*call, batch, packed, task / num_parts, part * task_rows, last, part == num_parts - 1);
        } else if (call->needed < 0) {
            compute_rows(*call, batch, x, task / num_parts, part * task_rows, last, part == num_parts - 1);
        } else {
            compute_needed(*call, batch, x, task / num_parts, part * task_rows, last);
        }
    }
}
