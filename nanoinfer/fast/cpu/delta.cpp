// The recurrence of Gated DeltaNet, for prompts and decode steps alike. features/hybrid/gated_delta.py defines it.
//
// A task is a key head of a sequence, with its value heads: it has its own channels of the convolution and its own part of the
// memory, which stays in the processor's cache while the tokens pass, one after the other (delta.py).
//
// KEY_DIM, VALUE_DIM: numbers of a head. GROUP: value heads of a key head. KERNEL: tokens of the convolution.

constexpr int LANES = 16;
#include "program.h"
#include "vectors.h"

namespace {

constexpr int BEFORE = KERNEL - 1;                         // tokens of the window
constexpr int VALUES = ceil_div(VALUE_DIM, LANES);         // vectors of a value

// Call visit(i, num) for the numbers i .. i + num - 1 of SIZE, at most LANES at a time.
template <int SIZE, class Visit>
__attribute__((always_inline)) inline void each(Visit visit) {
#pragma GCC unroll 8
    for (int i = 0; i < SIZE; i += LANES) visit(i, std::min(LANES, SIZE - i));
}

float number(const Number* x) {
    return load(x, 1)[0];
}

float sigmoid(float x) {
    return sigmoid(Floats{} + x)[0];
}

float softplus(float x) {
    // log(1 + t) = 2 * atanh(s), a series in s = t / (2 + t) <= 1 / 3. Nine terms leave less than half a unit in the last place.
    const float t = exp_of(-std::fabs(x)), s = t / (2 + t), square = s * s;
    float series = 0;
    for (int i = 17; i > 0; i -= 2) series = series * square + 1.0f / i;
    return std::max(x, 0.0f) + 2 * s * series;
}

template <int SIZE>
float sum_of_squares(const float* x) {
    Floats squares = {};
    each<SIZE>([&](int i, int num) {
        const Floats part = vector_at<Floats>(x + i, num);
        squares = multiply_add(part, part, squares);
    });
    return sum(squares);
}

// x / sqrt(sum(x^2) + 1e-6) * factor
void scale_to_unit_length(float* x, float factor) {
    const float scale = factor / std::sqrt(sum_of_squares<KEY_DIM>(x) + 1e-6f);
    for (int i = 0; i < KEY_DIM; i++) x[i] *= scale;
}

// Fade, correct and read one head's memory. out: S^T q. The first pass over the memory brings it into the processor's cache.
void step(float (*memory)[VALUE_DIM], const float* q, const float* k, const float* v, float decay, float beta, float* out) {
    Floats held[VALUES] = {}, correction[VALUES], sums[VALUES] = {};
    for (int i = 0; i < KEY_DIM; i++) {
        each<VALUE_DIM>([&](int j, int num) {
            held[j / LANES] = multiply_add(k[i], vector_at<Floats>(memory[i] + j, num), held[j / LANES]);
        });
    }
    each<VALUE_DIM>([&](int j, int num) {
        correction[j / LANES] = beta * (vector_at<Floats>(v + j, num) - decay * held[j / LANES]);
    });
    for (int i = 0; i < KEY_DIM; i++) {
        each<VALUE_DIM>([&](int j, int num) {
            const Floats faded = decay * vector_at<Floats>(memory[i] + j, num);
            const Floats x = multiply_add(k[i], correction[j / LANES], faded);
            put(memory[i] + j, x, num);
            sums[j / LANES] = multiply_add(q[i], x, sums[j / LANES]);
        });
    }
    each<VALUE_DIM>([&](int j, int num) { put(out + j, sums[j / LANES], num); });
}

}  // namespace

// The sequences of a step, the same for all layers.
struct DeltaArguments {
    const int64_t* first_pieces;  // of each sequence, and the number of all
    const int64_t (*pieces)[4];   // first token, last token + 1, state slot to read, state slot to write
    int64_t num_sequences;
    // of each layer, by state slot: windows [BEFORE, all channels], memories [value heads, KEY_DIM, VALUE_DIM]
    float* const (*tensors)[2];
};

struct DeltaCall {
    Slice qkv, z, b, a, out;
    int64_t rows;                         // an array of the batch: a DeltaArguments
    const float* convolution;             // [KERNEL, all channels]
    const float *rates, *dt_bias, *norm;  // [value heads], [value heads], [VALUE_DIM]
    int64_t layer, num_key_heads;
    double eps;
};

namespace {

// A key head of a sequence, with its value heads.
struct Head {
    const DeltaCall& call;
    const Batch& batch;
    float* const (&tensors)[2];
    int64_t head, num_keys = call.num_key_heads * KEY_DIM, num_values = call.num_key_heads * GROUP * VALUE_DIM;

    // The state of all heads in a state slot.
    float* window(int64_t state_slot) const {
        return tensors[0] + state_slot * BEFORE * (2 * num_keys + num_values);
    }
    float* memory(int64_t state_slot) const {
        return tensors[1] + state_slot * num_values * KEY_DIM + head * GROUP * KEY_DIM * VALUE_DIM;
    }

    // Call visit(channel, size) for its channels: of its query, its key and its values.
    template <class Visit>
    void each_range(Visit visit) const {
        visit(head * KEY_DIM, KEY_DIM);
        visit(num_keys + head * KEY_DIM, KEY_DIM);
        visit(2 * num_keys + head * GROUP * VALUE_DIM, GROUP * VALUE_DIM);
    }

    void run(const int64_t (&piece)[4]) const {
        const int64_t first = piece[0], end = piece[1], read = piece[2], write = piece[3];
        if (read != write) {
            std::memcpy(memory(write), memory(read), GROUP * KEY_DIM * VALUE_DIM * sizeof(float));
            each_range([&](int64_t channel, int size) {
                for (int i = 0; i < BEFORE; i++, channel += 2 * num_keys + num_values) {
                    std::memcpy(window(write) + channel, window(read) + channel, size * sizeof(float));
                }
            });
        }
        for (int64_t token = first; token < end; token++) compute(token, window(write), memory(write));
    }

    // The convolution of the window's tokens and this one, after which this one is the window's latest.
    void convolve(const Number* qkv, float* window, float* mixed) const {
        const int64_t num_channels = 2 * num_keys + num_values;
        each_range([&](int64_t first, int size) {
            for (int c = 0; c < size; c += LANES) {
                const int num = std::min(LANES, size - c);
                const float* weight = call.convolution + first + c;
                float* before = window + first + c;
                const Floats x = load(qkv + first + c, num);
                Floats total = {};
                for (int i = 0; i < BEFORE; i++, weight += num_channels, before += num_channels) {
                    total = multiply_add(vector_at<Floats>(before, num), vector_at<Floats>(weight, num), total);
                    put(before, i + 1 < BEFORE ? vector_at<Floats>(before + num_channels, num) : x, num);
                }
                total = multiply_add(x, vector_at<Floats>(weight, num), total);
                put(mixed + c, total * sigmoid(total), num);
            }
            mixed += size;
        });
    }

    void compute(int64_t token, float* window, float* memory) const {
        float mixed[2 * KEY_DIM + GROUP * VALUE_DIM], y[VALUE_DIM];
        float *q = mixed, *k = mixed + KEY_DIM, *v = mixed + 2 * KEY_DIM;
        convolve(call.qkv.row<Number>(batch, token), window, mixed);
        scale_to_unit_length(q, 1 / std::sqrt(float(KEY_DIM)));
        scale_to_unit_length(k, 1);
        for (int64_t i = head * GROUP; i < (head + 1) * GROUP; i++, v += VALUE_DIM, memory += KEY_DIM * VALUE_DIM) {
            const float beta = sigmoid(number(call.b.row<Number>(batch, token) + i));
            const float rate = softplus(number(call.a.row<Number>(batch, token) + i) + call.dt_bias[i]);
            step((float(*)[VALUE_DIM])memory, q, k, v, exp_of(-call.rates[i] * rate), beta, y);
            const float scale = 1 / std::sqrt(sum_of_squares<VALUE_DIM>(y) / VALUE_DIM + float(call.eps));
            const Number* z = call.z.row<Number>(batch, token) + i * VALUE_DIM;
            Number* out = call.out.row<Number>(batch, token) + i * VALUE_DIM;
            each<VALUE_DIM>([&](int j, int num) {
                const Floats gate = load(z + j, num);
                const Floats normed = vector_at<Floats>(y + j, num) * scale * vector_at<Floats>(call.norm + j, num);
                store(out + j, normed * (gate * sigmoid(gate)), num);
            });
        }
    }
};

}  // namespace

extern "C" void advance(const DeltaCall* call, const Batch& batch, Member& me) {
    const DeltaArguments& rows = *static_cast<const DeltaArguments*>(batch.arrays[call->rows]);
    for (int64_t task : me.tasks(rows.num_sequences * call->num_key_heads)) {
        const int64_t sequence = task / call->num_key_heads;
        const Head head{*call, batch, rows.tensors[call->layer], task % call->num_key_heads};
        for (int64_t i = rows.first_pieces[sequence]; i < rows.first_pieces[sequence + 1]; i++) head.run(rows.pieces[i]);
    }
}

extern "C" const int64_t sizeof_DeltaCall = sizeof(DeltaCall), sizeof_DeltaArguments = sizeof(DeltaArguments);
