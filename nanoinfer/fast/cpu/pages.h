// Heads in the pages of the KV cache, for paged_decode.cpp and paged_prefill.cpp. Both are compiled with these constants:
//
//     HEAD_DIM   numbers of a head
//     BF16       defined if numbers are bfloat16, otherwise they are float

#pragma once

#include "vectors.h"

namespace {

constexpr int HEAD_VECTORS = (HEAD_DIM + LANES - 1) / LANES;

// A head of numbers in registers, zeros behind its end.
struct Head {
    Floats part[HEAD_VECTORS];
};

inline Head load_head(const Number* head) {
    Head x;
    for (int i = 0; i < HEAD_VECTORS; i++) x.part[i] = load(head + i * LANES, std::min(HEAD_DIM - i * LANES, LANES));
    return x;
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
inline void store_head(Number* key, Number* value, const Number* k, const Number* v) {
    Head x = load_head(v);
    Floats zero = {};
    for (Floats& part : x.part) zero += part * 0.0f;  // NaN in a lane that holds infinity or NaN
    const bool is_finite = sum(zero) == 0.0f;
    if (is_finite) {
        std::copy_n(k, HEAD_DIM, key);
        std::copy_n(v, HEAD_DIM, value);
    } else {
        std::fill_n(key, HEAD_DIM, narrow(Floats{} + NAN)[0]);
        std::fill_n(value, HEAD_DIM, Number(0));
    }
}

// Store the heads of a token in its slot. k, v: [num_kv_heads, HEAD_DIM].
inline void store_token(Number* k_pages, Number* v_pages, const Number* k, const Number* v, int64_t slot, int64_t num_kv_heads,
                        int64_t block_size) {
    for (int64_t head = 0; head < num_kv_heads; head++) {
        const int64_t place = ((slot / block_size * num_kv_heads + head) * block_size + slot % block_size) * HEAD_DIM;
        store_head(k_pages + place, v_pages + place, k + head * HEAD_DIM, v + head * HEAD_DIM);
    }
}

}  // namespace
