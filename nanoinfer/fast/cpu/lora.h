// What adapters of requests add to the sums of a linear layer, before its activation: scale * (x @ a.T) @ b.T, with the a and b of
// each row's adapter. lora.py makes the arguments, and features/adapters/layers.py has the plain definition.
//
// A layer first computes the products of each row with its adapter's a. The second product is added where the layer writes its
// outputs. So an adapter takes no call and no array of its own, and a row without one is not touched.

#pragma once

#include "program.h"
#include "vectors.h"

constexpr int RANKS = 4;         // that are computed together. A rank is rounded up to a multiple of them
constexpr int64_t OUTPUTS = 16;  // of b that lie together, a multiple of LANES
constexpr int FETCH_VECTORS = 3;  // of b that are fetched ahead: about those of the next tile

// What one adapter changes in one linear layer. rank 0: nothing.
struct LowRank {
    const Number* a;  // [rank, num_in]
    const Number* b;  // [outputs of the call / OUTPUTS, rank, OUTPUTS], from the vector on in which the layer begins
    double scale;
    int64_t rank;
};

// The rows of a step, the same for all layers.
struct MappingArguments {
    int64_t num_rows;      // 0: no row has an adapter
    const int64_t* indices;  // [num_rows]: of each row's adapter, or -1
    float* products;       // [num_rows, width of a call's products]
};

// The adapters of a call, which computes several layers side by side.
struct Adapted {
    const MappingArguments* mapping;
    const LowRank* changes;  // [adapter indices, num_layers]
    const int64_t* starts;   // [num_layers + 1]: each layer's first output, and the end of the last
    int64_t num_layers, max_rank;
};

namespace {

// Whether a row of this step may have an adapter.
inline bool has_adapters(const Adapted* adapted, const Batch& batch) {
    return adapted && adapted->mapping->num_rows == batch.num_rows;
}

// Products of a row with RANKS rows of a. Each is the sum of 16 sums over the inputs in their order, for any LANES.
inline void multiply_row(const Number* x, const Number* a, int64_t num_in, float scale, float* products) {
    constexpr int VECTORS = 16 / LANES;
    Floats sums[RANKS][VECTORS] = {};
    const auto add = [&](int64_t in, int vector, int num) {
        const Floats part = load(x + in, num);
        for (int i = 0; i < RANKS; i++) {
            sums[i][vector] = multiply_add(part, load(a + i * num_in + in, num), sums[i][vector]);
        }
    };
    int64_t in = 0;
    for (; in + 16 <= num_in; in += 16) {
        for (int vector = 0; vector < VECTORS; vector++) add(in + vector * LANES, vector, LANES);
    }
    for (int vector = 0; in < num_in; vector++, in += LANES) add(in, vector, std::min<int64_t>(LANES, num_in - in));
    for (int i = 0; i < RANKS; i++) products[i] = sum(VECTORS == 1 ? sums[i][0] : sums[i][0] + sums[i][VECTORS - 1]) * scale;
}

// Compute the products with a. Every member of the team calls this before it writes outputs.
template <class Call>
void multiply_by_a(const Call& call, const Batch& batch, Member& me) {
    if (!has_adapters(call.adapted, batch)) return;
    const Adapted& adapted = *call.adapted;
    const int64_t num_rank_blocks = adapted.max_rank / RANKS, width = adapted.num_layers * adapted.max_rank;
    for (int64_t task : me.share(batch.num_rows * adapted.num_layers * num_rank_blocks)) {
        const int64_t row = task / num_rank_blocks / adapted.num_layers, layer = task / num_rank_blocks % adapted.num_layers;
        const int64_t rank = task % num_rank_blocks * RANKS, adapter = adapted.mapping->indices[row];
        if (adapter < 0 || adapted.changes[adapter * adapted.num_layers + layer].rank <= rank) continue;
        const LowRank& change = adapted.changes[adapter * adapted.num_layers + layer];
        float* products = adapted.mapping->products + row * width + layer * adapted.max_rank + rank;
        multiply_row(call.x.template row<Number>(batch, row), change.a + rank * call.num_in, call.num_in, change.scale, products);
    }
    me.wait();
}

// Add the products with b to a vector of a row's sums, from the output `first` on.
inline void add_products_with_b(const Adapted& adapted, int64_t row, int64_t first, Floats& sums) {
    const int64_t adapter = adapted.mapping->indices[row];
    for (int64_t layer = 0; adapter >= 0 && layer < adapted.num_layers; layer++) {
        const int64_t start = adapted.starts[layer];
        const LowRank& change = adapted.changes[adapter * adapted.num_layers + layer];
        if (first + LANES <= start || first >= adapted.starts[layer + 1]) continue;
        const Number* b = change.b + (first / OUTPUTS - start / OUTPUTS) * change.rank * OUTPUTS + first % OUTPUTS;
        const float* products = adapted.mapping->products + (row * adapted.num_layers + layer) * adapted.max_rank;
        for (int64_t i = 0; i < change.rank; i++) {
            __builtin_prefetch(b + (i + FETCH_VECTORS * change.rank) * OUTPUTS, 0, 2);
            sums = multiply_add(products[i], load(b + i * OUTPUTS), sums);
        }
    }
}

}  // namespace
