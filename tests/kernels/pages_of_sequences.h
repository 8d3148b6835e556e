// Pages of the KV cache with sequences in them, for the drivers of paged_decode.cpp and paged_prefill.cpp.

#pragma once

#include "numbers.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// A sequence of `num_tokens`, of which the kernel stores the last num_new and attends to those from `first_read` on.
struct Sequence {
    int64_t num_tokens, num_new, first_read;
};

// The pages of a layer, in which the sequences' blocks lie in another order than in the sequences.
//
// AddressSanitizer reports a read of a place that belongs to no token, or to a token that may not be read. Entries of the block
// table that may not be read lead far outside of the pages.
struct PagesOfSequences {
    int64_t num_kv_heads, block_size, max_blocks = 1;
    std::vector<Exact<Stored>> pages;  // keys, values
    Exact<int64_t> block_tables;       // [num_sequences, max_blocks]
    Exact<int64_t> slots;              // of the new tokens

    PagesOfSequences(Random& random, const std::vector<Sequence>& sequences, int64_t num_kv_heads, int64_t block_size,
                     Values values)
        : num_kv_heads(num_kv_heads), block_size(block_size) {
        int64_t num_blocks = 0;
        for (const Sequence& sequence : sequences) {
            const int64_t num = (sequence.num_tokens + block_size - 1) / block_size;
            max_blocks = std::max(max_blocks, num), num_blocks += num;
        }
        std::vector<int64_t> blocks(num_blocks);
        for (int64_t i = 0; i < num_blocks; i++) blocks[i] = i;
        for (int64_t i = num_blocks - 1; i > 0; i--) std::swap(blocks[i], blocks[random.below(i + 1)]);

        block_tables = Exact<int64_t>(sequences.size() * max_blocks);
        for (int64_t& entry : block_tables) entry = int64_t(1) << 40;
        std::vector<int64_t> new_slots;
        std::vector<bool> is_read(num_blocks * block_size);
        int64_t block = 0, row = 0;
        for (const auto& [num_tokens, num_new, first_read] : sequences) {
            for (int64_t token = 0; token < num_tokens; token++) {
                if (token > 0 && token % block_size == 0) block++;
                const int64_t slot = blocks[block] * block_size + token % block_size;
                if (token < first_read && token < num_tokens - num_new) continue;
                block_tables[row * max_blocks + token / block_size] = blocks[block];
                is_read[slot] = true;
                if (token >= num_tokens - num_new) new_slots.push_back(slot);
            }
            block++, row++;
        }
        slots = exact(new_slots);
        for (int i : {0, 1}) {
            pages.emplace_back(num_blocks * num_kv_heads * block_size * STORED_SIZE);
            for (int64_t slot = 0; slot < num_blocks * block_size; slot++) fill(random, pages[i], slot, is_read[slot], values);
        }
    }

  private:
    void fill(Random& random, Exact<Stored>& pages, int64_t slot, bool is_read, Values values) const {
        for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            const int64_t place = (slot / block_size * num_kv_heads + kv_head) * block_size + slot % block_size;
            Number head[HEAD_DIM];
            for (Number& number : head) number = number_of(value_of(random, 1, values));
            if (is_read) store_head(&pages[place * STORED_SIZE], head);
#ifdef __SANITIZE_ADDRESS__
            if (!is_read) __asan_poison_memory_region(&pages[place * STORED_SIZE], STORED_SIZE * sizeof(Stored));
#endif
        }
    }

    // Values are finite in the cache (kv_cache.py, finite_values).
    static void store_head(Stored* to, const Number* head) {
        Stored unused[STORED_SIZE];
        ::store_head(unused, to, head, head);
    }
};
