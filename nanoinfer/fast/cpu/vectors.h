// Vectors of floats and products of them, for the C++ kernels. A kernel defines LANES, the floats of a vector, before it includes
// the file. The compiler's command line defines (native.py):
//
//     BF16, FP16   numbers in memory are bfloat16 or float16, otherwise they are float
//     STREAMED     the locality of a prefetch of weights that are read once per step, for kernels of linear layers
//
// The bits of a result do not depend on the processor: the compiler contracts no product with a sum (-ffp-contract=off),
// multiply_add is written out, exp is ours, and no order of additions depends on the length of vectors. Bfloat16 is the
// exception, where the processor multiplies pairs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef STREAMED
#define STREAMED 3
#endif

namespace {

constexpr float TO_ROUND = 0x1.8p23f;  // added to a number below 2^22, it rounds to an integer, which is in the sum's low bits

constexpr int64_t ceil_div(int64_t total, int64_t size) {
    return (total + size - 1) / size;
}

// GCC's vectors. The compiler splits them where the machine's registers are shorter.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#if defined(BF16)
typedef uint16_t Number;  // the upper half of a float's bits
typedef uint16_t Numbers __attribute__((vector_size(2 * LANES)));

inline Floats widen(Numbers x) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#endif
    return (Floats)(__builtin_convertvector(x, Ints) << 16);
}

inline Numbers narrow(Floats x) {  // round to nearest, ties to even
    const Ints bits = (Ints)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : Ints{} + 0x7fc0, Numbers);
}
#elif defined(FP16)
typedef uint16_t Number;  // IEEE's half precision
typedef uint16_t Numbers __attribute__((vector_size(2 * LANES)));
#ifdef __aarch64__
typedef __fp16 Halfs __attribute__((vector_size(2 * LANES)));
#elif !defined(__F16C__)
typedef _Float16 Halfs __attribute__((vector_size(2 * LANES)));
#endif

inline Floats widen(Numbers x) {
#ifdef __F16C__  // GCC converts number by number
    static_assert(LANES % 8 == 0);
    Floats wide;
    for (int i = 0; i < LANES / 8; i++) ((__m256*)&wide)[i] = _mm256_cvtph_ps(((__m128i*)&x)[i]);
    return wide;
#else
    return __builtin_convertvector((Halfs)x, Floats);
#endif
}

inline Numbers narrow(Floats x) {
#ifdef __F16C__
    Numbers narrowed;
    for (int i = 0; i < LANES / 8; i++) ((__m128i*)&narrowed)[i] = _mm256_cvtps_ph(((__m256*)&x)[i], _MM_FROUND_TO_NEAREST_INT);
    return narrowed;
#else
    return (Numbers)__builtin_convertvector(x, Halfs);
#endif
}
#else
typedef float Number;
typedef Floats Numbers;

inline Floats widen(Numbers x) {
    return x;
}

inline Numbers narrow(Floats x) {
    return x;
}
#endif

// The first `num` elements in memory as a vector, and back. A call of memcpy for a size that is not known takes longer than the rest,
// and needs a variable of its own: it has an address, so it is not in a register.
template <class Vector, class Element>
inline Vector vector_at(const Element* from, int num = sizeof(Vector) / sizeof(Element)) {
    if (num < int(sizeof(Vector) / sizeof(Element))) {
        Vector part = {};
        std::memcpy(&part, from, num * sizeof(Element));
        return part;
    }
    Vector whole;
    std::memcpy(&whole, from, sizeof whole);
    return whole;
}

template <class Vector, class Element>
inline void put(Element* to, Vector vector, int num = LANES) {
    if (num < LANES) {
        const Vector part = vector;
        std::memcpy(to, &part, num * sizeof(Element));
    } else {
        std::memcpy(to, &vector, sizeof vector);
    }
}

inline Floats load(const Number* from, int num = LANES) {
    return widen(vector_at<Numbers>(from, num));
}

inline void store(Number* to, Floats x, int num = LANES) {
    put(to, narrow(x), num);
}

inline float sum(Floats x) {
    float lanes[LANES];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// x * y + sum, rounded once.
inline Floats multiply_add(Floats x, Floats y, Floats sum) {
#ifdef __AVX512F__
    if constexpr (LANES == 16) return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#endif
#if defined(__FMA__)
    for (int i = 0; i < LANES / 8; i++) {
        __m256& part = ((__m256*)&sum)[i];
        part = _mm256_fmadd_ps(((__m256*)&x)[i], ((__m256*)&y)[i], part);
    }
    return sum;
#elif defined(__aarch64__)
    for (int i = 0; i < LANES / 4; i++) {
        float32x4_t& part = ((float32x4_t*)&sum)[i];
        part = vfmaq_f32(part, ((float32x4_t*)&x)[i], ((float32x4_t*)&y)[i]);
    }
    return sum;
#else
    // The product of two floats is exact in double. Its sum with a float is rounded to an odd number, so that rounding this to
    // float gives the float that is nearest to the exact sum (Boldo and Melquiond 2008, https://doi.org/10.1109/TC.2007.70819).
    typedef double Doubles __attribute__((vector_size(8 * LANES)));
    typedef int64_t Bits __attribute__((vector_size(8 * LANES)));
    const Doubles product = __builtin_convertvector(x, Doubles) * __builtin_convertvector(y, Doubles);
    const Doubles addend = __builtin_convertvector(sum, Doubles), nearest = addend + product, added = nearest - addend;
    const Doubles error = (addend - (nearest - added)) + (product - added);  // exact (Knuth's TwoSum)
    const Bits towards_zero = (Bits)nearest + ((error > 0) != (nearest > 0));  // a comparison is -1 where it is true
    const Bits odd = (error < 0) | (error > 0) ? towards_zero | 1 : (Bits)nearest;  // NaN stays NaN
    return __builtin_convertvector((Doubles)odd, Floats);
#endif
}

inline Floats multiply_add(float x, Floats y, Floats sum) {
    return multiply_add(x - Floats{}, y, sum);  // x + 0 would take an instruction, since it makes 0 of -0
}

// exp(x) for x <= 0: 2^n * exp(r) with |r| <= ln(2) / 2. Below -87 it is 0. The polynomial 1 + r + r^2 * q(r) has the least
// maximum of the relative error, 3e-9 (Remez's algorithm). With rounding, errors are below 0.9 units in the last place.
inline Floats exp_of(Floats x) {
    const Floats one = Floats{} + 1.0f, n = multiply_add(1.44269504f, x, Floats{} + TO_ROUND) - TO_ROUND;
    Floats r = multiply_add(-0.693145752f, n, x);  // ln(2) in two parts
    r = multiply_add(-1.42860677e-6f, n, r);
    Floats y = Floats{} + 0.001381454f;
    for (const float coefficient : {0.008368745f, 0.04166839f, 0.16666521f, 0.49999994f}) {
        y = multiply_add(y, r, Floats{} + coefficient);
    }
    y = multiply_add(multiply_add(y, r, one), r, one);
    y *= (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    return x < -87.0f ? Floats{} : y;  // NaN stays NaN
}

inline float exp_of(float x) {
    return exp_of(x - Floats{})[0];
}

inline Floats sigmoid(Floats x) {
    const Floats e = exp_of(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : Floats{} + 1.0f) / (e + 1.0f);
}

// A term is what a lane multiplies in one instruction: a float, or two bfloat16 numbers where the machine adds two products.
#if defined(BF16) && defined(__AVX512BF16__)
constexpr int PER_TERM = 2;
typedef uint32_t Term;
typedef Ints Terms;

inline Term term_of(Number first, Number second) {
    return first | Term(second) << 16;
}

inline Terms terms_of(const Floats* x) {  // x[0] and x[1], rounded, side by side in each lane
    const Terms order = (Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}) * 0x10001 + 0x100000;
    return (Terms)_mm512_permutexvar_epi16((__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
}

inline Floats add_products(Floats sum, Terms x, Term y) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_epi32(y));
}

typedef Terms StoredTerms;  // as they are in memory
#else
constexpr int PER_TERM = 1;
typedef float Term;
typedef Floats Terms;

inline Term term_of(Number first, Number) {
    return widen(Numbers{first})[0];
}

inline Terms terms_of(const Floats* x) {
    return x[0];
}

inline Floats add_products(Floats sum, Terms x, Term y) {
    return multiply_add(y, x, sum);
}

typedef Numbers StoredTerms;
#endif

// Terms are multiplied as they are stored, or widened first.
template <class Stored>
inline Terms loaded(const Stored& stored) {
    if constexpr (sizeof(Stored) == sizeof(Terms)) {
        return (Terms)stored;
    } else {
        return widen(stored);
    }
}

// A vector that GCC must not read again for each of its products. It does so where they take all of 16 registers, and 12 products
// take longer with 16 reads than with 7.
template <class Vector>
inline Vector in_register(Vector x) {
#if defined(__AVX__) && !defined(__AVX512F__)
    if constexpr (sizeof x == 32) asm("" : "+x"(x));
#endif
    return x;
}

// What is fetched into the processor's cache during products: for each term `num` places, `step` bytes apart.
struct Ahead {
    const void* place;
    int64_t step;
    int num;
};

// Add the products of number i and vector j to sums[i][j], term after term. The strides are those of numbers i, of their terms,
// and of the vectors' terms. NUM_AHEAD is ahead.num. It is known to the compiler, because a loop over it takes 8 instructions for
// each term, and 24 products take 12 cycles, in which some processors begin 48 instructions. The vectors of a single number are
// read once per step, which STREAMED says to the processor.
template <int NUM_AHEAD = 0, int NUMBERS, int VECTORS, class Stored>
__attribute__((always_inline)) inline void multiply(
    Floats (&sums)[NUMBERS][VECTORS], const Term* numbers, int64_t number_stride, int64_t term_stride, const Stored* vectors,
    int64_t vector_stride, int64_t num_terms, Ahead ahead = {}) {
    Floats own[NUMBERS][VECTORS];  // clang++ leaves an array in memory if its address is known elsewhere
    std::memcpy(own, sums, sizeof own);
    const char* place = static_cast<const char*>(ahead.place);
#pragma GCC unroll 1  // clang++ would load the numbers of several terms at once, for which there are no registers
    for (int64_t term = 0; term < num_terms; term++) {
#pragma GCC unroll 4
        for (int i = 0; i < NUM_AHEAD; i++, place += ahead.step) __builtin_prefetch(place, 0, NUMBERS == 1 ? STREAMED : 3);
        Terms terms[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) terms[j] = NUMBERS > 1 ? in_register(loaded(vectors[j])) : loaded(vectors[j]);
#pragma GCC unroll 8
        for (int i = 0; i < NUMBERS; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) own[i][j] = add_products(own[i][j], terms[j], numbers[i * number_stride]);
        }
        numbers += term_stride;
        vectors += vector_stride;
    }
    std::memcpy(sums, own, sizeof own);
}

}  // namespace
