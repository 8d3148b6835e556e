// Numbers of the cache and vectors of floats, for cpu_decode.cpp and cpu_prefill.cpp. Both define these sizes as constants:
//
//     HEAD_DIM   numbers of a head
//     BF16       defined if numbers are bfloat16, otherwise they are float
//     LANES      floats of a vector

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// GCC's vectors. The compiler splits them where the machine's registers are shorter.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint16_t Number;  // the upper half of a float's bits
typedef uint16_t Numbers __attribute__((vector_size(2 * LANES)));

inline Floats widen(Numbers x) {
    return (Floats)(__builtin_convertvector(x, Ints) << 16);
}

inline Number narrow(float x) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float Number;
typedef Floats Numbers;

inline Floats widen(Numbers x) {
    return x;
}

inline Number narrow(float x) {
    return x;
}
#endif

constexpr int HEAD_VECTORS = (HEAD_DIM + LANES - 1) / LANES;

// A head of numbers in registers, zeros behind its end.
struct Head {
    Floats part[HEAD_VECTORS];
};

inline Head load(const Number* head) {
    Head x;
    for (int i = 0; i < HEAD_VECTORS; i++) {
        Numbers numbers = {};
        std::memcpy(&numbers, head + i * LANES, std::min(HEAD_DIM - i * LANES, LANES) * sizeof(Number));
        x.part[i] = widen(numbers);
    }
    return x;
}

inline float sum(Floats x) {
    float lanes[LANES];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// exp(x) for x <= 0: 2^n * exp(r) with |r| <= ln(2) / 2, and a Taylor polynomial for exp(r). Below -87 it is 0.
inline Floats exp_of(Floats x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (x * 1.44269504f + round) - round;
    const Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln(2) in two parts
    Floats y = r * (1.0f / 720) + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    y *= (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    return x < -87.0f ? Floats{} : y;  // NaN stays NaN
}

// The pages of one KV head of one sequence.
struct Pages {
    const Number* pages;
    const int64_t* table;
    int64_t num_kv_heads, block_size, kv_head;

    const Number* at(int64_t token) const {
        return pages + ((table[token / block_size] * num_kv_heads + kv_head) * block_size + token % block_size) * HEAD_DIM;
    }
};

// Store a token's head. As kv_cache.finite_values: a value that is not finite is stored as 0, and its key as NaN.
inline void store(Number* key, Number* value, const Number* k, const Number* v) {
    Head x = load(v);
    Floats zero = {};
    for (Floats& part : x.part) zero += part * 0.0f;  // NaN in a lane that holds infinity or NaN
    const bool is_finite = sum(zero) == 0.0f;
    for (int i = 0; i < HEAD_DIM; i++) {
        key[i] = is_finite ? k[i] : narrow(NAN);
        value[i] = is_finite ? v[i] : narrow(0.0f);
    }
}

// Store the heads of a token in its slot. k, v: [num_kv_heads, HEAD_DIM].
inline void store_token(Number* k_pages, Number* v_pages, const Number* k, const Number* v, int64_t slot, int64_t num_kv_heads,
                        int64_t block_size) {
    for (int64_t head = 0; head < num_kv_heads; head++) {
        const int64_t place = ((slot / block_size * num_kv_heads + head) * block_size + slot % block_size) * HEAD_DIM;
        store(k_pages + place, v_pages + place, k + head * HEAD_DIM, v + head * HEAD_DIM);
    }
}

}  // namespace
