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

#include <memory>
#include <vector>

constexpr int LANES = 16;
#include "cpu_pages.h"

namespace {

constexpr int SPAN = 256;  // tokens

float dot(const Head& x, const Head& y) {
    Floats products = x.part[0] * y.part[0];
    for (int i = 1; i < HEAD_VECTORS; i++) products += x.part[i] * y.part[i];
    return sum(products);
}

void prefetch(const Number* head) {
    for (size_t byte = 0; byte < HEAD_DIM * sizeof(Number); byte += 64) __builtin_prefetch((const char*)head + byte);
}

// Call visit(token, its head) for the tokens first .. last - 1, and prefetch the following page: after the last one `next`.
template <class Visit>
void each(const Pages& pages, int64_t first, int64_t last, const Number* next, Visit visit) {
    for (int64_t token = first; token < last;) {
        const int64_t end = std::min(token - token % pages.block_size + pages.block_size, last);
        const Number *head = pages.at(token), *ahead = end < last ? pages.at(end) : next;
        for (; token < end; token++, head += HEAD_DIM, ahead += HEAD_DIM) {
            prefetch(ahead);
            visit(token, head);
        }
    }
}

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
        queries[g] = load_head(q + g * HEAD_DIM);
        for (Floats& part : queries[g].part) part *= 1.0f / std::sqrt(float(HEAD_DIM));
    }

    Floats scores[GROUP][SPAN / LANES];
    const int64_t num_vectors = (num_tokens + LANES - 1) / LANES;
    for (int g = 0; g < GROUP; g++) scores[g][num_vectors - 1] = Floats{} - INFINITY;  // for the lanes after the last token
    each(keys, first, last, values.at(first), [&](int64_t token, const Number* head) {
        const Head key = load_head(head);
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

    each(values, first, last, following, [&](int64_t token, const Number* head) {
        const Head value = load_head(head);
        for (int g = 0; g < GROUP; g++) {
            const float weight = ((float*)scores[g])[token - first];
            for (int i = 0; i < HEAD_VECTORS; i++) result.values[g].part[i] += weight * value.part[i];
        }
    });
}

void write(Number* out, const Head& values, float total) {
    for (int i = 0; i < HEAD_VECTORS; i++) {
        store(out + i * LANES, values.part[i] / total, std::min(HEAD_DIM - i * LANES, LANES));
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
            store_token(k_pages, v_pages, k + row * k_stride, v + row * v_stride, slots[row], num_kv_heads, block_size);
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
                        for (int j = 0; j < HEAD_VECTORS; j++) merged.part[j] += part.values[g].part[j] * scale;
                    }
                    write(out + ((spans[i].row * num_kv_heads + kv_head) * GROUP + g) * HEAD_DIM, merged, total);
                }
            }
        }
    }
}
