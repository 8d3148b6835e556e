// The instructions of tiles.h, emulated on processors without them: arrays, and the same sums in the same order. Only numbers
// too small for fp32's normal range differ, which the instructions take for 0. tiles.h includes it, inside its namespace.

thread_local TileShapes shapes_of_tiles;
thread_local uint8_t tiles[8][TILE_ROWS][TILE_BYTES];

inline void set_tile_shapes(const TileShapes& shapes) {
    shapes_of_tiles = shapes;
    std::memset(tiles, 0, sizeof tiles);
}

inline void release_tiles() {}

inline void zero_tile(int tile) {
    std::memset(tiles[tile], 0, sizeof tiles[tile]);
}

inline void load_tile(int tile, const void* from, int64_t stride) {
    zero_tile(tile);
    for (int row = 0; row < shapes_of_tiles.rows[tile]; row++) {
        std::memcpy(tiles[tile][row], (const uint8_t*)from + row * stride, shapes_of_tiles.bytes[tile]);
    }
}

inline void store_tile(int tile, void* to, int64_t stride) {
    for (int row = 0; row < shapes_of_tiles.rows[tile]; row++) {
        std::memcpy((uint8_t*)to + row * stride, tiles[tile][row], shapes_of_tiles.bytes[tile]);
    }
}

// For each row and output, over 16 pairs of inputs: sums += (sum of the first ones' products) + (sum of the second ones').
inline void add_bfloat16_products(int sums, int x, int weights) {
    const auto number = [](const uint8_t* at) {
        const uint32_t bits = uint32_t(at[0]) << 16 | uint32_t(at[1]) << 24;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    };
    for (int row = 0; row < shapes_of_tiles.rows[sums]; row++) {
        float* out = (float*)tiles[sums][row];
        float products[2][16] = {};
        for (int pair = 0; pair < shapes_of_tiles.bytes[x] / 4; pair++) {
            for (int i = 0; i < 2; i++) {
                const float given = number(&tiles[x][row][4 * pair + 2 * i]);
                for (int j = 0; j < 16; j++) {
                    products[i][j] = __builtin_fmaf(given, number(&tiles[weights][pair][4 * j + 2 * i]), products[i][j]);
                }
            }
        }
        for (int j = 0; j < 16; j++) out[j] += products[0][j] + products[1][j];
    }
}

// For each row and output, over groups of four inputs: sums += products of signed x and unsigned weights.
inline void add_int8_products(int sums, int x, int weights) {
    for (int row = 0; row < shapes_of_tiles.rows[sums]; row++) {
        int32_t* out = (int32_t*)tiles[sums][row];
        for (int i = 0; i < shapes_of_tiles.bytes[x]; i++) {
            for (int j = 0; j < 16; j++) out[j] += (int8_t)tiles[x][row][i] * tiles[weights][i / 4][4 * j + i % 4];
        }
    }
}
