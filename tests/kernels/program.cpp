// Drives program.cpp and the team in team.h: programs of many short calls, each of which reads what other threads have
// written in the call before.

#include "numbers.h"

namespace {

struct MixCall {
    Slice x, out;
    int64_t size;
    bool is_shared;
};

void mix(const MixCall* call, const Batch& batch, Member& me) {
    const Number* x = call->x.row<Number>(batch, 0);
    Number* out = call->out.row<Number>(batch, 0);
    const auto compute = [&](int64_t i) {
        const float next = float_of(x[(i + 1) % call->size]), mirrored = float_of(x[call->size - 1 - i]);
        out[i] = number_of(0.75f * float_of(x[i]) - 0.5f * next + 0.125f * mirrored);
    };
    if (call->is_shared) {
        for (int64_t i : me.share(call->size)) compute(i);
    } else {
        for (int64_t i : me.tasks(call->size)) compute(i);
    }
}

void drive(int threads, int64_t num_calls, int64_t width, bool is_shared) {
    Random random;
    const auto x = numbers(random, width, 3);
    Exact<Number> first(width), second(width);
    std::copy(x.begin(), x.end(), first.begin());
    const MixCall there{{0, 0, width}, {1, 0, width}, width, is_shared};
    const MixCall back{{1, 0, width}, {0, 0, width}, width, is_shared};
    Exact<KernelCall> calls(num_calls);
    for (int64_t i = 0; i < num_calls; i++) calls[i] = {(void (*)(const void*, const Batch&, Member&))mix, i % 2 ? &back : &there};
    Exact<int64_t> batch(3);
    batch[0] = 1, batch[1] = (int64_t)first.data(), batch[2] = (int64_t)second.data();
    run(calls.data(), num_calls, (Batch*)batch.data(), threads);
    Digest digest;
    add(digest, first);
    add(digest, second);
    print(text("run %ld calls of %ld", num_calls, width), threads, digest);
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(1, 100 * std::atoi(arguments[2]), 0, true);  // the calls themselves
        return 0;
    }
    for (bool is_shared : {true, false}) {
        for (int threads : threads_of(size)) {
            for (int64_t num_calls : {1, 2, size == Size::FULL ? 100 : 25}) {
                for (int64_t width : {1, 65}) drive(threads, num_calls, width, is_shared);
            }
        }
    }
    has_tiles();  // its answer depends on the machine
}
