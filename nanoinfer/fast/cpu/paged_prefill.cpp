// Paged prefill attention on a CPU: store the keys and values of prompt chunks, then attend with each of their queries.
//
// The same computation as causal_attention in attention/cpu.py, which should be read first. Keys are taken in tiles. Each query has the
// largest score so far, the sum of its weights and the weighted sum of values. Both sums are scaled when a larger score is
// found (Dao et al. 2022, https://arxiv.org/abs/2205.14135). So scores stay in the processor's cache.
//
// A vector holds LANES rows, a row being a query of a head. Everything that belongs to a row (scores, maximum, sums) is in one
// lane of vectors, and the numbers of keys and values are broadcast. So no sum runs across lanes.
//
// Rows are independent of the batch and of the chunk. Tiles begin at multiples of TILE tokens of the sequence. A key after a
// row's own token or before its window gets weight 0, and adding 0 changes no bit. All sums are in fp32.

// A block of rows is BLOCK vectors. BROADCASTS numbers (of keys or values) by a block are computed in the machine's registers.
// In bfloat16 they may be tiles (tiles.h): two of keys or values by BLOCK of rows. With AVX-512 a vector is enough to keep the
// processor busy, and what belongs to it stays in the nearest cache: three took 1.07 times as long (AMD EPYC, 1,023 tokens).
#ifdef TILES
constexpr int LANES = 16, BROADCASTS = 32, BLOCK = 3;
#elif defined(__AVX512F__)
constexpr int LANES = 16, BROADCASTS = 8, BLOCK = 1;
#else
constexpr int LANES = 8, BROADCASTS = 4, BLOCK = 3;
#endif
#include "pages.h"
#include "tiles.h"

namespace {

constexpr int TILE = 64;           // keys
constexpr int BLOCKS = 6 / BLOCK;  // of a task: they share the copies of tiles
constexpr int BLOCK_ROWS = BLOCK * LANES, ROWS = BLOCKS * BLOCK_ROWS;
constexpr int HEAD_TERMS = ceil_div(HEAD_DIM, PER_TERM);
constexpr int TILE_TERMS = TILE / PER_TERM;
constexpr int PARTS = ceil_div(HEAD_DIM, BROADCASTS);  // of values
constexpr int COLUMNS = PARTS * BROADCASTS;

// A block of queries of one KV head, and their partial results. A query has a row for each of its heads.
struct QueryRows {
    Terms queries[HEAD_TERMS][BLOCK];
    Ints positions[BLOCK];
    Floats largest[BLOCK], total[BLOCK];      // score, sum of weights
    Floats values[PARTS][BROADCASTS][BLOCK];  // sums of weight * value
};

struct Tile {
    Term keys[TILE][HEAD_TERMS];
    Term values[COLUMNS * TILE_TERMS];  // VALUE_STRIDE and VALUE_TERM_STRIDE apart
};

#ifdef TILES
constexpr int VALUE_STRIDE = TILE_TERMS, VALUE_TERM_STRIDE = 1;
static_assert(PER_TERM == 2 && HEAD_DIM % BROADCASTS == 0 && TILE % BROADCASTS == 0);

// As vectors.h has it. The terms of a number are side by side. Tiles 0 to 5: sums. 6: numbers. 7: rows.
void multiply(Floats (&sums)[BROADCASTS][BLOCK], const Term* numbers, int64_t number_stride, int64_t, const Terms* vectors,
              int64_t vector_stride, int64_t num_terms) {
    constexpr int64_t SUMS_BYTES = sizeof sums[0];
    const int64_t number_bytes = number_stride * sizeof(Term), vector_bytes = vector_stride * sizeof(Terms);
    Floats(*second)[BLOCK] = sums + TILE_ROWS;
    load_tile(0, sums[0] + 0, SUMS_BYTES);
    load_tile(1, sums[0] + 1, SUMS_BYTES);
    load_tile(2, sums[0] + 2, SUMS_BYTES);
    load_tile(3, second[0] + 0, SUMS_BYTES);
    load_tile(4, second[0] + 1, SUMS_BYTES);
    load_tile(5, second[0] + 2, SUMS_BYTES);
    for (int64_t term = 0; term < num_terms; term += TILE_ROWS) {
        const Term* x = numbers + term;
        const Terms* rows = vectors + term * vector_stride;
        load_tile(6, x, number_bytes);
        load_tile(7, rows, vector_bytes);
        add_bfloat16_products(0, 6, 7);
        load_tile(7, rows + 1, vector_bytes);
        add_bfloat16_products(1, 6, 7);
        load_tile(7, rows + 2, vector_bytes);
        add_bfloat16_products(2, 6, 7);
        load_tile(6, x + TILE_ROWS * number_stride, number_bytes);
        add_bfloat16_products(5, 6, 7);
        load_tile(7, rows + 1, vector_bytes);
        add_bfloat16_products(4, 6, 7);
        load_tile(7, rows, vector_bytes);
        add_bfloat16_products(3, 6, 7);
    }
    store_tile(0, sums[0] + 0, SUMS_BYTES);
    store_tile(1, sums[0] + 1, SUMS_BYTES);
    store_tile(2, sums[0] + 2, SUMS_BYTES);
    store_tile(3, second[0] + 0, SUMS_BYTES);
    store_tile(4, second[0] + 1, SUMS_BYTES);
    store_tile(5, second[0] + 2, SUMS_BYTES);
}
#else
constexpr int VALUE_STRIDE = 1, VALUE_TERM_STRIDE = COLUMNS;
#endif

typedef Floats Scores[TILE][BLOCK];
typedef Terms Weights[TILE_TERMS][BLOCK];

typedef uint32_t Distances __attribute__((vector_size(sizeof(Ints))));

// The scores of rows with the first num_keys keys of a tile, and the largest score of each row so far.
void find_scores(Scores& scores, Floats* largest, const QueryRows& rows, const Tile& tile, int64_t first_key, int num_keys,
                 uint32_t window) {
    const float scale = 1.0f / std::sqrt(float(HEAD_DIM));
    for (int key = 0; key < num_keys; key += BROADCASTS) {
        Floats sums[BROADCASTS][BLOCK] = {};
        multiply(sums, tile.keys[key], HEAD_TERMS, 1, rows.queries[0], BLOCK, HEAD_TERMS);
        for (int i = 0; i < BROADCASTS; i++) {
            const int position = first_key + key + i;
            for (int j = 0; j < BLOCK; j++) {
                const Distances distance = (Distances)(rows.positions[j] - position);  // large after the row's own token
                const Floats score = distance >= window ? Floats{} - INFINITY : sums[i][j] * scale;
                largest[j] = score > largest[j] ? score : largest[j];
                scores[key + i][j] = score;
            }
        }
    }
}

// exp(score - largest), whose sum is added to rows.total.
void find_weights(Weights& weights, QueryRows& rows, const Scores& scores, int num_keys) {
    for (int key = 0; key < num_keys; key += PER_TERM) {
        for (int j = 0; j < BLOCK; j++) {
            Floats numbers[PER_TERM];
            for (int i = 0; i < PER_TERM; i++) {
                numbers[i] = exp_of(scores[key + i][j] - rows.largest[j]);
                rows.total[j] += numbers[i];
            }
            weights[key / PER_TERM][j] = terms_of(numbers);
        }
    }
}

// Attend to the first num_keys keys of a tile.
void attend(QueryRows& rows, const Tile& tile, int64_t first_key, int num_keys, uint32_t window) {
    Scores scores;
    Weights weights;
    Floats largest[BLOCK], factor[BLOCK];
    std::copy_n(rows.largest, BLOCK, largest);
    find_scores(scores, largest, rows, tile, first_key, num_keys, window);
    for (int j = 0; j < BLOCK; j++) {
        factor[j] = exp_of(rows.largest[j] - largest[j]);
        rows.total[j] *= factor[j];
        rows.largest[j] = largest[j];
    }
    find_weights(weights, rows, scores, num_keys);
    for (int part = 0; part < PARTS; part++) {
        auto& sums = rows.values[part];
        for (auto& of_value : sums) {
            for (int j = 0; j < BLOCK; j++) of_value[j] *= factor[j];
        }
        const Term* values = tile.values + part * BROADCASTS * VALUE_STRIDE;
        multiply(sums, values, VALUE_STRIDE, VALUE_TERM_STRIDE, weights[0], BLOCK, num_keys / PER_TERM);
    }
}

const Stored ZEROS[STORED_SIZE] = {};

// Call set(i, term) for each term of a head.
template <class Set>
void each_term(const Number* head, Set set) {
    for (int i = 0; i < HEAD_DIM / PER_TERM; i++) set(i, term_of(head[i * PER_TERM], head[i * PER_TERM + PER_TERM - 1]));
    if (HEAD_DIM % PER_TERM) set(HEAD_TERMS - 1, term_of(head[HEAD_DIM - 1], 0));
}

// The numbers of a stored head, which may be written to `numbers`.
#ifdef INT8_PAGES
const Number* numbers_of(const Stored* head, Number* numbers) {
    const Head x = load_stored(head);
    for (int i = 0; i < HEAD_VECTORS; i++) store(numbers + i * LANES, x.vectors[i], std::min(HEAD_DIM - i * LANES, LANES));
    return numbers;
}
#else
const Number* numbers_of(const Stored* head, Number*) {
    return head;
}
#endif

// Some rows of a prompt chunk. Consecutive rows are the heads of a query that share the KV head, then those of the next query.
struct Task {
    int64_t sequence, kv_head, group;
    int64_t first_token, first_position;  // of the chunk, in the batch and in its sequence
    int64_t first_row, num_rows;

    int64_t position_of(int64_t row) const { return first_position + (first_row + row) / group; }

    // Call visit(row, its query, its head) for each row.
    template <class Visit>
    void each_row(Visit visit) const {
        int64_t query = first_row / group, head = first_row % group;
        for (int row = 0; row < num_rows; row++) {
            visit(row, query, kv_head * group + head);
            if (++head == group) head = 0, query++;
        }
    }
};

// Copy TILE tokens from first_key on. Those from `end` on are zeros, and so are those before `begin`, whose blocks may have been
// freed.
void copy(Tile& tile, const AttentionArguments& rows, int64_t layer, const Task& task, int64_t first_key, int64_t begin,
          int64_t end) {
    const Stored *k_pages = rows.pages[2 * layer], *v_pages = rows.pages[2 * layer + 1];
    const int64_t num_zeros = std::max<int64_t>(begin - first_key, 0);
    const Places<TILE> places(rows, task.sequence, task.kv_head, first_key + num_zeros, std::min(first_key + TILE, end));
    const auto head_of = [&](const Stored* pages, int64_t token) {
        const bool is_stored = token >= num_zeros && token < num_zeros + places.num_tokens;
        return is_stored ? pages + places.of[token - num_zeros] : ZEROS;
    };
    Number numbers[2][HEAD_DIM];
    for (int token = 0; token < TILE; token++) {
        each_term(numbers_of(head_of(k_pages, token), numbers[0]), [&](int i, Term term) { tile.keys[token][i] = term; });
    }
    for (int term = 0; term < TILE_TERMS; term++) {
        const Number* first = numbers_of(head_of(v_pages, term * PER_TERM), numbers[0]);
        const Number* second = numbers_of(head_of(v_pages, term * PER_TERM + PER_TERM - 1), numbers[1]);
        Term* values = tile.values + term * VALUE_TERM_STRIDE;
        for (int d = 0; d < HEAD_DIM; d++) values[d * VALUE_STRIDE] = term_of(first[d], second[d]);
        for (int d = HEAD_DIM; d < COLUMNS; d++) values[d * VALUE_STRIDE] = 0;
    }
}

void attend(const Task& task, const AttendCall& call, const Batch& batch, const AttentionArguments& rows) {
    const Number* q = call.q.row<Number>(batch, task.first_token);
    Number* out = call.out.row<Number>(batch, task.first_token);
    const uint32_t window = rows.window;
    QueryRows blocks[BLOCKS];
    Tile tile;
    const int64_t num_blocks = ceil_div(task.num_rows, BLOCK_ROWS);
    for (int64_t i = 0; i < num_blocks; i++) {
        blocks[i] = {};
        for (Floats& largest : blocks[i].largest) largest -= 1e30f;  // finite: a row may find no key of its window in a tile
    }
    task.each_row([&](int row, int64_t query, int64_t head) {
        QueryRows& block = blocks[row / BLOCK_ROWS];
        row %= BLOCK_ROWS;
        ((int32_t*)block.positions)[row] = task.first_position + query;
        if (call.sinks) {  // a sink is the first key of a row
            ((float*)block.largest)[row] = call.sinks[head];
            ((float*)block.total)[row] = 1;
        }
        const Number* of_row = q + query * call.q.stride + head * HEAD_DIM;
        each_term(of_row, [&](int i, Term term) { ((Term*)block.queries[i])[row] = term; });
    });

    const int64_t last = task.position_of(task.num_rows - 1);
    const auto first_token = [&](int64_t row) { return std::max<int64_t>(task.position_of(row) + 1 - window, 0); };
    const int64_t begin = first_token(0);
    for (int64_t first = begin / TILE * TILE; first <= last; first += TILE) {
        copy(tile, rows, call.layer, task, first, begin, last + 1);
        for (int64_t i = 0; i < num_blocks; i++) {
            const int64_t first_row = i * BLOCK_ROWS, last_row = std::min(first_row + BLOCK_ROWS, task.num_rows) - 1;
            const int64_t num_keys = std::min<int64_t>(TILE, task.position_of(last_row) + 1 - first);
            if (num_keys > 0 && first_token(first_row) < first + TILE) {
                attend(blocks[i], tile, first, ceil_div(num_keys, BROADCASTS) * BROADCASTS, window);
            }
        }
    }

    Numbers results[BLOCKS][COLUMNS][BLOCK];
    for (int64_t i = 0; i < num_blocks; i++) {
        const Floats(*values)[BLOCK] = blocks[i].values[0];
        for (int d = 0; d < HEAD_DIM; d++) {
            for (int j = 0; j < BLOCK; j++) results[i][d][j] = narrow(values[d][j] / blocks[i].total[j] + 0.0f);  // +0 for -0
        }
    }
    task.each_row([&](int row, int64_t query, int64_t head) {
        const Numbers(*block)[BLOCK] = results[row / BLOCK_ROWS];
        Number* of_row = out + query * call.out.stride + head * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) of_row[d] = ((const Number*)block[d])[row % BLOCK_ROWS];
    });
}

}  // namespace

extern "C" void prefill(const AttendCall* call, const Batch& batch, Member& me) {
    const AttentionArguments& rows = *static_cast<const AttentionArguments*>(batch.arrays[call->rows]);
    const int64_t group = call->out.stride / (rows.num_kv_heads * HEAD_DIM);  // the rows of `out` are contiguous
    // The tasks of a sequence: the rows of one KV head after the other, so that its pages stay in a cache.
    const auto num_queries_of = [&](int64_t sequence) { return rows.starts[sequence + 1] - rows.starts[sequence]; };
    const auto num_in_head_of = [&](int64_t sequence) { return ceil_div(num_queries_of(sequence) * group, ROWS); };
    const auto num_tasks_of = [&](int64_t sequence) { return num_in_head_of(sequence) * rows.num_kv_heads; };
    int64_t num_tasks = 0;
    for (int64_t i = 0; i < rows.num_sequences; i++) num_tasks += num_tasks_of(i);
    store_tokens(*call, rows, batch, me);
#ifdef TILES
    set_shapes(2 * TILE_ROWS, TILE_BYTES, TILE_ROWS);
#endif
    int64_t sequence = 0, before = 0;  // before: the tasks of the sequences before it
    for (int64_t i : me.tasks(num_tasks)) {
        if (i < before) sequence = before = 0;
        while (i >= before + num_tasks_of(sequence)) before += num_tasks_of(sequence++);
        const int64_t num_queries = num_queries_of(sequence), num_in_head = num_in_head_of(sequence);
        const int64_t kv_head = (i - before) / num_in_head, place = (i - before) % num_in_head;
        const int64_t first = (num_in_head - 1 - place) * ROWS;  // the last rows first, because they take the longest
        const Task task{sequence, kv_head, group, rows.starts[sequence] - rows.starts[0], rows.seq_lens[sequence] - num_queries,
                        first, std::min<int64_t>(ROWS, num_queries * group - first)};
        attend(task, *call, batch, rows);
    }
#ifdef TILES
    release_tiles();
#endif
}
