// A program: calls of kernels that a team of threads makes one after the other. program.py builds and runs it.

#pragma once

#include <cstdint>

#include "team.h"

// What a run of a program is given: the number of rows, and arrays by their index.
struct Batch {
    int64_t num_rows;
    void* arrays[];
};

// Where the rows of a value are: row i begins at number first + i * stride of an array. array: -1 if there is no value.
struct Slice {
    int64_t array, first, stride;

    template <class Number>
    Number* row(const Batch& batch, int64_t row) const {
        return array < 0 ? nullptr : static_cast<Number*>(batch.arrays[array]) + first + row * stride;
    }
};

// Every member of the team makes every call, and takes a part of the rows or outputs (team.h). After each call they wait for each
// other. The arguments of a call are the same in every run. A kernel that calls me.wait() may not throw: others wait for it there.
struct KernelCall {
    void (*kernel)(const void* arguments, const Batch& batch, Member& me);
    const void* arguments;
};
