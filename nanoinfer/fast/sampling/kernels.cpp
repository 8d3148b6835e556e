// The largest logits of each row, the draw from all of its weights, and exponentials, on a CPU. kernels.py calls them.

constexpr int LANES = 16;
#include <functional>
#include <numeric>
#include <vector>

#include "program.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64 * LANES;  // logits

struct Logit {
    float value;
    int64_t id;
};

// The num largest logits of a row, of equal logits those with the lowest ids, in the order of the ids. If a logit is NaN, all
// values are NaN.
//
// The maxima of the lanes of each block are found first. Their num-th largest is a limit that at least num logits reach, and in
// most rows not many more, so that few lanes are read again.
void find_in_row(const Number* logits, int64_t vocab_size, int64_t num, float* values, int64_t* ids) {
    std::vector<float> maxima;
    Ints is_nan = {};
    for (int64_t start = 0; start < vocab_size; start += BLOCK) {
        Floats largest = Floats{} - INFINITY;
        for (int64_t i = start; i < std::min(start + BLOCK, vocab_size); i += LANES) {
            Floats x = load(logits + i, std::min<int64_t>(LANES, vocab_size - i));
            for (int64_t lane = vocab_size - i; lane < LANES; lane++) x[lane] = -INFINITY;
            largest = x > largest ? x : largest;
            is_nan |= x != x;
        }
        for (int lane = 0; lane < LANES; lane++) maxima.push_back(largest[lane]);
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (!is_nan[lane]) continue;
        std::fill(values, values + num, NAN);
        std::fill(ids, ids + num, 0);
        return;
    }
    float limit = -INFINITY;
    if (num <= int64_t(maxima.size())) {
        std::vector<float> falling = maxima;
        std::nth_element(falling.begin(), falling.begin() + num - 1, falling.end(), std::greater<float>());
        limit = falling[num - 1];
    }
    std::vector<Logit> found;
    for (size_t i = 0; i < maxima.size(); i++) {
        if (maxima[i] < limit) continue;
        const int64_t start = i / LANES * BLOCK;
        for (int64_t id = start + i % LANES; id < std::min(start + BLOCK, vocab_size); id += LANES) {
            const float value = load(logits + id, 1)[0];
            if (value >= limit) found.push_back({value, id});
        }
    }
    std::nth_element(found.begin(), found.begin() + num - 1, found.end(), [](const Logit& a, const Logit& b) {
        return a.value > b.value || (a.value == b.value && a.id < b.id);
    });
    std::sort(found.begin(), found.begin() + num, [](const Logit& a, const Logit& b) { return a.id < b.id; });
    for (int64_t i = 0; i < num; i++) values[i] = found[i].value, ids[i] = found[i].id;
}

// sampling/exponentials.py defines these numbers, and says why they have the same bits everywhere.
struct Exponential {
    const double* table;
    double lowest, scale, first, second;

    void compute(const float* below, int64_t num, int64_t* out) const {
        for (int64_t i = 0; i < num; i++) {
            const double scaled = below[i] * scale, x = scaled > lowest ? scaled : lowest;
            const double shift = 6755399441055744.0, steps = (x + shift) - shift, rest = x - steps;  // 1.5 * 2^52 rounds
            out[i] = float(((rest * second + first) * rest + 1) * table[int64_t(-steps)]);
        }
    }
};

// The weights of draw.integer_weights for a row's logits, which are first divided as stages.divided does.
struct Weights {
    const Number* logits;
    float shift, temperature, largest;  // of the divided logits
    const Exponential& exponential;

    // Compute the weights from id `start` to `stop`, at most a block, and return their sum.
    int64_t compute(int64_t start, int64_t stop, int64_t* weights) const {
        float below[BLOCK];
        for (int64_t i = start; i < stop; i += LANES) {
            const Floats x = load(logits + i, std::min<int64_t>(LANES, stop - i));
            put(below + i - start, (x - shift) / temperature - largest);
        }
        exponential.compute(below, stop - start, weights);
        return std::accumulate(weights, weights + stop - start, int64_t(0));
    }
};

// The first id whose cumulative weight exceeds draw.thresholds, and in `total` the sum of all weights.
int64_t draw_in_row(const Weights& weights, int64_t vocab_size, double u, int64_t& total) {
    std::vector<int64_t> sums;
    int64_t in_block[BLOCK];
    for (int64_t start = 0; start < vocab_size; start += BLOCK) {
        sums.push_back(weights.compute(start, std::min(start + BLOCK, vocab_size), in_block));
    }
    total = std::accumulate(sums.begin(), sums.end(), int64_t(0));
    int64_t after = std::min(int64_t(std::floor(u * double(total))), total - 1);  // the threshold, counted from the block on
    int64_t start = 0;
    for (size_t block = 0; sums[block] <= after; start += BLOCK) after -= sums[block++];
    weights.compute(start, std::min(start + BLOCK, vocab_size), in_block);
    int64_t i = 0;
    while (in_block[i] <= after) after -= in_block[i++];
    return start + i;
}

}  // namespace

struct LargestCall {
    Slice logits, values, ids;
    int64_t vocab_size, num_columns;
};

extern "C" const int64_t sizeof_LargestCall = sizeof(LargestCall);

extern "C" void find_largest(const LargestCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        find_in_row(
            call->logits.row<Number>(batch, row), call->vocab_size, call->num_columns, call->values.row<float>(batch, row),
            call->ids.row<int64_t>(batch, row)
        );
    }
}

struct DrawCall {
    Slice logits, largest, temperatures, u, token_ids, totals;
    int64_t vocab_size;
    Exponential exponential;
};

extern "C" const int64_t sizeof_DrawCall = sizeof(DrawCall);

extern "C" void draw(const DrawCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        const float largest = *call->largest.row<float>(batch, row), temperature = *call->temperatures.row<float>(batch, row);
        const float shift = temperature == 1.0f ? 0.0f : largest;
        const Weights weights{
            call->logits.row<Number>(batch, row), shift, temperature, (largest - shift) / temperature, call->exponential
        };
        int64_t& total = *call->totals.row<int64_t>(batch, row);
        *call->token_ids.row<int64_t>(batch, row) = draw_in_row(weights, call->vocab_size, *call->u.row<double>(batch, row), total);
    }
}

struct ExponentialsCall {
    Slice below, out;  // float, int64_t. A row is a part of them
    int64_t num_numbers, part;
    Exponential exponential;
};

extern "C" const int64_t sizeof_ExponentialsCall = sizeof(ExponentialsCall);

extern "C" void exponentials(const ExponentialsCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        const int64_t num = std::min(call->num_numbers - row * call->part, call->part);
        call->exponential.compute(call->below.row<float>(batch, row), num, call->out.row<int64_t>(batch, row));
    }
}
