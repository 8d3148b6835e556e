// The small operators of a layer, as steps of a program: norms, and the rotation of queries and keys. layers.py defines them.
//
// They read and write arrays of rows. All of a row's sums are in fp32 and in one order, so rows are independent.

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
        squares += part * part;
    });
    return 1 / std::sqrt(sum(squares) / size + float(eps));
}

// weight * x, where x is rounded first, as RMSNorm does.
Floats scaled(Floats x, const Number* weight, int num) {
    return load(weight, num) * widen(narrow(x));
}

}  // namespace

struct Norm {
    int64_t x, out;  // arrays of the batch
    const Number *weight, *bias;
    int64_t size;
    double eps;
};

extern "C" void rms_norm(const Norm* norm, const Batch& batch) {
#pragma omp for
    for (int64_t row = 0; row < batch.num_rows; row++) {
        const Number* x = batch.at<Number>(norm->x) + row * norm->size;
        Number* out = batch.at<Number>(norm->out) + row * norm->size;
        const float scale = inverse_root_mean_square(x, norm->size, norm->eps);
        each(norm->size, [&](int64_t i, int num) {
            store(out + i, scaled(load(x + i, num) * scale, norm->weight + i, num), num);
        });
    }
}

extern "C" void layer_norm(const Norm* norm, const Batch& batch) {
#pragma omp for
    for (int64_t row = 0; row < batch.num_rows; row++) {
        const Number* x = batch.at<Number>(norm->x) + row * norm->size;
        Number* out = batch.at<Number>(norm->out) + row * norm->size;
        Floats total = {}, squares = {};
        each(norm->size, [&](int64_t i, int num) { total += load(x + i, num); });
        const float mean = sum(total) / norm->size;
        each(norm->size, [&](int64_t i, int num) {
            Floats distance = load(x + i, num) - mean;
            for (int lane = num; lane < LANES; lane++) distance[lane] = 0;
            squares += distance * distance;
        });
        const float scale = 1 / std::sqrt(sum(squares) / norm->size + float(norm->eps));
        each(norm->size, [&](int64_t i, int num) {
            store(out + i, (load(x + i, num) - mean) * scale * load(norm->weight + i, num) + load(norm->bias + i, num), num);
        });
    }
}

// Rotates the queries and keys of qkv: [num_rows, num_heads + 2 * num_kv_heads, head_dim], in place.
struct Rotary {
    int64_t qkv, cos, sin;             // arrays of the batch. cos and sin: [num_rows, head_dim]
    const Number *q_weight, *k_weight;  // of RMS norms over heads, or null
    int64_t num_heads, num_kv_heads, head_dim;
    double eps;
};

extern "C" void rotate(const Rotary* rotary, const Batch& batch) {
    const int64_t head_dim = rotary->head_dim, half = head_dim / 2, num_rotated = rotary->num_heads + rotary->num_kv_heads;
#pragma omp for
    for (int64_t task = 0; task < batch.num_rows * num_rotated; task++) {
        const int64_t row = task / num_rotated, place = task % num_rotated;
        Number* head = batch.at<Number>(rotary->qkv) + (row * (num_rotated + rotary->num_kv_heads) + place) * head_dim;
        const Number* cos = batch.at<Number>(rotary->cos) + row * head_dim;
        const Number* sin = batch.at<Number>(rotary->sin) + row * head_dim;
        const Number* weight = place < rotary->num_heads ? rotary->q_weight : rotary->k_weight;
        const float scale = weight ? inverse_root_mean_square(head, head_dim, rotary->eps) : 1;
        each(half, [&](int64_t i, int num) {
            Floats first = load(head + i, num), second = load(head + half + i, num);
            if (weight) {
                first = widen(narrow(scaled(first * scale, weight + i, num)));
                second = widen(narrow(scaled(second * scale, weight + half + i, num)));
            }
            store(head + i, first * load(cos + i, num) - second * load(sin + i, num), num);
            store(head + half + i, second * load(cos + half + i, num) + first * load(sin + half + i, num), num);
        });
    }
}
