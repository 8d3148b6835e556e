// Drives paged_decode.cpp: rows of one token each, with windows, sinks and several spans.

#include "pages_of_sequences.h"

namespace {

constexpr int64_t NO_WINDOW = (int64_t(1) << 31) - 1;

void drive(Size size, std::vector<int64_t> lengths, int64_t block_size, int64_t window, bool has_sinks, Values values) {
    const int64_t num_rows = lengths.size(), num_kv_heads = 2, width = num_kv_heads * HEAD_DIM;
    const int64_t q_width = width * GROUP, stride = q_width + 2 * width + 3, first = 2, layer = 1;
    const Exact<int64_t> seq_lens = exact(lengths);
    std::vector<Sequence> sequences;
    int64_t num_spans = 0;
    for (int64_t length : lengths) {
        sequences.push_back({length, 1, std::max<int64_t>(length - window, 0)});
        num_spans += (std::min(length, window) + SPAN - 1) / SPAN;
    }
    for (int threads : threads_of(size)) {
        Random random;
        PagesOfSequences cache(random, sequences, num_kv_heads, block_size, values);
        const auto qkv = numbers(random, extent(first, num_rows, stride, q_width + 2 * width), 2, values);
        const auto sinks = floats(random, num_kv_heads * GROUP);
        Exact<Span> spans(num_spans);
        Exact<Partial> partials(num_spans * num_kv_heads, 64);
        const Exact<Stored*> pages = exact<Stored*>({nullptr, nullptr, cache.pages[0].data(), cache.pages[1].data()});
        AttentionArguments rows{cache.slots.data(), nullptr, cache.block_tables.data(), seq_lens.data(), num_rows,
                                cache.max_blocks, num_kv_heads, block_size, window, pages.data(), spans.data(),
                                partials.data(), num_spans};
        find_spans(&rows);
        Exact<Number> out(num_rows * q_width);
        const int64_t k_first = first + q_width, v_first = k_first + width;
        const Slice of_q{0, first, stride}, of_k{0, k_first, stride}, of_v{0, v_first, stride};
        const AttendCall call{of_q, of_k, of_v, {1, 0, q_width}, 2, layer, has_sinks ? sinks.data() : nullptr};
        run_kernel(::attend, call, num_rows, threads, qkv, out, (const void*)&rows);
        Digest digest;
        add(digest, out);
        print(text("attend %ld rows first %ld blocks %ld window %ld sinks %d values %d", num_rows, lengths[0], block_size,
                   window, has_sinks, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, std::vector<int64_t>(std::atoi(arguments[2]), 100), 16, NO_WINDOW, false, Values::ORDINARY);
        return 0;
    }
    std::vector<std::vector<int64_t>> batches = {{1}, {1, 17, 16, 300}, {513, 2}};
    std::vector<int64_t> many;
    for (int64_t i = 0; i < 129; i++) many.push_back(1 + i * 37 % 71);
    batches.push_back(many);
    if (size == Size::FULL) batches.insert(batches.end(), {{255}, {256}, {257}, {5, 5, 1000}});
    std::vector<int64_t> block_sizes = {3};
    if (size == Size::FULL) block_sizes = {1, 3, 16};
    for (const auto& lengths : batches) {
        for (int64_t block_size : block_sizes) {
            for (int64_t window : {int64_t(1), int64_t(20), NO_WINDOW}) {
                drive(size, lengths, block_size, window, false, Values::ORDINARY);
                drive(size, lengths, block_size, window, true, Values::SPECIAL);
            }
        }
    }
}
