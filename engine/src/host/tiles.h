// Tiles of bf16 (AMX). What the processor does is behind `Tiles`, so that a test can put a model in its place (model-tiles.h):
//
//   configure()            every tile has 16 rows of 64 bytes
//   zero<T>(), load<T>(from), dot<C, A, B>(), store<T>(to), release()
#pragma once

#include <stdint.h>

static constexpr int TILE_SIDE = 16; // rows, tokens
static constexpr int TILE_COLS = 32; // columns of one instruction

// 32 columns of 16: line i has columns 2i and 2i + 1 of each
struct pair_tile {
    alignas(64) uint32_t pairs[TILE_COLS / 2][TILE_SIDE];
};
