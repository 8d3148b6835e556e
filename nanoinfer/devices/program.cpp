// Run a program. One team of threads computes all steps: waking a team for each one would take longer than many of them.

#include "program.h"

extern "C" void run(const Step* steps, int64_t num_steps, const Batch* batch, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    for (int64_t i = 0; i < num_steps; i++) steps[i].compute(steps[i].arguments, *batch);
}
