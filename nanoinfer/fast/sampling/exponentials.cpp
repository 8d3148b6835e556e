// Exponentials as integers. sampling/exponentials.py defines them, and says why they have the same bits everywhere.

#include "program.h"

struct ExponentialsCall {
    Slice below, out;  // float, int64_t. A row is a part of them
    int64_t num_numbers, row_size;
    const double* table;
    double lowest, scale, first, second;
};

extern "C" const int64_t sizeof_ExponentialsCall = sizeof(ExponentialsCall);

extern "C" void exponentials(const ExponentialsCall* call, const Batch& batch, Member& me) {
    for (int64_t row : me.tasks(batch.num_rows)) {
        const float* below = call->below.row<float>(batch, row);
        int64_t* out = call->out.row<int64_t>(batch, row);
        const int64_t num = std::min(call->num_numbers - row * call->row_size, call->row_size);
        for (int64_t i = 0; i < num; i++) {
            const double scaled = below[i] * call->scale, x = scaled > call->lowest ? scaled : call->lowest;
            const double shift = 6755399441055744.0, steps = (x + shift) - shift, rest = x - steps;  // 1.5 * 2^52 rounds
            out[i] = float(((rest * call->second + call->first) * rest + 1) * call->table[int64_t(-steps)]);
        }
    }
}
