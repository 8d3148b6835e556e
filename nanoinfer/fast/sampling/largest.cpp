// The largest logits of each row with their ids, on a CPU. largest.py says what it replaces.

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
