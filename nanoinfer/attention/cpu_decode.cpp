// Paged decode attention on a CPU: store each row's new key and value, then attend with its one query over its tokens.
//
// The same computation as paged_decode in cpu.py, which is the text to read first. devices/native.py compiles this file for
// the machine it runs on, with these sizes as constants:
//
//     HEAD_DIM   numbers of a head
//     GROUP      query heads that share a KV head
//     BF16       defined if numbers are bfloat16, otherwise they are float
//
// Reading the cache takes the time, so each page is read once, from its first used slot to its last one, and the page that is
// needed next is prefetched meanwhile. Without the prefetch the kernel reaches 60% of the memory's bandwidth, with it 80 to 95%.
// Slots after the end of a sequence are not read, whatever they hold.
//
// Rows are independent by construction. A row's tokens are split into spans of SPAN tokens, each (row, span, KV head) is one
// task, and the spans of a row are merged in order. The number of threads and the rows beside decide only which thread runs a
// task. All sums are in fp32, and their order is written out: 16 lanes, then a fixed tree.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int VECTORS = (HEAD_DIM + LANES - 1) / LANES;  // of a head
constexpr int SPAN = 256;                                // tokens

// GCC's vectors. The compiler splits them where the machine's registers are shorter.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#ifdef BF16
typedef uint16_t Number;  // the upper half of a float's bits
typedef uint16_t Numbers __attribute__((vector_size(2 * LANES)));

Floats widen(Numbers x) {
    return (Floats)(__builtin_convertvector(x, Ints) << 16);
}

Number narrow(float x) {  // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float Number;
typedef Floats Numbers;

Floats widen(Numbers x) {
    return x;
}

Number narrow(float x) {
    return x;
}
#endif

// A head of numbers in VECTORS registers, zeros behind its end.
struct Head {
    Floats part[VECTORS];
};

Head load(const Number* head) {
    Head x;
    for (int i = 0; i < VECTORS; i++) {
        Numbers numbers = {};
        std::memcpy(&numbers, head + i * LANES, std::min(HEAD_DIM - i * LANES, LANES) * sizeof(Number));
        x.part[i] = widen(numbers);
    }
    return x;
}

float sum(Floats x) {
    float lanes[LANES];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

float dot(const Head& x, const Head& y) {
    Floats products = x.part[0] * y.part[0];
    for (int i = 1; i < VECTORS; i++) products += x.part[i] * y.part[i];
    return sum(products);
}

// exp(x) for x <= 0: 2^n * exp(r) with |r| <= ln(2) / 2, and a Taylor polynomial for exp(r). Below -87 it is exp(-87), 2e-38.
Floats exp_of(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;  // NaN stays NaN
    const float round = 12582912.0f;        // 1.5 * 2^23: adding it rounds to an integer
    Floats n = (x * 1.44269504f + round) - round;
    Floats r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln(2) in two parts
    Floats y = r * (1.0f / 720) + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}

void prefetch(const Number* head) {
    for (size_t byte = 0; byte < HEAD_DIM * sizeof(Number); byte += 64) __builtin_prefetch((const char*)head + byte);
}

// The pages of one KV head of one row.
struct Pages {
    const Number* pages;
    const int64_t* table;
    int64_t num_kv_heads, block_size, kv_head;

    const Number* at(int64_t token) const {
        return pages + ((table[token / block_size] * num_kv_heads + kv_head) * block_size + token % block_size) * HEAD_DIM;
    }

    // Call visit(token, its head) for the tokens first .. last - 1, and prefetch the following page: after the last one `next`.
    template <class Visit>
    void each(int64_t first, int64_t last, const Number* next, Visit visit) const {
        for (int64_t token = first; token < last;) {
            const int64_t end = std::min(token - token % block_size + block_size, last);
            const Number *head = at(token), *ahead = end < last ? at(end) : next;
            for (; token < end; token++, head += HEAD_DIM, ahead += HEAD_DIM) {
                prefetch(ahead);
                visit(token, head);
            }
        }
    }
};

// The sum over a span's tokens of exp(score - largest) * value, and of exp(score - largest), for each query head of a group.
struct Partial {
    Head values[GROUP];
    float largest[GROUP], total[GROUP];
};

// `following`: a key that is needed after this task.
void attend(Partial& result, const Number* q, const Pages& keys, const Pages& values, int64_t first, int64_t last,
            const Number* following) {
    const int64_t num_tokens = last - first;
    Head queries[GROUP];
    for (int g = 0; g < GROUP; g++) {
        queries[g] = load(q + g * HEAD_DIM);
        for (Floats& part : queries[g].part) part *= 1.0f / std::sqrt(float(HEAD_DIM));
    }

    Floats scores[GROUP][SPAN / LANES];
    const int64_t num_vectors = (num_tokens + LANES - 1) / LANES;
    for (int g = 0; g < GROUP; g++) scores[g][num_vectors - 1] = Floats{} - INFINITY;  // for the lanes after the last token
    keys.each(first, last, values.at(first), [&](int64_t token, const Number* head) {
        const Head key = load(head);
        for (int g = 0; g < GROUP; g++) ((float*)scores[g])[token - first] = dot(queries[g], key);
    });

    for (int g = 0; g < GROUP; g++) {
        Floats largest = scores[g][0], total = {};
        for (int64_t i = 1; i < num_vectors; i++) largest = scores[g][i] > largest ? scores[g][i] : largest;
        result.largest[g] = -INFINITY;
        for (int lane = 0; lane < LANES; lane++) result.largest[g] = std::max(result.largest[g], largest[lane]);
        for (int64_t i = 0; i < num_vectors; i++) {
            scores[g][i] = exp_of(scores[g][i] - result.largest[g]);
            total += scores[g][i];
        }
        result.total[g] = sum(total);
        result.values[g] = {};
    }

    values.each(first, last, following, [&](int64_t token, const Number* head) {
        const Head value = load(head);
        for (int g = 0; g < GROUP; g++) {
            const float weight = ((float*)scores[g])[token - first];
            for (int i = 0; i < VECTORS; i++) result.values[g].part[i] += weight * value.part[i];
        }
    });
}

void write(Number* out, const Head& values, float total) {
    float numbers[VECTORS * LANES];
    std::memcpy(numbers, values.part, sizeof numbers);
    for (int i = 0; i < HEAD_DIM; i++) out[i] = narrow(numbers[i] / total);
}

// As kv_cache.finite_values: a value that is not finite is stored as 0, and its key as NaN.
void store(Number* key, Number* value, const Number* k, const Number* v) {
    Head x = load(v);
    Floats zero = {};
    for (Floats& part : x.part) zero += part * 0.0f;  // NaN in a lane that holds infinity or NaN
    const bool is_finite = sum(zero) == 0.0f;
    for (int i = 0; i < HEAD_DIM; i++) {
        key[i] = is_finite ? k[i] : narrow(NAN);
        value[i] = is_finite ? v[i] : narrow(0.0f);
    }
}

struct Task {
    int64_t row, span, num_spans;
};

}  // namespace

// q, out: [num_rows, num_kv_heads * GROUP, HEAD_DIM]. k, v: [num_rows, num_kv_heads, HEAD_DIM]. The strides of rows are in numbers.
// k_pages, v_pages: [num_blocks, num_kv_heads, block_size, HEAD_DIM].
// slots: of the new tokens. block_tables: [num_rows, max_blocks]. seq_lens: tokens of each row, the new one included.
extern "C" void decode(
    const Number* q, const Number* k, const Number* v, Number* out, int64_t q_stride, int64_t k_stride, int64_t v_stride,
    Number* k_pages, Number* v_pages, const int64_t* slots, const int64_t* block_tables, const int64_t* seq_lens,
    int64_t num_rows, int64_t max_blocks, int64_t num_kv_heads, int64_t block_size, int num_threads) {
    std::vector<Task> spans;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t num_spans = (seq_lens[row] + SPAN - 1) / SPAN;
        for (int64_t span = 0; span < num_spans; span++) spans.push_back({row, span, num_spans});
    }
    const int64_t num_spans = spans.size(), num_tasks = num_spans * num_kv_heads;
    const std::unique_ptr<Partial[]> partials(new Partial[num_tasks]);
    const int64_t together = std::clamp<int64_t>(num_tasks / (8 * num_threads), 1, 4);  // tasks that a thread takes at a time

    const auto pages_of = [&](const Number* pages, int64_t task) {
        const int64_t row = spans[task / num_kv_heads].row;
        return Pages{pages, block_tables + row * max_blocks, num_kv_heads, block_size, task % num_kv_heads};
    };
    const auto first_of = [&](int64_t task) { return spans[task / num_kv_heads].span * SPAN; };

#pragma omp parallel num_threads(num_threads)
    {
        // Every row is stored before any is attended to: rows of one sequence (drafts) attend to those before them.
#pragma omp for
        for (int64_t row = 0; row < num_rows; row++) {
            for (int64_t head = 0; head < num_kv_heads; head++) {
                const int64_t slot = slots[row], block = slot / block_size;
                const int64_t place = ((block * num_kv_heads + head) * block_size + slot % block_size) * HEAD_DIM;
                store(k_pages + place, v_pages + place, k + row * k_stride + head * HEAD_DIM, v + row * v_stride + head * HEAD_DIM);
            }
        }
#pragma omp for schedule(dynamic, together)
        for (int64_t task = 0; task < num_tasks; task++) {
            const auto [row, span, num_spans] = spans[task / num_kv_heads];
            const int64_t head = task % num_kv_heads * GROUP, first = span * SPAN;
            const Pages keys = pages_of(k_pages, task), values = pages_of(v_pages, task);
            const int64_t following = std::min(task + 1, num_tasks - 1);
            attend(partials[task], q + row * q_stride + head * HEAD_DIM, keys, values, first,
                   std::min(first + SPAN, seq_lens[row]), pages_of(k_pages, following).at(first_of(following)));
        }
        // Merge the spans: each is scaled to the largest score of all, and added.
#pragma omp for
        for (int64_t i = 0; i < num_spans; i++) {
            if (spans[i].span) continue;
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
                const Partial* parts = partials.get() + i * num_kv_heads + kv_head;
                for (int g = 0; g < GROUP; g++) {
                    float largest = -INFINITY, total = 0;
                    for (int64_t s = 0; s < spans[i].num_spans; s++) {
                        largest = std::max(largest, parts[s * num_kv_heads].largest[g]);
                    }
                    Head merged = {};
                    for (int64_t s = 0; s < spans[i].num_spans; s++) {
                        const Partial& part = parts[s * num_kv_heads];
                        const float scale = std::exp(part.largest[g] - largest);
                        total += part.total[g] * scale;
                        for (int j = 0; j < VECTORS; j++) merged.part[j] += part.values[g].part[j] * scale;
                    }
                    write(out + ((spans[i].row * num_kv_heads + kv_head) * GROUP + g) * HEAD_DIM, merged, total);
                }
            }
        }
    }
}
