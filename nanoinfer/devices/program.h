// A program: steps that a team of threads computes one after the other. program.py builds and runs it.

#pragma once

#include <cstdint>

// What a call of a program is given: rows, and arrays by their index. An array that no step uses is null.
struct Batch {
    int64_t num_rows;
    void* arrays[];

    template <class Number>
    Number* at(int64_t index) const {
        return index < 0 ? nullptr : static_cast<Number*>(arrays[index]);
    }
};

// A step computes all rows. Every thread of the team calls it and `omp for` divides the work. No thread leaves it before its
// output is complete. Its arguments are the same in every call of the program.
struct Step {
    void (*compute)(const void* arguments, const Batch& batch);
    const void* arguments;
};
