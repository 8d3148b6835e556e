// Activations of a linear layer's outputs.

#pragma once

#include "vectors.h"

namespace {

enum Activation { NONE, SILU, GELU_TANH };

inline Floats sigmoid(Floats x) {
    const Floats e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : Floats{} + 1.0f) / (e + 1.0f);
}

inline Floats activated(Floats x, int64_t activation) {
    if (activation == SILU) return x * sigmoid(x);
    if (activation == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // 2 * sqrt(2 / pi)
    return x;
}

}  // namespace
