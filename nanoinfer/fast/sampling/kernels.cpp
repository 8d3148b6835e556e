// The largest logits of each row, and the draw from all of its weights, on a CPU. kernels.py says what they replace.

constexpr int LANES = 16;
#include <functional>
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

// Bounds of a weight, or of a sum of weights.
struct Bounds {
    int64_t low, high;

    Bounds& operator+=(const Bounds& other) {
        low += other.low, high += other.high;
        return *this;
    }
};

typedef int64_t Longs __attribute__((vector_size(8 * LANES)));

// The weights of draw.integer_weights for some logits of a row, which are first divided as stages.divided does.
struct Weights {
    const Number* logits;
    float shift, temperature, largest;  // of the divided logits

    // exp_of and sampling/exponentials.py differ by less than 2^-21 of the number.
    void at(int64_t i, int num, Longs& low, Longs& high) const {
        const Floats ratio = exp_of((load(logits + i, num) - shift) / temperature - largest) * 4294967296.0f;
        low = __builtin_convertvector(ratio * (1 - 0x1p-21f), Longs);
        high = __builtin_convertvector(ratio * (1 + 0x1p-21f), Longs);
        for (int lane = num; lane < LANES; lane++) low[lane] = high[lane] = 0;
    }

    Bounds sum(int64_t start, int64_t stop) const {
        Longs low = {}, high = {};
        for (int64_t i = start; i < stop; i += LANES) {
            Longs least, most;
            at(i, std::min<int64_t>(LANES, stop - i), least, most);
            low += least, high += most;
        }
        Bounds total{};
        for (int lane = 0; lane < LANES; lane++) total += {low[lane], high[lane]};
        return total;
    }
};

// draw.thresholds
int64_t threshold_of(int64_t total, double u) {
    return std::min(int64_t(std::floor(u * double(total))), total - 1);
}

// The first id whose cumulative weight exceeds the threshold, and in `total` the sum of all weights. -1 if the bounds do not decide.
int64_t draw_in_row(const Weights& weights, int64_t vocab_size, double u, Bounds& total) {
    std::vector<Bounds> sums;
    total = {};
    for (int64_t start = 0; start < vocab_size; start += BLOCK) {
        sums.push_back(weights.sum(start, std::min(start + BLOCK, vocab_size)));
        total += sums.back();
    }
    const int64_t low = threshold_of(total.low, u), high = threshold_of(total.high, u);
    Bounds before{};
    size_t block = 0;
    while (block + 1 < sums.size() && before.high + sums[block].high <= low) before += sums[block++];
    for (int64_t i = block * BLOCK; i < vocab_size; i += LANES) {
        Longs least, most;
        const int num = std::min<int64_t>(LANES, vocab_size - i);
        weights.at(i, num, least, most);
        for (int lane = 0; lane < num; lane++) {
            before += {least[lane], most[lane]};
            if (before.high > low) return before.low > high ? i + lane : -1;
        }
    }
    return -1;
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
    Slice logits, temperatures, u, token_ids, totals, largest;
    int64_t vocab_size;
};

extern "C" const int64_t sizeof_DrawCall = sizeof(DrawCall);

// A row whose largest logit is not finite gets any id.
extern "C" void draw(const DrawCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        const Number* logits = call->logits.row<Number>(batch, row);
        float& largest = *call->largest.row<float>(batch, row);
        int64_t& token_id = *call->token_ids.row<int64_t>(batch, row);
        find_in_row(logits, call->vocab_size, 1, &largest, &token_id);
        if (!std::isfinite(largest)) continue;
        const float temperature = *call->temperatures.row<float>(batch, row), shift = temperature == 1.0f ? 0.0f : largest;
        const Weights weights{logits, shift, temperature, (largest - shift) / temperature};
        Bounds& total = *call->totals.row<Bounds>(batch, row);
        token_id = draw_in_row(weights, call->vocab_size, *call->u.row<double>(batch, row), total);
    }
}
