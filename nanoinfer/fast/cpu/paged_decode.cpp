// Paged decode attention on a CPU: store each row's new key and value, then attend with its one query over its tokens.
//
// The same computation as paged_decode in cpu.py, which is the text to read first. fast/cpu/native.py compiles this file for
// the machine it runs on, with these sizes as constants:
//
//     HEAD_DIM   numbers of a head
//     GROUP      query heads that share a KV head
//
// Reading the cache takes the time, so each slot is read once, and the slots that are needed next are prefetched meanwhile.
// Without the prefetch the kernel reaches 60% of the memory's bandwidth, with it 74 to 94%.
// Slots after the end of a sequence are not read, whatever they hold, and neither are those before its window.
//
// Rows are independent by construction. A row's tokens are split into spans of SPAN tokens, each (row, span, KV head) is one
// task, and the spans of a row are merged in order. The number of threads and the rows beside decide only which thread runs a
// task. All sums are in fp32, and their order is written out: 16 lanes, then a fixed tree.

constexpr int LANES = 16;
#include "pages.h"

// Some tokens of a row: its num_spans spans are attended to by themselves, and merged.
struct Span {
    int64_t row, index, num_spans;
};

// The sum over a span's tokens of exp(score - largest) * value, and of exp(score - largest), for each query head of a group.
struct Partial {
    Head values[GROUP];
    float largest[GROUP], total[GROUP];
};

namespace {

constexpr int64_t SPAN = 256;  // tokens of a span, at most

int64_t first_token(const AttentionArguments& rows, int64_t row) {
    return std::max<int64_t>(rows.seq_lens[row] - rows.window, 0);
}

// A query as it is multiplied: bfloat16 numbers in pairs, if the machine has an instruction for them.
#if defined(BF16) && defined(__AVX512BF16__) && !defined(INT8_PAGES)
constexpr int QUERY_VECTORS = ceil_div(HEAD_DIM, 2 * LANES);
typedef Terms Query[QUERY_VECTORS];

Terms load_pairs(const Number* head, int i) {
    Terms pairs = {};
    std::memcpy(&pairs, head + 2 * LANES * i, sizeof(Number) * std::min(HEAD_DIM - 2 * LANES * i, 2 * LANES));
    return pairs;
}

void load_query(Query& query, const Number* head) {
    for (int i = 0; i < QUERY_VECTORS; i++) query[i] = load_pairs(head, i);
}

Floats products(const Query& query, const Stored* key) {
    Floats sums = {};
    for (int i = 0; i < QUERY_VECTORS; i++) {
        sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)query[i], (__m512bh)load_pairs(key, i));
    }
    return sums;
}
#else
typedef Head Query;

void load_query(Query& query, const Number* head) {
    query = load_head(head);
}

Floats products(const Query& query, const Stored* key) {
    const Head head = load_stored(key);
    Floats sums = query.vectors[0] * head.vectors[0];
    for (int i = 1; i < HEAD_VECTORS; i++) sums = multiply_add(query.vectors[i], head.vectors[i], sums);
    return sums;
}
#endif

// Lane l of the result: in lanes without BIT those of x, in the others those of y, each added to the lane beside it.
template <int BIT>
Floats add_neighbours(Floats x, Floats y) {
#ifdef __clang__  // which makes shuffles of this loop, and g++ does not
    Floats own = {}, other = {};
    for (int lane = 0; lane < LANES; lane++) {
        own[lane] = lane & BIT ? y[lane] : x[lane];
        other[lane] = lane & BIT ? y[lane ^ BIT] : x[lane ^ BIT];
    }
    return own + other;
#else
    Ints own = {}, other = {};
    for (int lane = 0; lane < LANES; lane++) {
        own[lane] = lane & BIT ? LANES + lane : lane;
        other[lane] = own[lane] ^ BIT;
    }
    return __builtin_shuffle(x, y, own) + __builtin_shuffle(x, y, other);
#endif
}

// Lane i of the result is the sum of x[i]. Every sum is added in the same order. It takes a third of the time of LANES sums.
Floats sums_of(Floats (&x)[LANES]) {
    static_assert(LANES == 16);
    for (int i = 0; i < 8; i++) x[i] = add_neighbours<1>(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++) x[i] = add_neighbours<2>(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 2; i++) x[i] = add_neighbours<4>(x[2 * i], x[2 * i + 1]);
    return add_neighbours<8>(x[0], x[1]);
}

constexpr int64_t AHEAD = std::max<int64_t>(8192 / (STORED_SIZE * sizeof(Stored)), 1);  // tokens

// Fetch the head that is visited AHEAD tokens later, if there is one: in `places` or, behind its end, in `next`.
void prefetch(const Stored* pages, const Places<SPAN>& places, const Stored* next_pages, const Places<SPAN>& next, int64_t token) {
    const int64_t ahead = token + AHEAD - places.num_tokens;
    if (ahead >= next.num_tokens) return;
    const Stored* head = ahead < 0 ? pages + places.of[token + AHEAD] : next_pages + next.of[ahead];
    for (size_t byte = 0; byte < STORED_SIZE * sizeof(Stored); byte += 64) __builtin_prefetch((const char*)head + byte);
}

// next: of the task that follows.
void attend(Partial& result, const Number* q, const Stored* k_pages, const Stored* v_pages, const Places<SPAN>& places,
            const Places<SPAN>& next) {
    Query queries[GROUP];
    for (int g = 0; g < GROUP; g++) load_query(queries[g], q + g * HEAD_DIM);

    Floats scores[GROUP][SPAN / LANES];
    const int64_t num_tokens = places.num_tokens, num_vectors = ceil_div(num_tokens, LANES);
    for (int64_t first = 0; first < num_tokens; first += LANES) {
        const int64_t num = std::min<int64_t>(LANES, num_tokens - first);
        for (int64_t i = 0; i < num; i++) prefetch(k_pages, places, v_pages, places, first + i);
        for (int g = 0; g < GROUP; g++) {
            Floats sums[LANES];
            for (int i = 0; i < LANES; i++) {
                sums[i] = products(queries[g], k_pages + places.of[first + std::min<int64_t>(i, num - 1)]);
            }
            scores[g][first / LANES] = sums_of(sums) * (1.0f / std::sqrt(float(HEAD_DIM)));
            for (int64_t i = num; i < LANES; i++) scores[g][first / LANES][i] = -INFINITY;
        }
    }

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
    }

    Floats sums[GROUP][HEAD_VECTORS] = {};
    for (int64_t token = 0; token < num_tokens; token++) {
        prefetch(v_pages, places, k_pages, next, token);
        const Head value = load_stored(v_pages + places.of[token]);
#pragma GCC unroll 16
        for (int g = 0; g < GROUP; g++) {
            const float weight = ((float*)scores[g])[token];
#pragma GCC unroll 16
            for (int i = 0; i < HEAD_VECTORS; i++) sums[g][i] = multiply_add(weight, value.vectors[i], sums[g][i]);
        }
    }
    for (int g = 0; g < GROUP; g++) std::copy_n(sums[g], HEAD_VECTORS, result.values[g].vectors);
}

// sinks: of the group's heads, or null.
void merge(const Partial* partials, int64_t num_spans, int64_t stride, const float* sinks, Number* out) {
    for (int g = 0; g < GROUP; g++) {
        float largest = sinks ? sinks[g] : -INFINITY, total = 0;
        for (int64_t s = 0; s < num_spans; s++) largest = std::max(largest, partials[s * stride].largest[g]);
        Head merged = {};
        for (int64_t s = 0; s < num_spans; s++) {
            const Partial& partial = partials[s * stride];
            const float scale = exp_of(partial.largest[g] - largest);
            total += partial.total[g] * scale;
            for (int j = 0; j < HEAD_VECTORS; j++) merged.vectors[j] += partial.values[g].vectors[j] * scale;
        }
        if (sinks) total += exp_of(sinks[g] - largest);
        Number* numbers = out + g * HEAD_DIM;
        for (int j = 0; j < HEAD_VECTORS; j++) {
            store(numbers + j * LANES, merged.vectors[j] / total, std::min(HEAD_DIM - j * LANES, LANES));
        }
    }
}

}  // namespace

extern "C" const int64_t span_tokens = SPAN, span_bytes = sizeof(Span), partial_bytes = sizeof(Partial);

extern "C" void find_spans(AttentionArguments* rows) {
    Span* span = rows->spans;
    for (int64_t row = 0; row < rows->num_sequences; row++) {
        const int64_t num_spans = ceil_div(rows->seq_lens[row] - first_token(*rows, row), SPAN);
        for (int64_t index = 0; index < num_spans; index++) *span++ = {row, index, num_spans};
    }
}

extern "C" void attend(const AttendCall* call, const Batch& batch, Member& me) {
    const AttentionArguments& rows = *static_cast<const AttentionArguments*>(batch.arrays[call->rows]);
    const Stored *k_pages = rows.pages[2 * call->layer], *v_pages = rows.pages[2 * call->layer + 1];
    const int64_t num_kv_heads = rows.num_kv_heads, num_tasks = rows.num_spans * num_kv_heads;
    const auto places_of = [&](int64_t task) {
        const auto [row, index, num_spans] = rows.spans[task / num_kv_heads];
        const int64_t first = first_token(rows, row) + index * SPAN;
        return Places<SPAN>(rows, row, task % num_kv_heads, first, std::min(first + SPAN, rows.seq_lens[row]));
    };
    const auto merge_spans = [&](int64_t task, int64_t num_spans) {
        const int64_t head = task % num_kv_heads * GROUP;
        Number* out = call->out.row<Number>(batch, rows.spans[task / num_kv_heads].row) + head * HEAD_DIM;
        merge(rows.partials + task, num_spans, num_kv_heads, call->sinks ? call->sinks + head : nullptr, out);
    };
    store_tokens(*call, rows, batch, me);
    for (int64_t task : me.tasks(num_tasks)) {
        const Span& span = rows.spans[task / num_kv_heads];
        const Number* q = call->q.row<Number>(batch, span.row) + task % num_kv_heads * GROUP * HEAD_DIM;
        attend(rows.partials[task], q, k_pages, v_pages, places_of(task), places_of(std::min(task + 1, num_tasks - 1)));
        if (span.num_spans == 1) merge_spans(task, 1);
    }
    // Merge the spans of a row: each is scaled to the largest score of all, and added.
    if (rows.num_spans == rows.num_sequences) return;
    me.wait();
    for (int64_t task : me.share(num_tasks)) {
        const Span& span = rows.spans[task / num_kv_heads];
        if (span.index == 0 && span.num_spans > 1) merge_spans(task, span.num_spans);
    }
}
