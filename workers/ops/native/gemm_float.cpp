// y = x Wᵀ + b with packed float32 or bfloat16 weights.
//
//     W [out, in]  ->  panels [out / PANEL][in / 2][2][PANEL], zeros after the last row and column of W;
//                      in bfloat16 the two numbers of a pair share 32 bits, the first in the lower half
//
// Each y[i, o] is one chain of fused multiply-adds over k = 0, 1, 2, ... that starts from b[o]: its bits do not depend
// on the other rows of x, the position of the row, or the number of threads. Between blocks over k the sum is stored in
// memory, which does not round it.
//
// `linear_bfloat16_tiled` is not deterministic: it computes many rows on AMX with x as a sum of two bfloat16, with a
// relative error below 2^-16.
#include <omp.h>
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#include "gemm_lanes.hpp"
#include "gemm_tiles.hpp"

namespace {

constexpr int64_t DEPTH = 64;  // of a block over k: its part of a panel stays in the L1 cache for all rows
constexpr int64_t ROW_BLOCK = 8 * ROW_TILE;  // their x stays in the L2 cache for all panels

struct Columns {
    Floats left, right;
};

struct Float32 {
    using Number = float;
    static constexpr int WIDTH = 2, PAIR_BYTES = 8 * PANEL;
    static Columns first(const char* pair) { return at(pair); }
    static Columns second(const char* pair) { return at(pair + 4 * PANEL); }
    static Columns at(const char* row) {
        auto numbers = reinterpret_cast<const float*>(row);
        return {load(numbers), load(numbers + LANES)};
    }
};

struct Bfloat16 {
    using Number = uint16_t;
    static constexpr int WIDTH = 32, PAIR_BYTES = 4 * PANEL;
    static Columns first(const char* pair) { return {lower_bfloats(pair), lower_bfloats(pair + 4 * LANES)}; }
    static Columns second(const char* pair) { return {upper_bfloats(pair), upper_bfloats(pair + 4 * LANES)}; }
};

template <class Weights>
constexpr int64_t pairs_of(int64_t in) {  // in a panel, padded to the width of a tile's row
    return (in + Weights::WIDTH - 1) / Weights::WIDTH * Weights::WIDTH / 2;
}

template <int ROWS>
inline void advance(Floats (&sums)[ROWS][2], const float* x, int64_t x_stride, Columns columns) {
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) {
        Floats factor = all(x[row * x_stride]);
        sums[row][0] = fused(factor, columns.left, sums[row][0]);
        sums[row][1] = fused(factor, columns.right, sums[row][1]);
    }
}

// ROWS rows of x times one block of a panel, onto tile [ROWS, PANEL]. Prefetches the bytes from `ahead`.
template <class Weights, int ROWS>
void multiply(const float* x, int64_t x_stride, const char* panel, int64_t depth, const char* ahead,
              int64_t ahead_bytes, float* tile) {
    Floats sums[ROWS][2];
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) sums[row][half] = load(tile + row * PANEL + half * LANES);
    for (int64_t k = 0; k + 1 < depth; k += 2, panel += Weights::PAIR_BYTES) {
        for (int64_t line = 0; line < ahead_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += ahead_bytes;
        advance(sums, x + k, x_stride, Weights::first(panel));
        advance(sums, x + k + 1, x_stride, Weights::second(panel));
    }
    if (depth % 2) advance(sums, x + depth - 1, x_stride, Weights::first(panel));
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) store(tile + row * PANEL + half * LANES, sums[row][half]);
}

template <class Weights, int ROWS = ROW_TILE>
void multiply_some(int64_t rows, const float* x, int64_t x_stride, const char* panel, int64_t depth, const char* ahead,
                   int64_t ahead_bytes, float* tile) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_some<Weights, ROWS - 1>(rows, x, x_stride, panel, depth, ahead, ahead_bytes, tile);
    multiply<Weights, ROWS>(x, x_stride, panel, depth, ahead, ahead_bytes, tile);
}

// One panel for up to ROW_BLOCK rows.
template <class Weights>
void panel_product(const float* x, const char* panel, const float* bias, float* y, int64_t rows, int64_t in,
                   int64_t out, int64_t columns) {
    alignas(64) float block[ROW_BLOCK][PANEL];
    for (int64_t row = 0; row < rows; row++) std::memcpy(block[row], bias, sizeof block[row]);
    int64_t tiles = (rows + ROW_TILE - 1) / ROW_TILE;
    for (int64_t k = 0; k < in; k += DEPTH) {
        int64_t depth = std::min(DEPTH, in - k);
        int64_t part_bytes = (depth + 1) / 2 * Weights::PAIR_BYTES;
        int64_t ahead_bytes = (Weights::PAIR_BYTES / tiles + 63) / 64 * 64;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t from = tile * rows / tiles, count = (tile + 1) * rows / tiles - from;
            int64_t share = std::min(tile * ahead_bytes * (depth / 2), part_bytes);
            multiply_some<Weights>(count, x + from * in + k, in, panel, depth, panel + part_bytes + share,
                                   tile * ahead_bytes < Weights::PAIR_BYTES ? ahead_bytes : 0, block[from]);
        }
        panel += part_bytes;
    }
    for (int64_t row = 0; row < rows; row++) std::memcpy(y + row * out, block[row], columns * sizeof(float));
}

template <class Weights>
void linear(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in, int64_t out,
            int64_t threads) {
    int64_t num_panels = (out + PANEL - 1) / PANEL, num_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t units = num_panels * num_blocks, panel_bytes = pairs_of<Weights>(in) * Weights::PAIR_BYTES;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(threads, units)))
    {
        int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t unit = thread * units / team; unit < (thread + 1) * units / team; unit++) {
            int64_t panel = unit % num_panels, block = unit / num_panels;
            int64_t row = block * rows / num_blocks, count = (block + 1) * rows / num_blocks - row;
            panel_product<Weights>(x + row * in, panels + panel * panel_bytes, bias + panel * PANEL,
                                   y + row * out + panel * PANEL, count, in, out,
                                   std::min<int64_t>(PANEL, out - panel * PANEL));
        }
    }
}

template <class Weights, class Round>
void pack(const float* weight, char* panels, int64_t out, int64_t in, Round round) {
    using Number = typename Weights::Number;
    int64_t num_panels = (out + PANEL - 1) / PANEL, pairs = pairs_of<Weights>(in);
    constexpr bool INTERLEAVED = sizeof(Number) == 2;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; panel++) {
        auto target = reinterpret_cast<Number*>(panels + panel * pairs * Weights::PAIR_BYTES);
        for (int64_t k = 0; k < 2 * pairs; k++)
            for (int64_t column = 0; column < PANEL; column++) {
                int64_t row = panel * PANEL + column;
                Number number = row < out && k < in ? round(weight[row * in + k]) : 0;
                target[INTERLEAVED ? (k / 2 * PANEL + column) * 2 + k % 2 : k * PANEL + column] = number;
            }
    }
}

uint16_t to_bfloat16(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;  // NaN stays NaN
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;                   // to nearest, ties to even
}

#ifdef DIPTYCH_TILES

constexpr int64_t TILED_ROWS = 16, TILED_ROW_BLOCK = 128;

float from_bfloat16(uint16_t number) {
    uint32_t bits = uint32_t(number) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

void linear_tiled(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in,
                  int64_t out, int64_t threads) {
    int64_t depth = 2 * pairs_of<Bfloat16>(in), panel_bytes = depth / 2 * Bfloat16::PAIR_BYTES;
    int64_t num_panels = (out + PANEL - 1) / PANEL, row_blocks = (rows + TILED_ROW_BLOCK - 1) / TILED_ROW_BLOCK;
    int64_t units = num_panels * row_blocks, room = (rows + 2 * TILE_ROWS) * depth;  // tiles read whole
    static thread_local std::vector<uint16_t> kept;
    if (kept.size() < size_t(2 * room)) kept.resize(2 * room);
    uint16_t* parts[2] = {kept.data(), kept.data() + room};
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(threads, units)))
    {
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < depth; k++) {
                float number = k < in ? x[row * in + k] : 0.0f;
                uint16_t most = to_bfloat16(number);
                parts[0][row * depth + k] = most;
                parts[1][row * depth + k] = to_bfloat16(number - from_bfloat16(most));
            }
        Tiles tiles_of_thread;
        int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t unit = thread * units / team; unit < (thread + 1) * units / team; unit++) {
            int64_t panel = unit % num_panels, block = unit / num_panels;
            int64_t first = block * rows / row_blocks, count = (block + 1) * rows / row_blocks - first;
            int64_t tiles = (count + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), steps = depth / 32;
            int64_t columns = std::min<int64_t>(PANEL, out - panel * PANEL);
            const char *start = panels + panel * panel_bytes, *ahead = start + panel_bytes;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t from = first + tile * count / tiles, many = first + (tile + 1) * count / tiles - from;
                int64_t share = panel_bytes / tiles / 2;
                alignas(64) float sums[2 * TILE_ROWS][PANEL];
                auto product = many > TILE_ROWS ? tile_product<2, AddBfloats> : tile_product<1, AddBfloats>;
                for (int part = 0; part < 2; part++)
                    product(reinterpret_cast<const char*>(parts[part] + from * depth), 2 * depth, start, steps,
                            ahead + (2 * tile + part) * share, share / steps, reinterpret_cast<char*>(sums), part > 0);
                for (int64_t row = 0; row < many; row++)
                    for (int64_t column = 0; column < columns; column++)
                        y[(from + row) * out + panel * PANEL + column] =
                            sums[row][column] + bias[panel * PANEL + column];
            }
        }
    }
}

#endif

}  // namespace

extern "C" {

void diptych_pack_float32(const float* weight, char* panels, int64_t out, int64_t in) {
    pack<Float32>(weight, panels, out, in, [](float number) { return number; });
}

void diptych_pack_bfloat16(const float* weight, char* panels, int64_t out, int64_t in) {
    pack<Bfloat16>(weight, panels, out, in, to_bfloat16);
}

void diptych_linear_float32(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in,
                            int64_t out, int64_t threads) {
    linear<Float32>(x, panels, bias, y, rows, in, out, threads);
}

void diptych_linear_bfloat16(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in,
                             int64_t out, int64_t threads) {
    linear<Bfloat16>(x, panels, bias, y, rows, in, out, threads);
}

void diptych_linear_bfloat16_tiled(const float* x, const char* panels, const float* bias, float* y, int64_t rows,
                                   int64_t in, int64_t out, int64_t threads) {
#ifdef DIPTYCH_TILES
    if (rows >= TILED_ROWS && tiles_granted()) return linear_tiled(x, panels, bias, y, rows, in, out, threads);
#endif
    linear<Bfloat16>(x, panels, bias, y, rows, in, out, threads);
}
}
