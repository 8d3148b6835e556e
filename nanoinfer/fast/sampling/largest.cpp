// The largest logits of each row with their ids, on a CPU. largest.py says what it replaces.

constexpr int LANES = 16;
#include "program.h"
#include "vectors.h"

#include <vector>

namespace {

constexpr int64_t BLOCK = 4 * LANES;  // logits

struct Logit {
    float value;
    int64_t id;
};

bool is_before(const Logit& a, const Logit& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// NaN if one of `num` logits is NaN.
float largest_of(const Number* logits, int64_t num) {
    Floats largest = Floats{} - INFINITY;
    Ints is_nan = {};
    for (int64_t i = 0; i < num; i += LANES) {
        Floats x = load(logits + i, std::min<int64_t>(LANES, num - i));
        for (int64_t lane = num - i; lane < LANES; lane++) x[lane] = -INFINITY;
        largest = x > largest ? x : largest;
        is_nan |= x != x;
    }
    float limit = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) limit = std::max(limit, largest[lane]);
    for (int lane = 0; lane < LANES; lane++) limit = is_nan[lane] ? NAN : limit;
    return limit;
}

// The num largest logits of a row, of equal logits those with the lowest ids, in the order of the ids. If a logit is NaN, all
// values are NaN.
//
// The num-th largest of the blocks' maxima is a limit that at least num logits reach. In most rows these are few more than num.
void find_in_row(const Number* logits, int64_t vocab_size, int64_t num, float* values, int64_t* ids) {
    const int64_t num_blocks = (vocab_size + BLOCK - 1) / BLOCK;
    std::vector<float> maxima(num_blocks);
    for (int64_t i = 0; i < num_blocks; i++) {
        maxima[i] = largest_of(logits + i * BLOCK, std::min(BLOCK, vocab_size - i * BLOCK));
        if (std::isnan(maxima[i])) {
            std::fill(values, values + num, NAN);
            std::fill(ids, ids + num, 0);
            return;
        }
    }
    float limit = -INFINITY;
    if (num <= num_blocks) {
        std::vector<float> falling = maxima;
        std::nth_element(falling.begin(), falling.begin() + num - 1, falling.end(), std::greater<float>());
        limit = falling[num - 1];
    }
    std::vector<Logit> found;
    for (int64_t i = 0; i < num_blocks; i++) {
        if (maxima[i] < limit) continue;
        for (int64_t id = i * BLOCK; id < std::min((i + 1) * BLOCK, vocab_size); id++) {
            const float value = load(logits + id, 1)[0];
            if (value >= limit) found.push_back({value, id});
        }
    }
    std::nth_element(found.begin(), found.begin() + num - 1, found.end(), is_before);
    std::sort(found.begin(), found.begin() + num, [](const Logit& a, const Logit& b) { return a.id < b.id; });
    for (int64_t i = 0; i < num; i++) values[i] = found[i].value, ids[i] = found[i].id;
}

}  // namespace

struct LargestCall {
    Slice logits, values, ids;
    int64_t vocab_size, num_columns;
};

extern "C" const int64_t sizeof_LargestCall = sizeof(LargestCall);

extern "C" void find_largest(const LargestCall* call, const Batch& batch) {
#pragma omp for nowait
    for (int64_t row = 0; row < batch.num_rows; row++) {
        find_in_row(
            call->logits.row<Number>(batch, row), call->vocab_size, call->num_columns, call->values.row<float>(batch, row),
            call->ids.row<int64_t>(batch, row)
        );
    }
}
