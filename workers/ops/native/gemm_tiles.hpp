// AMX, if the CPU has it and the kernel permits it: eight tiles of 16 rows by 64 bytes.
//
//     tiles 0..3 = sums [row half][column half],  4, 5 = rows of x,  6, 7 = the columns of a panel, 32 wide
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__)
#define DIPTYCH_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;

inline bool tiles_granted() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl; once per process
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// Configures the calling thread's tiles; the destructor releases them.
struct Tiles {
    Tiles() {
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = TILE_BYTES, shape.rows[tile] = TILE_ROWS;
        _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

// Products of HALVES * 16 rows of x with one panel, `steps` times 64 bytes of each row deep. Adds to the sums
// [HALVES * 16][32], four bytes each, if `more`, else overwrites them. Prefetches the bytes from `ahead`.
template <int HALVES, class Add>
inline void tile_product(const char* x, int64_t x_stride, const char* panel, int64_t steps, const char* ahead,
                         int64_t ahead_step, char* sums, bool more) {
    constexpr int64_t SUMS_STRIDE = 2 * TILE_BYTES, PANEL_STRIDE = 2 * TILE_BYTES;
    if (more) {
        _tile_loadd(0, sums, SUMS_STRIDE);
        _tile_loadd(1, sums + TILE_BYTES, SUMS_STRIDE);
        if constexpr (HALVES == 2) {
            _tile_loadd(2, sums + TILE_ROWS * SUMS_STRIDE, SUMS_STRIDE);
            _tile_loadd(3, sums + TILE_ROWS * SUMS_STRIDE + TILE_BYTES, SUMS_STRIDE);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (HALVES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t step = 0; step < steps; step++, x += TILE_BYTES, panel += TILE_ROWS * PANEL_STRIDE) {
        for (int64_t byte = step * ahead_step & -64; byte < (step + 1) * ahead_step; byte += 64)
            __builtin_prefetch(ahead + byte, 0, 2);
        _tile_loadd(6, panel, PANEL_STRIDE);
        _tile_loadd(7, panel + TILE_BYTES, PANEL_STRIDE);
        _tile_loadd(4, x, x_stride);
        Add::first();
        if constexpr (HALVES == 2) {
            _tile_loadd(5, x + TILE_ROWS * x_stride, x_stride);
            Add::second();
        }
    }
    _tile_stored(0, sums, SUMS_STRIDE);
    _tile_stored(1, sums + TILE_BYTES, SUMS_STRIDE);
    if constexpr (HALVES == 2) {
        _tile_stored(2, sums + TILE_ROWS * SUMS_STRIDE, SUMS_STRIDE);
        _tile_stored(3, sums + TILE_ROWS * SUMS_STRIDE + TILE_BYTES, SUMS_STRIDE);
    }
}

struct AddBytes {  // x signed, weights unsigned
    static void first() {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    static void second() {
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
};

struct AddBfloats {
    static void first() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    static void second() {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};
#endif
