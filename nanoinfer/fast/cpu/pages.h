// Heads in the pages of the KV cache, for paged_decode.cpp and paged_prefill.cpp. Both are compiled with these constants:
//
//     HEAD_DIM     numbers of a head
//     INT8_PAGES   defined if pages have heads in 8 bits, as int8_cache/cache.py (`quantized_heads`) defines them: HEAD_DIM
//                  integers, then their scale, a float

#pragma once

#include "program.h"
#include "vectors.h"

namespace {

constexpr int HEAD_VECTORS = ceil_div(HEAD_DIM, LANES);

// A head of numbers in registers, zeros behind its end.
struct Head {
    Floats vectors[HEAD_VECTORS];
};

inline Head load_head(const Number* head) {
    Head x;
    for (int i = 0; i < HEAD_VECTORS; i++) x.vectors[i] = load(head + i * LANES, std::min(HEAD_DIM - i * LANES, LANES));
    return x;
}

#ifdef INT8_PAGES
typedef int8_t Stored;
typedef int8_t Bytes __attribute__((vector_size(LANES)));
constexpr int STORED_SIZE = HEAD_DIM + sizeof(float);  // of a head, in its elements

inline Floats floats_of(Bytes integers) {  // GCC converts them one by one
#if defined(__AVX512F__)
    if constexpr (LANES == 16) {
        __m128i bytes;
        std::memcpy(&bytes, &integers, sizeof bytes);
        return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
#endif
#if defined(__AVX2__)
    Floats wide;
    for (int i = 0; i < LANES / 8; i++) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)((const int8_t*)&integers + 8 * i));
        ((__m256*)&wide)[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    }
    return wide;
#else
    return __builtin_convertvector(__builtin_convertvector(integers, Ints), Floats);
#endif
}

inline Head load_stored(const Stored* head) {
    float scale;
    std::memcpy(&scale, head + HEAD_DIM, sizeof scale);
    Head x;
    for (int i = 0; i < HEAD_VECTORS; i++) {
        x.vectors[i] = floats_of(vector_at<Bytes>(head + i * LANES, std::min(HEAD_DIM - i * LANES, LANES))) * scale;
    }
    return x;
}

// With a scale that is not finite if a number is not.
inline void store(Stored* to, const Number* head) {
    const Head x = load_head(head);
    Floats largest = {}, zero = {};
    for (const Floats& vector : x.vectors) {
        const Floats size = vector < 0.0f ? -vector : vector;
        largest = size > largest ? size : largest;
        zero += vector * 0.0f;
    }
    const float limit = *std::max_element((float*)&largest, (float*)&largest + LANES), factor = limit > 0 ? 127 / limit : 0;
    const float scale = limit / 127 + sum(zero);
    for (int i = 0; i < HEAD_VECTORS; i++) {
        const Ints nearest = (Ints)(x.vectors[i] * factor + TO_ROUND) - (Ints)(Floats{} + TO_ROUND);
        put(to + i * LANES, __builtin_convertvector(nearest, Bytes), std::min(HEAD_DIM - i * LANES, LANES));
    }
    std::memcpy(to + HEAD_DIM, &scale, sizeof scale);
}
#else
typedef Number Stored;
constexpr int STORED_SIZE = HEAD_DIM;

inline Head load_stored(const Stored* head) {
    return load_head(head);
}

inline void store(Stored* to, const Number* head) {
    std::copy_n(head, HEAD_DIM, to);
}
#endif

}  // namespace

struct Span;
struct Partial;

// The sequences of a call, the same for all layers.
struct AttentionArguments {
    const int64_t* slots;         // of the new tokens
    const int64_t* starts;        // prefill: [num_sequences + 1], the first token of each chunk, relative to any origin
    const int64_t* block_tables;  // [num_sequences, max_blocks]
    const int64_t* seq_lens;      // tokens of each sequence, the new ones included
    int64_t num_sequences, max_blocks, num_kv_heads, block_size;
    int64_t window;        // tokens that a query attends to, at most
    Stored* const* pages;  // the keys and the values of each layer: [num_blocks, num_kv_heads, block_size, STORED_SIZE]
    Span* spans;           // decode: [num_spans], which find_spans fills in
    Partial* partials;     // decode: [num_spans, num_kv_heads]
    int64_t num_spans;

    // Where a head of a block's token is, counted from the start of the pages. Its key and its value are at the same place.
    int64_t place_of(int64_t block, int64_t kv_head, int64_t index) const {
        return ((block * num_kv_heads + kv_head) * block_size + index) * STORED_SIZE;
    }
};

// The attention of a layer. q, out: [num_rows, num_kv_heads * group, HEAD_DIM]. k, v: [num_rows, num_kv_heads, HEAD_DIM].
struct AttendCall {
    Slice q, k, v, out;
    int64_t rows;  // an array of the batch: an AttentionArguments
    int64_t layer;
    const float* sinks;  // the score of each query head's sink, or null
};

extern "C" const int64_t sizeof_AttentionArguments = sizeof(AttentionArguments), sizeof_AttendCall = sizeof(AttendCall);

namespace {

// Store a token's head. As kv_cache.finite_values: a value that is not finite is stored as 0, and its key as NaN.
inline void store_head(Stored* key, Stored* value, const Number* k, const Number* v) {
    Head x = load_head(v);
    Floats zero = {};
    for (Floats& vector : x.vectors) zero += vector * 0.0f;  // NaN in a lane that holds infinity or NaN
    if (sum(zero) == 0.0f) {
        store(key, k);
        store(value, v);
    } else {
        Number nan[HEAD_DIM], zeros[HEAD_DIM] = {};
        std::fill_n(nan, HEAD_DIM, narrow(Floats{} + NAN)[0]);
        store(key, nan);
        store(value, zeros);
    }
}

// Store every new token before any is attended to: tokens and drafts of a sequence attend to those before them.
inline void store_tokens(const AttendCall& call, const AttentionArguments& rows, const Batch& batch, Member& me) {
    Stored *k_pages = rows.pages[2 * call.layer], *v_pages = rows.pages[2 * call.layer + 1];
    for (int64_t token : me.share(batch.num_rows)) {
        const Number *k = call.k.row<Number>(batch, token), *v = call.v.row<Number>(batch, token);
        const int64_t block = rows.slots[token] / rows.block_size, index = rows.slots[token] % rows.block_size;
        for (int64_t head = 0; head < rows.num_kv_heads; head++) {
            const int64_t place = rows.place_of(block, head, index);
            store_head(k_pages + place, v_pages + place, k + head * HEAD_DIM, v + head * HEAD_DIM);
        }
    }
    me.wait();
}

// The places of a head of a sequence's tokens first .. last - 1, which are at most MOST.
template <int64_t MOST>
struct Places {
    int64_t num_tokens, of[MOST];

    Places(const AttentionArguments& rows, int64_t sequence, int64_t kv_head, int64_t first, int64_t last)
        : num_tokens(last - first) {
        const int64_t *blocks = rows.block_tables + sequence * rows.max_blocks, size = rows.block_size;
        for (int64_t token = first; token < last;) {
            const int64_t end = std::min(token - token % size + size, last);
            int64_t place = rows.place_of(blocks[token / size], kv_head, token % size);
            for (; token < end; token++, place += STORED_SIZE) of[token - first] = place;
        }
    }
};

}  // namespace
