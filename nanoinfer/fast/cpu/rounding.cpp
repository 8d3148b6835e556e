// What rounds weights to 4 bits so that a layer's outputs change little, and what finds out how much each input counts for that.
// rounding.py calls both. The bits of the results depend neither on the processor nor on the number of threads.

constexpr int LANES = 16;

#include "linear.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

constexpr int MOST_VECTORS = 4;  // of a group
constexpr int MOST_REFITS = 3;
constexpr float HIGHEST = 15;  // of the integers

inline Floats nearest(Floats x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    return x + round - round;
}

// A scale and a zero for a group of weights.
struct Choice {
    float scale, zero, gain;  // gain: by how much the error is smaller than that of zeros
};

// The weights of a group of an output, and how much each of them counts.
struct Group {
    Floats weights[MOST_VECTORS], counts[MOST_VECTORS];
    int num;  // of vectors

    // The integers of vector i, less the zero.
    Floats integers(int i, float scale, float zero) const {
        const Floats lowest = Floats{} - zero, highest = Floats{} + (HIGHEST - zero), x = nearest(weights[i] * (1 / scale));
        return x < lowest ? lowest : x > highest ? highest : x;
    }

    // The scale with the least error for the integers that another scale gives.
    Choice fitted(float scale, float zero) const {
        Floats products = {}, squares = {};
        for (int i = 0; i < num; i++) {
            const Floats x = integers(i, scale, zero), weighted = x * counts[i];
            products += weighted * weights[i];
            squares += weighted * x;
        }
        const float product = sum(products), square = sum(squares);
        return {product / square, zero, product > 0 ? product * product / square : 0};
    }

    // The best of some scales, each with the zeros near that of the smallest weight.
    Choice best() const {
        Floats low = {}, high = {};
        for (int i = 0; i < num; i++) {
            low = weights[i] < low ? weights[i] : low;
            high = weights[i] > high ? weights[i] : high;
        }
        float smallest = 0, largest = 0;
        for (int i = 0; i < LANES; i++) smallest = std::min(smallest, low[i]), largest = std::max(largest, high[i]);
        const float whole = std::max((largest - smallest) / HIGHEST, 1.1754944e-38f);  // a group of zeros may have any scale
        Choice best{whole, std::nearbyint(-smallest / whole), 0};
        for (int step = 0; step < 16; step++) {
            const float scale = whole * (0.6f + 0.03f * step), zero = std::nearbyint(-smallest / scale);
            for (float other = std::max(zero - 2, 0.0f); other <= std::min(zero + 2, HIGHEST); other++) {
                const Choice choice = fitted(scale, other);
                if (choice.gain > best.gain) best = choice;
            }
        }
        for (int i = 0; i < MOST_REFITS; i++) {
            const Choice choice = fitted(best.scale, best.zero);
            if (!(choice.gain > best.gain)) break;
            best = choice;
        }
        return best;
    }
};

}  // namespace

// The weights are array 0 of the batch, and the counts array 1. The results are arrays 2, 3 and 4.
struct RoundingCall {
    int64_t num_groups, group_size;
};

extern "C" void round_weights(const RoundingCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        for (int64_t g = 0; g < call->num_groups; g++) {
            const int64_t index = row * call->num_groups + g, first = index * call->group_size;
            Group group{{}, {}, int(call->group_size / LANES)};
            for (int i = 0; i < group.num; i++) {
                group.weights[i] = vector_at<Floats>(static_cast<float*>(batch.arrays[0]) + first + i * LANES);
                group.counts[i] = vector_at<Floats>(static_cast<float*>(batch.arrays[1]) + g * call->group_size + i * LANES);
            }
            const Choice best = group.best();
            for (int i = 0; i < group.num; i++) {
                const Ints integers = __builtin_convertvector(group.integers(i, best.scale, best.zero) + best.zero, Ints);
                put(static_cast<uint8_t*>(batch.arrays[2]) + first + i * LANES, __builtin_convertvector(integers, Bytes));
            }
            static_cast<float*>(batch.arrays[3])[index] = best.scale;
            static_cast<uint8_t*>(batch.arrays[4])[index] = uint8_t(best.zero);
        }
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
