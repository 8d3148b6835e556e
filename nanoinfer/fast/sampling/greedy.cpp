// The id of each row's largest logit, on a CPU. greedy.py says what it replaces.

constexpr int LANES = 16;
#include "program.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64 * LANES;  // logits

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

// Of equal maxima the lowest id. -1 if the largest logit is not finite or one is NaN.
int64_t id_of_largest(const Number* logits, int64_t vocab_size) {
    float limit = -INFINITY;
    int64_t id = 0;
    for (int64_t start = 0; start < vocab_size; start += BLOCK) {
        const float largest = largest_of(logits + start, std::min(BLOCK, vocab_size - start));
        if (std::isnan(largest)) return -1;
        if (largest > limit) limit = largest, id = start;
    }
    if (!std::isfinite(limit)) return -1;
    while (load(logits + id, 1)[0] != limit) id++;
    return id;
}

}  // namespace

struct GreedyCall {
    Slice logits, token_ids;
    int64_t vocab_size;
};

extern "C" const int64_t sizeof_GreedyCall = sizeof(GreedyCall);

extern "C" void find_largest(const GreedyCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.share(batch.num_rows)) {
        *call->token_ids.row<int64_t>(batch, row) = id_of_largest(call->logits.row<Number>(batch, row), call->vocab_size);
    }
}
