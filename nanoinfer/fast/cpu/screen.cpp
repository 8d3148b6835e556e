// Which logits of an LM head may be among the k largest of a row, by a copy of its weight in 8 bits. dense_linear.cpp or
// tile_linear.cpp then computes these, so that the k largest logits have the bits that they have without this kernel.
//
// Let w be the weights of an id, q the integers of the copy and s their scales, one for each group of inputs, and x a row. The
// row is rounded to integers, too: v in 16 bits, one unit u for each group. This kernel computes a = sum of s * u * (q . v), and
// a bound e of the distance to E, which the other kernel computes before it rounds to the logits' dtype. |x| is the sum of the
// absolute numbers of a group, and `size` their number. u0 = 2^-24 is fp32's rounding, n the number of inputs, m of groups.
//
//     distance of                       is at most, summed over groups             because
//     w . x      and  s q . x           s * 0.501 |x|                              q = round(w / s)
//     s q . x    and  s u q . v         s * 127.01 * size * 0.51 u                 v = round(x / u)
//     s u q . v  and  a, a - e, a + e   s * 127.01 (|x| + size * u) (m + 6) u0     q . v is exact, every rounding is counted
//     w . x      and  E                 s * 127.6 |x| (n + 2) 1.01 u0              any order of n products and n additions
//     E          and  E without denormals   s * (2^-46 |x| + size * 2^-43)         s >= 2^-80, and each of 4 n numbers below
//                                                                                  2^-126 may be taken for 0, inputs as well
//
// Together s * factor, and the factor depends on x alone. It is raised by 1/1000 for its own roundings and those of the sum of
// s * factor. The order does not matter, so the bound holds for every processor: a pair of products that is added first, tiles,
// fused or separate operations. Sources: Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 3.1.
//
// |E| is below 256 e. If a, e or such a sum could overflow, or is NaN, the id has no bound.
//
// The logits with the k largest a - e are computed first, and take the place of their bounds. Then at least k logits reach the
// limit, the k-th largest of a - e. Rounding keeps the order. So an id whose a + e is smaller than the limit, both rounded to the
// logits' dtype, has a smaller logit than k others, and is no tie of theirs. The remaining ids are computed. All of this is done
// for UNIT ids at a time, which lie together in the weight, by the largest a - e and a + e among them.

constexpr int LANES = 16;
#include <functional>
#include <new>
#include <vector>

#include "integers.h"
#include "linear.h"

struct ScreenCall {
    Slice x, lowest, highest;  // lowest, highest: for each UNIT outputs the largest a - e and a + e, rounded to the logits' dtype
    Slice out;                 // the logits. Those that are not needed become -infinity, the others stay as they are
    int64_t scratch;           // an array of the batch: what is kept of each row
    int64_t needed;   // an array of the batch: a byte for each UNIT outputs, which receives 1 where they are needed, otherwise 0
    int64_t k;        // an array of the batch with an int64_t
    const uint8_t* weight;  // [num_out / TILE, num_in / WORD, TILE, WORD]: q + 128
    const float* scales;    // [num_out / TILE, num_in / group_size, TILE]: s, and 0 for outputs behind the last
    int64_t num_out, num_in, group_size, are_largest_known;
};

namespace {

constexpr int MOST_ROWS = 4;       // rows that are computed together
constexpr float LIMIT = 0x1p119f;

static_assert(UNIT == LANES);

// The rounded rows.
struct Rounded {
    int64_t num_groups;
    float *units, *factors;  // [num_rows, num_groups]
    int32_t* sums;           // [num_rows, num_groups]: of v
    int8_t* integers;        // [num_rows, 2, num_in]: v = 256 * the first + the second

    Rounded(const ScreenCall& call, const Batch& batch) {
        num_groups = call.num_in / call.group_size;
        units = static_cast<float*>(batch.arrays[call.scratch]), factors = units + batch.num_rows * num_groups;
        sums = (int32_t*)(factors + batch.num_rows * num_groups);
        integers = (int8_t*)(sums + batch.num_rows * num_groups);
    }
};

int64_t num_units(const ScreenCall& call) {
    return ceil_div(call.num_out, TILE) * 2;
}

// Round a group of a row.
void round_group(const ScreenCall& call, const Batch& batch, const Rounded& rows, int64_t row, int64_t group) {
    const int64_t size = call.group_size, place = row * rows.num_groups + group;
    const Number* x = call.x.row<Number>(batch, row) + group * size;
    float values[MOST_INPUTS], largest = 0, total = 0;
    for (int64_t i = 0; i < size; i += LANES) put(values + i, load(x + i));
    for (int64_t i = 0; i < size; i++) {
        largest = std::max(largest, std::abs(values[i]));
        total += std::abs(values[i]);
    }
    const float unit = std::max(largest / 32512, 0x1p-126f);
    int8_t *high = rows.integers + row * 2 * call.num_in + group * size, *low = high + call.num_in;
    int32_t sum = 0;
    for (int64_t i = 0; i < size; i++) {
        const int32_t v = total < LIMIT ? nearest(values[i] / unit) : 0;
        high[i] = int8_t((v + 128) >> 8);
        low[i] = int8_t(v - high[i] * 256);
        sum += v;
    }
    const float rounding = (call.num_in + rows.num_groups + 16) * 0x1p-24f;
    rows.units[place] = unit;
    rows.sums[place] = sum;
    const float factor = total * (0.501f + 129 * rounding) + size * unit * (65 + 129 * rounding) + size * 0x1p-43f;
    rows.factors[place] = total < LIMIT ? 1.001f * factor : INFINITY;
}

// The largest of the first `num` numbers, rounded to the logits' dtype. They are fewer than LANES where the layer ends.
float largest_of(Floats numbers, int64_t num) {
    float lanes[LANES];
    put(lanes, numbers);
    for (int64_t lane = std::max<int64_t>(num, 0); lane < LANES; lane++) lanes[lane] = -INFINITY;
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] = std::max(lanes[i], lanes[i + width]);
    }
    return widen(narrow(Floats{} + lanes[0]))[0];
}

// The bounds of a tile for NUM rows.
template <int NUM>
void compute(const ScreenCall& call, const Batch& batch, const Rounded& rows, int64_t tile, int64_t first) {
    const int64_t num_in = call.num_in, num_groups = rows.num_groups;
    const uint8_t* weight = call.weight + tile * TILE * num_in;
    const int8_t* x = rows.integers + first * 2 * num_in;
    Floats total[NUM][2] = {}, error[NUM][2] = {};
    for (int64_t g = 0; g < num_groups; g++) {
        Ints products[NUM * 2][2] = {};  // of each row's parts of v, and of outputs
        add_products<8, true>(products, weight, x, num_in, g * call.group_size, (g + 1) * call.group_size);
#pragma GCC unroll 8
        for (int row = 0; row < NUM; row++) {
            const int64_t place = (first + row) * num_groups + g;
            for (int half = 0; half < 2; half++) {
                const Floats scales = vector_at<Floats>(call.scales + (tile * num_groups + g) * TILE + half * LANES);
                const Ints sum = products[2 * row][half] * 256 + products[2 * row + 1][half] - 128 * rows.sums[place];
                total[row][half] = multiply_add(__builtin_convertvector(sum, Floats) * rows.units[place], scales, total[row][half]);
                error[row][half] = multiply_add(rows.factors[place], scales, error[row][half]);
            }
        }
    }
    for (int row = 0; row < NUM; row++) {
        for (int half = 0; half < 2; half++) {
            const Floats a = total[row][half], e = error[row][half], infinite = Floats{} + INFINITY;
            const auto is_bounded = (a < 0.0f ? -a : a) + e < LIMIT;
            const int64_t unit = tile * 2 + half, num = call.num_out - unit * UNIT;
            call.lowest.row<float>(batch, first + row)[unit] = largest_of(is_bounded ? a - e : -infinite, num);
            call.highest.row<float>(batch, first + row)[unit] = largest_of(is_bounded ? a + e : infinite, num);
        }
    }
}

// The k-th largest number. Without memory to find it, it is -infinity, which every number reaches.
float kth_largest(const float* numbers, int64_t num, int64_t k) try {
    if (k > num) return -INFINITY;
    if (k == 1) return *std::max_element(numbers, numbers + num);
    std::vector<float> falling(numbers, numbers + num);
    std::nth_element(falling.begin(), falling.begin() + k - 1, falling.end(), std::greater<float>());
    return falling[k - 1];
} catch (const std::bad_alloc&) {
    return -INFINITY;
}

}  // namespace

extern "C" const int64_t sizeof_ScreenCall = sizeof(ScreenCall);

extern "C" void bound(const ScreenCall* call, const Batch& batch, Member& me) {
    constexpr decltype(&compute<1>) VARIANTS[] = {compute<1>, compute<2>, compute<3>, compute<4>};
    const Rounded rows(*call, batch);
    for (int64_t i : me.share(batch.num_rows * rows.num_groups)) {
        round_group(*call, batch, rows, i / rows.num_groups, i % rows.num_groups);
    }
    me.wait();
    for (int64_t tile : me.tasks(num_units(*call) / 2)) {
        for (int64_t row = 0; row < batch.num_rows; row += MOST_ROWS) {
            VARIANTS[std::min<int64_t>(MOST_ROWS, batch.num_rows - row) - 1](*call, batch, rows, tile, row);
        }
    }
}

// Choose the units with the k largest a - e of a row. When these are computed: those of the others whose a + e reaches the k-th
// largest of what is known, which are the last.
extern "C" void choose(const ScreenCall* call, const Batch& batch, Member& me) {
    const int64_t k = *static_cast<int64_t*>(batch.arrays[call->k]);
    float* limits = static_cast<float*>(batch.arrays[call->scratch]);
    uint8_t* needed = static_cast<uint8_t*>(batch.arrays[call->needed]);
    const auto num_of = [&](int64_t unit) { return std::clamp<int64_t>(call->num_out - unit * UNIT, 0, UNIT); };
    for (int64_t row : me.share(batch.num_rows)) {
        float* lowest = call->lowest.row<float>(batch, row);
        const Number* out = call->out.row<Number>(batch, row);
        for (int64_t unit = 0; unit < num_units(*call) && call->are_largest_known; unit++) {
            if (needed[unit]) lowest[unit] = largest_of(load(out + unit * UNIT, num_of(unit)), num_of(unit));
        }
        limits[row] = kth_largest(lowest, num_units(*call), k);
    }
    me.wait();
    const Slice& bounds = call->are_largest_known ? call->highest : call->lowest;
    for (int64_t unit : me.share(num_units(*call))) {
        const bool is_known = call->are_largest_known && needed[unit];
        needed[unit] = 0;
        if (is_known) continue;
        for (int64_t row = 0; row < batch.num_rows; row++) needed[unit] |= bounds.row<float>(batch, row)[unit] >= limits[row];
        for (int64_t row = 0; row < batch.num_rows && !needed[unit]; row++) {
            store(call->out.row<Number>(batch, row) + unit * UNIT, Floats{} - INFINITY, num_of(unit));
        }
    }
}
