// What rounds weights to 4 bits so that a layer's outputs change little, and what finds out how much each input counts for that.
// quantized.py and calibration.py call them. The bits of the results depend neither on the processor nor on the number of threads.

constexpr int LANES = 16;

#include "linear.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
constexpr float HIGHEST = 15;  // of the integers

template <class T>
inline T nearest_within(T x, T lowest, T highest) {  // NaN becomes the lowest
    x = x + TO_ROUND - TO_ROUND;
    return x > lowest ? (x < highest ? x : highest) : lowest;
}

// The weights of a group of an output, and how much each of them counts.
struct Group {
    Floats weights[4], counts[4];
    int num;  // of vectors
    float scale = 0, zero = 0, gain = 0;  // the best so far. gain: by how much its error is smaller than that of zeros

    Floats shifted(int i, float scale, float zero) const {  // the integers of vector i, less the zero
        return nearest_within(weights[i] * (1 / scale), Floats{} - zero, Floats{} + (HIGHEST - zero));
    }

    // Try another scale and zero. The scale that is kept has the least error for the integers that they give.
    void attempt(float other_scale, float other_zero) {
        Floats products = {}, squares = {};
        for (int i = 0; i < num; i++) {
            const Floats x = shifted(i, other_scale, other_zero), weighted = x * counts[i];
            products += weighted * weights[i];
            squares += weighted * x;
        }
        const float product = sum(products), square = sum(squares), other_gain = product * product / square;
        if (product > 0 && other_gain > gain) scale = product / square, zero = other_zero, gain = other_gain;
    }

    // Try ranges about the whole one, with zeros near that of the smallest weight.
    void search() {
        float lowest = 0, highest = 0;
        for (int i = 0; i < num * LANES; i++) {
            lowest = std::min(lowest, weights[i / LANES][i % LANES]);
            highest = std::max(highest, weights[i / LANES][i % LANES]);
        }
        const float whole = scale = std::max((highest - lowest) / HIGHEST, 1.1754944e-38f);  // of zeros, any scale
        for (int step = 28; step <= 35; step++) {
            const float tried = whole * (step * 0.03f);
            for (int i = -1; i <= 1; i++) attempt(tried, nearest_within(i - lowest / tried, 0.0f, HIGHEST));
        }
        for (int i = 0; i < 3; i++) attempt(scale, zero);
    }
};

}  // namespace

// The batch has the weights, the counts of the inputs, and the results: integers, scales and zeros.
struct RoundingCall {
    int64_t num_groups, group_size;
};

extern "C" void round_weights(const RoundingCall* call, const Batch& batch, Member& me) {
    const auto weights = static_cast<const float*>(batch.arrays[0]), counts = static_cast<const float*>(batch.arrays[1]);
    for (int64_t i : me.tasks(batch.num_rows * call->num_groups)) {
        const int64_t first = i * call->group_size, input = i % call->num_groups * call->group_size;
        Group group{{}, {}, int(call->group_size / LANES)};
        for (int j = 0; j < group.num; j++) {
            group.weights[j] = vector_at<Floats>(weights + first + j * LANES);
            group.counts[j] = vector_at<Floats>(counts + input + j * LANES);
        }
        group.search();
        for (int j = 0; j < group.num; j++) {
            const Floats integers = group.shifted(j, group.scale, group.zero) + group.zero;
            put(static_cast<uint8_t*>(batch.arrays[2]) + first + j * LANES, __builtin_convertvector(integers, Bytes));
        }
        static_cast<float*>(batch.arrays[3])[i] = group.scale;
        static_cast<uint8_t*>(batch.arrays[4])[i] = uint8_t(group.zero);
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
