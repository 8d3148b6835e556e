// The recurrence of Gated DeltaNet, for prompts and decode steps alike. models/gated_delta.py defines it.
//
// Tokens are computed one after the other, as in the definition, so a token's bits depend neither on the batch nor on where its
// prompt was cut. A task is a key head of a sequence, with its value heads: it has its own channels of the convolution and its own
// part of the memory, which stays in the processor's cache while the tokens pass.
//
// KEY_DIM, VALUE_DIM: numbers of a head. GROUP: value heads of a key head. KERNEL: tokens of the convolution.

constexpr int LANES = 16;
#include "vectors.h"

namespace {

constexpr int CHANNELS = 2 * KEY_DIM + GROUP * VALUE_DIM;  // of a key head: its query, its key, its values
constexpr int PADDED = (CHANNELS + LANES - 1) / LANES * LANES;
constexpr int BEFORE = KERNEL - 1;  // tokens of the window

void read_numbers(float* to, const Number* from, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int num = int(std::min<int64_t>(LANES, size - i));
        const Floats numbers = load(from + i, num);
        std::memcpy(to + i, &numbers, num * sizeof(float));
    }
}

Floats sigmoid(Floats x) {
    const Floats e = exp_of(x > 0 ? -x : x);
    return (x > 0 ? Floats{} + 1 : e) / (1 + e);
}

float sigmoid(float x) {
    return sigmoid(Floats{} + x)[0];
}

float sum_of_squares(const float* x, int size) {
    float lanes[LANES] = {};
    for (int i = 0; i < size; i++) lanes[i % LANES] += x[i] * x[i];
    Floats all;
    std::memcpy(&all, lanes, sizeof lanes);
    return sum(all);
}

float softplus(float x) {
    return x > 20 ? x : std::log1p(std::exp(x));
}

// Fade, correct and read one head's memory. out: S^T q.
void step(float (*memory)[VALUE_DIM], const float* q, const float* k, const float* v, float decay, float beta, float* out) {
    float held[VALUE_DIM] = {}, correction[VALUE_DIM];
    for (int i = 0; i < KEY_DIM; i++) {
        for (int j = 0; j < VALUE_DIM; j++) {
            memory[i][j] *= decay;
            held[j] += k[i] * memory[i][j];
        }
    }
    for (int j = 0; j < VALUE_DIM; j++) correction[j] = beta * (v[j] - held[j]), out[j] = 0;
    for (int i = 0; i < KEY_DIM; i++) {
        for (int j = 0; j < VALUE_DIM; j++) {
            memory[i][j] += k[i] * correction[j];
            out[j] += q[i] * memory[i][j];
        }
    }
}

}  // namespace

struct DeltaCall {
    const Number *qkv, *z, *b, *a;
    int64_t qkv_stride, z_stride, b_stride, a_stride;  // numbers between rows
    Number* out;                                       // [num_tokens, value heads * VALUE_DIM]
    const float *convolution;                          // [KERNEL, all channels]
    const float *rates, *dt_bias, *norm;               // [value heads], [value heads], [VALUE_DIM]
    float *windows, *memories;                         // of each slot: [BEFORE, all channels], [value heads, KEY_DIM, VALUE_DIM]
    const int64_t* first_pieces;                       // of each sequence, and the number of all
    const int64_t (*pieces)[4];                        // first token, last token + 1, slot to read, slot to write
    int64_t num_sequences, num_key_heads, num_threads;
    double eps;
};

namespace {

struct Head {
    const DeltaCall& call;
    int64_t head, num_channels, starts[3], sizes[3];  // where its channels are among all
    float weights[KERNEL][PADDED] = {}, window[KERNEL][PADDED] = {}, mixed[PADDED];

    Head(const DeltaCall& call, int64_t head) : call(call), head(head) {
        const int64_t num_keys = call.num_key_heads * KEY_DIM;
        num_channels = 2 * num_keys + call.num_key_heads * GROUP * VALUE_DIM;
        starts[0] = head * KEY_DIM, starts[1] = num_keys + head * KEY_DIM, starts[2] = 2 * num_keys + head * GROUP * VALUE_DIM;
        sizes[0] = sizes[1] = KEY_DIM, sizes[2] = GROUP * VALUE_DIM;
        for (int i = 0; i < KERNEL; i++) gather(weights[i], call.convolution + i * num_channels);
    }

    void gather(float* to, const float* from) const {
        for (int part = 0; part < 3; to += sizes[part++]) std::memcpy(to, from + starts[part], sizes[part] * sizeof(float));
    }

    void run(const int64_t (&piece)[4]) {
        const int64_t slot_size = call.num_key_heads * GROUP * KEY_DIM * VALUE_DIM, first = head * GROUP * KEY_DIM * VALUE_DIM;
        float* memory = call.memories + piece[3] * slot_size + first;
        if (piece[2] != piece[3]) {
            std::memcpy(memory, call.memories + piece[2] * slot_size + first, GROUP * KEY_DIM * VALUE_DIM * sizeof(float));
        }
        for (int i = 0; i < BEFORE; i++) gather(window[i], call.windows + (piece[2] * BEFORE + i) * num_channels);
        for (int64_t token = piece[0]; token < piece[1]; token++) compute(token, memory);
        for (int i = 0; i < BEFORE; i++) {
            const float* from = window[i];
            float* to = call.windows + (piece[3] * BEFORE + i) * num_channels;
            for (int part = 0; part < 3; from += sizes[part++]) std::memcpy(to + starts[part], from, sizes[part] * sizeof(float));
        }
    }

    void compute(int64_t token, float* memory) {
        float* x = window[BEFORE];
        for (int part = 0; part < 3; x += sizes[part++]) read_numbers(x, call.qkv + token * call.qkv_stride + starts[part], sizes[part]);
        for (int c = 0; c < PADDED; c += LANES) {
            Floats total = {};
            for (int i = 0; i < KERNEL; i++) total += *(const Floats*)(window[i] + c) * *(const Floats*)(weights[i] + c);
            *(Floats*)(mixed + c) = total * sigmoid(total);
        }
        std::memmove(window, window + 1, sizeof(window[0]) * BEFORE);
        float *q = mixed, *k = mixed + KEY_DIM;
        const float q_scale = 1 / std::sqrt(sum_of_squares(q, KEY_DIM) + 1e-6f) / std::sqrt(float(KEY_DIM));
        const float k_scale = 1 / std::sqrt(sum_of_squares(k, KEY_DIM) + 1e-6f);
        for (int i = 0; i < KEY_DIM; i++) q[i] *= q_scale, k[i] *= k_scale;
        for (int g = 0; g < GROUP; g++) {
            const int64_t i = head * GROUP + g;
            float b, a, y[VALUE_DIM], z[VALUE_DIM];
            read_numbers(&b, call.b + token * call.b_stride + i, 1);
            read_numbers(&a, call.a + token * call.a_stride + i, 1);
            read_numbers(z, call.z + token * call.z_stride + i * VALUE_DIM, VALUE_DIM);
            const float decay = std::exp(-call.rates[i] * softplus(a + call.dt_bias[i]));
            auto head_memory = (float(*)[VALUE_DIM])(memory + g * KEY_DIM * VALUE_DIM);
            step(head_memory, q, k, mixed + 2 * KEY_DIM + g * VALUE_DIM, decay, sigmoid(b), y);
            const float scale = 1 / std::sqrt(sum_of_squares(y, VALUE_DIM) / VALUE_DIM + float(call.eps));
            Number* out = call.out + (token * call.num_key_heads * GROUP + i) * VALUE_DIM;
            for (int j = 0; j < VALUE_DIM; j += LANES) {
                const int num = std::min(LANES, VALUE_DIM - j);
                Floats value = {}, weight = {}, gate = {};
                std::memcpy(&value, y + j, num * sizeof(float));
                std::memcpy(&weight, call.norm + j, num * sizeof(float));
                std::memcpy(&gate, z + j, num * sizeof(float));
                store(out + j, value * scale * weight * (gate * sigmoid(gate)), num);
            }
        }
    }
};

}  // namespace

extern "C" void advance(const DeltaCall* call) {
    const int64_t num_tasks = call->num_sequences * call->num_key_heads;
#pragma omp parallel for schedule(dynamic) num_threads(call->num_threads)
    for (int64_t task = 0; task < num_tasks; task++) {
        const int64_t sequence = task / call->num_key_heads;
        alignas(64) Head head(*call, task % call->num_key_heads);
        for (int64_t i = call->first_pieces[sequence]; i < call->first_pieces[sequence + 1]; i++) head.run(call->pieces[i]);
    }
}

extern "C" const int64_t sizeof_DeltaCall = sizeof(DeltaCall);
