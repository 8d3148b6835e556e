// Tiles: registers of 16 rows of 64 bytes, and instructions that multiply two of them and add to a third (Intel AMX). A kernel
// uses them if TILES is defined, which program.py does where has_tiles() returns 1.
//
// With PLAY_TILES, for tests on other processors, they are played: arrays, and the same sums in the same order. Only numbers too
// small for fp32's normal range differ, which the instructions take for 0.

#pragma once

#include <cstdint>
#include <cstring>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__linux__) && !defined(PLAY_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

// Whether this process may use tiles. Linux keeps them for a process only after it has asked, which is once for all threads.
inline int may_use_tiles() {
#if defined(PLAY_TILES)
    return 1;
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return 0;
#endif
}

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
#ifndef PLAY_TILES
// The compiler must know that two of them read memory, which its own forms (_tile_loadconfig, _tile_loadd) do not tell.
#define set_tile_shapes(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#define load_tile(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"((const void*)(from)), "r"((int64_t)(stride)) : "memory")
#define release_tiles() _tile_release()
#define zero_tile(tile) _tile_zero(tile)
#define store_tile(tile, to, stride) _tile_stored(tile, to, stride)
#define add_bfloat16_products(sums, x, weights) _tile_dpbf16ps(sums, x, weights)
#define add_int8_products(sums, x, weights) _tile_dpbsud(sums, x, weights)
#else
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
#endif
#endif

}  // namespace
