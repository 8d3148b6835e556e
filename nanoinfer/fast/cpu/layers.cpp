// The kernels between the products of a layer: norms, sums, gates, and the rotation of queries and keys. models/layers.py defines them.
//
// All sums of a row are in fp32 and in one order, so rows are independent.

constexpr int LANES = 16;
#include "program.h"
#include "vectors.h"

namespace {

// Call visit(i, num) for the numbers i .. i + num - 1 of `size`, at most LANES at a time.
template <class Visit>
void each(int64_t size, Visit visit) {
    for (int64_t i = 0; i < size; i += LANES) visit(i, int(std::min<int64_t>(LANES, size - i)));
}

float inverse_root_mean_square(const Number* x, int64_t size, double eps) {
    Floats squares = {};
    each(size, [&](int64_t i, int num) {
        const Floats part = load(x + i, num);
        squares = multiply_add(part, part, squares);
    });
    return 1 / std::sqrt(sum(squares) / size + float(eps));
}

// weight * x, where x is rounded first, as RMSNorm does, or (1 + weight) * x, as ZeroCentredRMSNorm does.
Floats scaled(Floats x, const Number* weight, bool is_zero_centred, int num) {
    return is_zero_centred ? (1 + load(weight, num)) * x : load(weight, num) * widen(narrow(x));
}

}  // namespace

struct NormCall {
    Slice x, out;
    const Number *weight, *bias;
    int64_t size;
    double eps;
    int64_t is_zero_centred;
};

extern "C" void rms_norm(const NormCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.share(batch.num_rows)) {
        const Number* x = call->x.row<Number>(batch, row);
        Number* out = call->out.row<Number>(batch, row);
        const float scale = inverse_root_mean_square(x, call->size, call->eps);
        each(call->size, [&](int64_t i, int num) {
            store(out + i, scaled(load(x + i, num) * scale, call->weight + i, call->is_zero_centred, num), num);
        });
    }
}

extern "C" void layer_norm(const NormCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.share(batch.num_rows)) {
        const Number* x = call->x.row<Number>(batch, row);
        Number* out = call->out.row<Number>(batch, row);
        Floats total = {}, squares = {};
        each(call->size, [&](int64_t i, int num) { total += load(x + i, num); });
        const float mean = sum(total) / call->size;
        each(call->size, [&](int64_t i, int num) {
            Floats distance = load(x + i, num) - mean;
            for (int lane = num; lane < LANES; lane++) distance[lane] = 0;
            squares = multiply_add(distance, distance, squares);
        });
        const float scale = 1 / std::sqrt(sum(squares) / call->size + float(call->eps));
        each(call->size, [&](int64_t i, int num) {
            store(out + i, (load(x + i, num) - mean) * scale * load(call->weight + i, num) + load(call->bias + i, num), num);
        });
    }
}

struct AddCall {
    Slice x, y, out;  // out may be x or y
    int64_t size;
};

extern "C" void add(const AddCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.share(batch.num_rows)) {
        const Number *x = call->x.row<Number>(batch, row), *y = call->y.row<Number>(batch, row);
        Number* out = call->out.row<Number>(batch, row);
        each(call->size, [&](int64_t i, int num) { store(out + i, load(x + i, num) + load(y + i, num), num); });
    }
}

// Gates heads: x * sigmoid(gate).
struct GateCall {
    Slice x, gate, out;
    int64_t num_heads, head_dim, gate_step;  // numbers between the gates of two heads
};

extern "C" void gate(const GateCall* call, const Batch& batch, Member& me) {
    for (int64_t task : me.share(batch.num_rows * call->num_heads)) {
        const int64_t row = task / call->num_heads, index = task % call->num_heads;
        const Number* x = call->x.row<Number>(batch, row) + index * call->head_dim;
        const Number* gate = call->gate.row<Number>(batch, row) + index * call->gate_step;
        Number* out = call->out.row<Number>(batch, row) + index * call->head_dim;
        each(call->head_dim, [&](int64_t i, int num) { store(out + i, load(x + i, num) * sigmoid(load(gate + i, num)), num); });
    }
}

// Rotates the first num_rotated numbers of heads. What is not rotated is only normed.
struct RotateCall {
    Slice heads, cos, sin, out;  // cos, sin: [num_rows, num_rotated]. out may be heads
    const Number* weight;        // of an RMSNorm over each head before its rotation, or null
    int64_t num_heads, head_dim, step, num_rotated;  // step: numbers between two heads
    double eps;
    int64_t is_zero_centred;
};

extern "C" void rotate(const RotateCall* call, const Batch& batch, Member& me) {
    const int64_t head_dim = call->head_dim, half = call->num_rotated / 2, num_heads = call->num_heads;
    for (int64_t task : me.share(batch.num_rows * num_heads)) {
        const int64_t row = task / num_heads, index = task % num_heads;
        const Number* head = call->heads.row<Number>(batch, row) + index * call->step;
        Number* out = call->out.row<Number>(batch, row) + index * head_dim;
        const Number *cos = call->cos.row<Number>(batch, row), *sin = call->sin.row<Number>(batch, row);
        const Number* weight = call->weight;
        const float scale = weight ? inverse_root_mean_square(head, head_dim, call->eps) : 1;
        const auto normed = [&](int64_t i, int num) {
            const Floats x = load(head + i, num);
            return weight ? widen(narrow(scaled(x * scale, weight + i, call->is_zero_centred, num))) : x;
        };
        each(half, [&](int64_t i, int num) {
            const Floats first = normed(i, num), second = normed(half + i, num);
            store(out + i, first * load(cos + i, num) - second * load(sin + i, num), num);
            store(out + half + i, second * load(cos + half + i, num) + first * load(sin + half + i, num), num);
        });
        each(head_dim - 2 * half, [&](int64_t i, int num) { store(out + 2 * half + i, normed(2 * half + i, num), num); });
    }
}

extern "C" const int64_t sizeof_NormCall = sizeof(NormCall), sizeof_AddCall = sizeof(AddCall), sizeof_GateCall = sizeof(GateCall),
                         sizeof_RotateCall = sizeof(RotateCall);
