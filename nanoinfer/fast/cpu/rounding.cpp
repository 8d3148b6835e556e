// What rounds weights to 4 bits so that a layer's outputs change little, and what finds out how much each input counts for that.
// rounding.py calls both. The bits of the results depend neither on the processor nor on the number of threads.

constexpr int LANES = 16;

#include "linear.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

constexpr int MOST_VECTORS = 4;  // of a group
constexpr float HIGHEST = 15;    // of the integers

template <class T>
inline T within(T x, T lowest, T highest) {  // NaN becomes the lowest
    return x > lowest ? (x < highest ? x : highest) : lowest;
}

template <class T>
inline T nearest_integer(T x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    return x + round - round;
}

struct Choice {
    float scale, zero, gain;  // gain: by how much the error is smaller than that of zeros
};

// The weights of a group of an output, and how much each of them counts.
struct Group {
    Floats weights[MOST_VECTORS], counts[MOST_VECTORS];
    int num;  // of vectors

    Floats shifted(int i, const Choice& choice) const {  // the integers of vector i, less the zero
        const Floats x = nearest_integer(weights[i] * (1 / choice.scale));
        return within(x, Floats{} - choice.zero, Floats{} + (HIGHEST - choice.zero));
    }

    // Replace a choice by another scale and zero if that is better: by the scale with the least error for its integers.
    bool improve(Choice& best, float scale, float zero) const {
        Floats products = {}, squares = {};
        for (int i = 0; i < num; i++) {
            const Floats x = shifted(i, {scale, zero, 0}), weighted = x * counts[i];
            products += weighted * weights[i];
            squares += weighted * x;
        }
        const float product = sum(products), square = sum(squares), gain = product * product / square;
        if (!(product > 0 && gain > best.gain)) return false;
        best = {product / square, zero, gain};
        return true;
    }

    // The best of the ranges from 0.6 to 1.05 of the whole one, with zeros near that of the smallest weight.
    Choice best() const {
        float lowest = 0, highest = 0;
        for (int i = 0; i < num * LANES; i++) {
            lowest = std::min(lowest, weights[i / LANES][i % LANES]);
            highest = std::max(highest, weights[i / LANES][i % LANES]);
        }
        const float whole = std::max((highest - lowest) / HIGHEST, 1.1754944e-38f);  // a group of zeros may have any scale
        Choice best{whole, within(nearest_integer(-lowest / whole), 0.0f, HIGHEST), 0};
        for (int step = 20; step <= 35; step++) {
            const float scale = whole * (step * 0.03f), middle = nearest_integer(-lowest / scale);
            for (int other = -1; other <= 1; other++) improve(best, scale, within(middle + other, 0.0f, HIGHEST));
        }
        for (int i = 0; i < 3 && improve(best, best.scale, best.zero); i++) {
        }
        return best;
    }
};

}  // namespace

// The batch has the weights, the counts of the inputs, and the results: integers, scales and zeros.
struct RoundingCall {
    int64_t num_groups, group_size;
};

extern "C" void round_weights(const RoundingCall* call, const Batch& batch, Member& me) {
    const float* const* given = (const float* const*)batch.arrays;
    uint8_t *integers = static_cast<uint8_t*>(batch.arrays[2]), *zeros = static_cast<uint8_t*>(batch.arrays[4]);
    for (int64_t i : me.tasks(batch.num_rows * call->num_groups)) {
        const int64_t first = i * call->group_size, input = i % call->num_groups * call->group_size;
        Group group{{}, {}, int(call->group_size / LANES)};
        for (int j = 0; j < group.num; j++) {
            group.weights[j] = vector_at<Floats>(given[0] + first + j * LANES);
            group.counts[j] = vector_at<Floats>(given[1] + input + j * LANES);
        }
        const Choice best = group.best();
        for (int j = 0; j < group.num; j++) {
            put(integers + first + j * LANES, __builtin_convertvector(group.shifted(j, best) + best.zero, Bytes));
        }
        static_cast<float*>(batch.arrays[3])[i] = best.scale;
        zeros[i] = uint8_t(best.zero);
    }
}

// A layer's call, before which the squares of its inputs are added to sums.
struct MeasuredCall {
    KernelCall call;
    float* sums;  // [num_in]
};

extern "C" void measure(const MeasuredCall* measured, const Batch& batch, Member& me) {
    const LinearCall& layer = *static_cast<const LinearCall*>(measured->call.arguments);
    for (int64_t i : me.share(layer.num_in / LANES)) {
        Floats sums = vector_at<Floats>(measured->sums + i * LANES);
        for (int64_t row = 0; row < batch.num_rows; row++) {
            const Floats x = load(layer.x.row<Number>(batch, row) + i * LANES);
            sums += x * x;
        }
        put(measured->sums + i * LANES, sums);
    }
    measured->call.kernel(&layer, batch, me);
}

extern "C" const int64_t sizeof_RoundingCall = sizeof(RoundingCall), sizeof_MeasuredCall = sizeof(MeasuredCall);
