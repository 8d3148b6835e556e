// What the kernels of linear layers do with their sums: out = residual + factor * activation(sums + bias + what adapters add).

#pragma once

#include "lora.h"

constexpr int UNIT = 16;  // outputs of which a caller may need none

// The arguments of a kernel. Each kernel has its own layout of the weight.
struct LinearCall {
    Slice x, factor, residual, out;  // out may be factor or residual
    int64_t scratch;                 // an array of the batch, for the rows of x as the products read them
    const void* weight;              // aligned to 64 bytes
    const float* scales;             // of groups of group_size inputs, if the weight has integers in so many bits
    const uint8_t* zeros;            // the integers that stand for 0
    const Number* bias;              // [num_out] or null
    int64_t num_out, num_in, group_size, bits, activation;
    const Adapted* adapted;  // or null
    int64_t is_packed;  // whether dense_linear.cpp packs x, if it has many rows
    int64_t needed;  // an array of the batch: a byte for each UNIT outputs, 0 where a kernel need not write them. -1: all are needed

    // Whether some of `num` outputs from `first` on are needed.
    bool needs(const Batch& batch, int64_t first, int64_t num) const {
        if (needed < 0) return true;
        const uint8_t* units = static_cast<uint8_t*>(batch.arrays[needed]);
        for (int64_t i = first / UNIT; i * UNIT < std::min(first + num, num_out); i++) {
            if (units[i]) return true;
        }
        return false;
    }
};

namespace {

enum Activation { NONE, SILU, GELU_TANH };

inline Floats activated(Floats x, int64_t activation) {
    if (activation == SILU) return x * sigmoid(x);
    if (activation == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // 2 * sqrt(2 / pi)
    return x;
}

// Fetch the memory of a row's outputs, from `first` on, while their sums are computed. At many rows it is in no near cache, and
// the writes would hold up the next sums: for 4% of the time of 64 rows and 6 to 13% of 1,023 (AMD EPYC, AVX512-BF16).
inline void fetch_outputs(const LinearCall& call, const Batch& batch, int64_t row, int64_t first, int num) {
    const Number* out = call.out.row<Number>(batch, row) + first;
    for (int i = 0; i < num; i += 64 / sizeof(Number)) __builtin_prefetch(out + i, 1);
}

// Write outputs of a row, from `first` on. They are fewer than the sums where the layer ends.
template <int VECTORS>
void write_outputs(const LinearCall& call, const Batch& batch, int64_t row, int64_t first, const Floats (&sums)[VECTORS]) {
    const Number* factor = call.factor.row<Number>(batch, row);
    const Number* residual = call.residual.row<Number>(batch, row);
    Number* out = call.out.row<Number>(batch, row);
    for (Floats x : sums) {
        const int num = std::clamp<int64_t>(call.num_out - first, 0, LANES);
        if (call.bias) x += load(call.bias + first, num);
        if (has_adapters(call.adapted, batch)) add_products_with_b(*call.adapted, row, first, x);
        x = activated(x, call.activation);
        if (factor) x *= load(factor + first, num);
        if (residual) x += load(residual + first, num);
        store(out + first, x, num);
        first += LANES;
    }
}

}  // namespace

extern "C" const int64_t sizeof_LinearCall = sizeof(LinearCall);
