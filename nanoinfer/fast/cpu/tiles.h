// Tiles: registers of 16 rows of 64 bytes, and instructions that multiply two of them and add to a third (Intel AMX). A kernel
// uses them if TILES is defined, which program.py does where has_tiles() returns 1.
//
// EMULATE_TILES names a file that emulates them in arrays, for tests on other processors (tests/kernels/emulated_tiles.h).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// How many rows and bytes of a row each of the eight tiles has. It is the argument of an instruction.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int num_bytes = TILE_BYTES) {
        rows[tile] = num_rows;
        bytes[tile] = num_bytes;
    }
};

#ifdef TILES
#ifndef EMULATE_TILES
// The compiler must know that two of them read memory, which its own intrinsics (_tile_loadconfig, _tile_loadd) do not tell.
#define set_tile_shapes(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#define load_tile(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(from)), "r"((int64_t)(stride)) : "memory")
#define release_tiles() _tile_release()
#define zero_tile(tile) _tile_zero(tile)
#define store_tile(tile, to, stride) _tile_stored(tile, to, stride)
#define add_bfloat16_products(sums, x, weights) _tile_dpbf16ps(sums, x, weights)
#define add_int8_products(sums, x, weights) _tile_dpbsud(sums, x, weights)
#else
#include EMULATE_TILES
#endif

// Products of up to 32 rows by 32 outputs. Tiles 0 to 3: sums, two of rows by two of outputs. 4, 5: rows. 6, 7: weights.
inline void set_shapes(int num_rows, int row_bytes, int num_weight_rows) {
    TileShapes shapes;
    const int first = std::min(num_rows, TILE_ROWS), second = std::max(num_rows - TILE_ROWS, 1);
    for (int tile : {0, 1}) shapes.set(tile, first);
    for (int tile : {2, 3}) shapes.set(tile, second);
    shapes.set(4, first, row_bytes);
    shapes.set(5, second, row_bytes);
    for (int tile : {6, 7}) shapes.set(tile, num_weight_rows);
    set_tile_shapes(shapes);
}

inline void zero_sums() {
    zero_tile(0);
    zero_tile(1);
    zero_tile(2);
    zero_tile(3);
}

// sums: [two of rows, two of outputs, TILE_ROWS, TILE_BYTES].
inline void store_sums(void* sums) {
    constexpr int SIZE = TILE_ROWS * TILE_BYTES;
    store_tile(0, (char*)sums, TILE_BYTES);
    store_tile(1, (char*)sums + SIZE, TILE_BYTES);
    store_tile(2, (char*)sums + 2 * SIZE, TILE_BYTES);
    store_tile(3, (char*)sums + 3 * SIZE, TILE_BYTES);
}
#endif

}  // namespace
