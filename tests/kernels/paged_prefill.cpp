// Drives paged_prefill.cpp: prompt chunks of several sequences, with and without tokens before them, with windows and sinks.

#include "pages_of_sequences.h"

namespace {

constexpr int64_t NO_WINDOW = (int64_t(1) << 31) - 1;

struct GivenChunk {
    int64_t num_before, num_new;
};

void drive(Size size, const std::vector<GivenChunk>& chunks, int64_t group, int64_t block_size, int64_t window, bool has_sinks,
           Values values) {
    const int64_t num_chunks = chunks.size(), num_kv_heads = 2, width = num_kv_heads * HEAD_DIM, q_width = width * group;
    const int64_t stride = q_width + 2 * width + 3, origin = 5;
    Exact<int64_t> starts(num_chunks + 1), seq_lens(num_chunks);
    std::vector<Sequence> sequences;
    starts[0] = origin;
    for (int64_t i = 0; i < num_chunks; i++) {
        const auto [num_before, num_new] = chunks[i];
        sequences.push_back({num_before + num_new, num_new, std::max<int64_t>(num_before + 1 - window, 0)});
        starts[i + 1] = starts[i] + num_new, seq_lens[i] = num_before + num_new;
    }
    const int64_t num_tokens = starts[num_chunks] - origin;
    for (int threads : threads_of(size)) {
        Random random;
        PagesOfSequences cache(random, sequences, num_kv_heads, block_size, values);
        const auto qkv = numbers(random, extent(0, num_tokens, stride, q_width + 2 * width), 2, values);
        const auto sinks = floats(random, num_kv_heads * group);
        Exact<Number> out(num_tokens * q_width);
        const Exact<Stored*> pages = exact<Stored*>({nullptr, nullptr, cache.pages[0].data(), cache.pages[1].data()});
        const AttentionArguments rows{cache.slots.data(), starts.data(), cache.block_tables.data(), seq_lens.data(), num_chunks,
                                      cache.max_blocks, num_kv_heads, block_size, window, pages.data()};
        const Slice of_q{0, 0, stride}, of_k{0, q_width, stride}, of_v{0, q_width + width, stride};
        const AttendCall call{of_q, of_k, of_v, {1, 0, q_width}, 2, 1, has_sinks ? sinks.data() : nullptr};
        run_kernel(prefill, call, num_tokens, threads, qkv, out, (const void*)&rows);
        Digest digest;
        add(digest, out);
        print(text("prefill %ld tokens of %ld group %ld blocks %ld window %ld sinks %d values %d", num_tokens, num_chunks,
                   group, block_size, window, has_sinks, int(values)), threads, digest);
    }
}

}  // namespace

int main(int num_arguments, char** arguments) {
    const Size size = size_of(num_arguments, arguments);
    if (size == Size::COUNT) {
        drive(size, {{20, std::atoi(arguments[2])}}, 2, 16, NO_WINDOW, false, Values::ORDINARY);
        return 0;
    }
    std::vector<std::vector<GivenChunk>> batches = {{{0, 1}}, {{0, 17}, {33, 16}, {100, 1}}, {{70, 129}}};
    if (size == Size::FULL) batches.insert(batches.end(), {{{0, 64}}, {{0, 65}}, {{63, 2}}, {{64, 128}, {1, 33}, {0, 97}}});
    std::vector<int64_t> block_sizes = {3};
    if (size == Size::FULL) block_sizes = {1, 3, 16};
    for (const auto& chunks : batches) {
        for (int64_t block_size : block_sizes) {
            for (int64_t window : {int64_t(1), int64_t(20), NO_WINDOW}) {
                drive(size, chunks, 3, block_size, window, false, Values::ORDINARY);
                drive(size, chunks, 1, block_size, window, true, Values::SPECIAL);
            }
        }
    }
}
