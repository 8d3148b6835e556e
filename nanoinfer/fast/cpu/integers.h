// Products of integers of 8 bits, for kernels that compute with weights in 8 or 4 bits. A vector has 16 numbers.

#pragma once

#include "vectors.h"

namespace {

static_assert(LANES == 16);
constexpr int WORD = 4;            // inputs whose products an instruction adds
constexpr int TILE = 2 * LANES;    // outputs that are computed together, and lie together in memory
constexpr int MOST_INPUTS = 128;   // of a group
constexpr int FETCH_AHEAD = 4096;  // bytes of weights

// sum[i] + the four unsigned bytes of weights[i] times the four signed bytes of x
inline Ints add_products(Ints sum, Ints weights, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_set1_epi32(x), low = _mm256_set1_epi32(0x00ff00ff);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    __m256i halves[2], of[2];
    std::memcpy(halves, &sum, sizeof sum);
    std::memcpy(of, &weights, sizeof weights);
    for (int i = 0; i < 2; i++) {
        halves[i] = _mm256_add_epi32(halves[i], _mm256_madd_epi16(_mm256_and_si256(of[i], low), even));
        halves[i] = _mm256_add_epi32(halves[i], _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(of[i], 8), low), odd));
    }
    std::memcpy(&sum, halves, sizeof sum);
    return sum;
#else
    for (int byte = 0; byte < WORD; byte++) sum += ((weights >> (8 * byte)) & 0xff) * int32_t(int8_t(x >> (8 * byte)));
    return sum;
#endif
}

// Add the products of the rows' inputs first .. last - 1 with a tile's weights, [inputs * BITS / 32, TILE, WORD]. In 4 bits,
// the first four of eight inputs are in the low halves of the bytes. stride: between rows. FETCHES: weights are fetched ahead.
template <int BITS, bool FETCHES, int NUM>
__attribute__((always_inline)) inline void add_products(Ints (&sums)[NUM][2], const uint8_t*& weight, const int8_t* x,
                                                        int64_t stride, int64_t first, int64_t last) {
    const Ints mask = Ints{} + (BITS == 8 ? -1 : 0x0f0f0f0f);
    for (int64_t in = first; in < last;) {
        Ints packed[2];
        for (int half = 0; half < 2; half++, weight += LANES * WORD) {
            if (FETCHES) __builtin_prefetch(weight + FETCH_AHEAD, 0, STREAMED);  // as in vectors.h
            packed[half] = vector_at<Ints>(weight);
        }
#pragma GCC unroll 2
        for (int shift = 0; shift < 8; shift += BITS, in += WORD) {
            const Ints weights[2] = {packed[0] >> shift & mask, packed[1] >> shift & mask};
#pragma GCC unroll 8
            for (int row = 0; row < NUM; row++) {  // the row's numbers are in a register for both halves
                const int32_t numbers = vector_at<int32_t>(x + row * stride + in);
                for (int half = 0; half < 2; half++) sums[row][half] = add_products(sums[row][half], weights[half], numbers);
            }
        }
    }
}

inline int32_t nearest(float value) {  // integer, of a value below 2^22
    const float shifted = value + TO_ROUND;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000;  // the bits of TO_ROUND
}

}  // namespace
