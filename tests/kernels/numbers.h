// For drivers of kernels that compute with Numbers (vectors.h) in programs (program.h).
//
// The compiler's command line defines SOURCE, the path of the kernel's source in quotes.

#pragma once

#include SOURCE

#include <program.cpp>

#include "driver.h"

// Whether inputs have some NaN, infinities, zeros of both signs, and numbers that are tiny (denormal) or the largest.
enum class Values { ORDINARY, SPECIAL };

inline float special(Random& random) {
    const float values[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, -1e-45f, 6e-8f, 65504.0f, 3.3e38f, -3.3e38f};
    return values[random.below(sizeof values / sizeof *values)];
}

inline float value_of(Random& random, float scale, Values values, int64_t rarity = 61) {
    const float ordinary = random.uniform() * scale;
    return values == Values::SPECIAL && random.below(rarity) == 0 ? special(random) : ordinary;
}

inline Number number_of(float value) {
    const Numbers numbers = narrow(Floats{} + value);
    Number number;
    std::memcpy(&number, &numbers, sizeof number);
    return number;
}

inline float float_of(Number number) {
    return load(&number, 1)[0];
}

inline Exact<Number> numbers(Random& random, int64_t num, float scale = 1, Values values = Values::ORDINARY) {
    Exact<Number> all(num);
    for (Number& number : all) number = number_of(value_of(random, scale, values));
    return all;
}

inline Exact<float> floats(Random& random, int64_t num, float scale = 1, Values values = Values::ORDINARY) {
    Exact<float> all(num);
    for (float& value : all) value = value_of(random, scale, values);
    return all;
}

// Of an array whose rows are `width` numbers, `stride` apart from the number `first` on. It ends with its last row.
inline int64_t extent(int64_t first, int64_t num_rows, int64_t stride, int64_t width) {
    return first + (num_rows - 1) * stride + width;
}

inline void fill(Exact<Number>& array, float value) {
    for (Number& number : array) number = number_of(value);
}

template <class T>
void add(Digest& digest, const Exact<T>& array) {
    for (T value : array) {
        if constexpr (std::is_same_v<T, float>) {
            digest.add(value);
        } else {
            digest.add(float_of(value));
        }
    }
}

inline const void* address_of(const void* pointer) {
    return pointer;
}

template <class T>
const void* address_of(const Exact<T>& array) {
    return array.data();
}

// Make calls one after the other, as Program does (program.py). arrays: by the index that the calls' arguments name.
struct Program {
    std::vector<KernelCall> calls;

    template <class Call>
    void add(void (*kernel)(const Call*, const Batch&, Member&), const Call& call) {
        calls.push_back({(void (*)(const void*, const Batch&, Member&))kernel, &call});
    }

    template <class... Arrays>
    void run(int64_t num_rows, int num_threads, const Arrays&... arrays) const {
        Exact<int64_t> batch(1 + sizeof...(arrays));
        batch[0] = num_rows;
        int i = 1;
        ((batch[i++] = (int64_t)address_of(arrays)), ...);
        ::run(calls.data(), calls.size(), (Batch*)batch.data(), num_threads);
    }
};

template <class Call, class... Arrays>
void run_kernel(void (*kernel)(const Call*, const Batch&, Member&), const Call& call, int64_t num_rows, int num_threads,
                const Arrays&... arrays) {
    Program program;
    program.add(kernel, call);
    program.run(num_rows, num_threads, arrays...);
}

constexpr Slice NOTHING{-1, 0, 0};
