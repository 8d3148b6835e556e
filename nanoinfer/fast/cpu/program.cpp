// Run a program. One team of threads makes all calls, because waking a team for each would take longer than many kernels do.

#include <omp.h>

#include "program.h"
#include "tiles.h"

extern "C" void run(const KernelCall* calls, int64_t num_calls, Batch* batch, int num_threads) {
    Barrier barrier;
    batch->barrier = &barrier;
#pragma omp parallel num_threads(num_threads)
    for (int64_t i = 0; i < num_calls; i++) {
        if (i > 0) barrier.wait(omp_get_num_threads());
        calls[i].kernel(calls[i].arguments, *batch);
    }
}

extern "C" int has_tiles() {
    return may_use_tiles();
}

extern "C" const int64_t sizeof_KernelCall = sizeof(KernelCall);
