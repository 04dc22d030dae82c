// y = x Wᵀ + b with 8-bit weights under one scale for each row of W; x is rounded to 8 bits under one scale a row.
//
//     W [out][scale: float32 | in bytes]  ->  panels [out / PANEL] of  [in / 4][PANEL][4 bytes] [scales: PANEL float32]
//
// All sums are integers and so exact in any order: the bits are the same with or without AMX, in any batch and on any
// number of threads. 32 bits are enough for 65536 columns.
#include <omp.h>
#include <optional>
#include "gemm_bytes.hpp"
#include "gemm_rounding.hpp"
#include "gemm_tiles.hpp"

namespace {

constexpr int64_t WIDTH = 64;  // columns are padded with zeros to a multiple of it
constexpr int64_t ROW_BLOCK = 128;
constexpr int64_t TILED_ROWS = 8;  // AMX is faster from here on

struct Rows {
    std::vector<int8_t> numbers;  // [rows, whole][depth]
    std::vector<float> scales;
    std::vector<int32_t> sums;
};

// y = (products) * both scales + b, for one row and one panel.
inline void finish(const Ints* products, float x_scale, const float* scales, const float* bias, float* answer) {
    for (int half = 0; half < 2; half++) {
        Floats scale = times(load(scales + half * LANES), all(x_scale));
        store(answer + half * LANES, fused(to_floats(products[half]), scale, load(bias + half * LANES)));
    }
}

template <int ROWS>
void multiply(const Rows& x, int64_t row, int64_t depth, const char* panel, const char* ahead, int64_t ahead_step,
              const float* bias, float* answers) {
    const int8_t* numbers = x.numbers.data() + row * depth;
    Ints sums[ROWS][2];
    for (int each = 0; each < ROWS; each++) sums[each][0] = sums[each][1] = all_ints(-BYTE_ZERO * x.sums[row + each]);
    for (int64_t k = 0; k < depth; k += 4, panel += 4 * PANEL) {
        for (int64_t byte = k / 4 * ahead_step & -64; byte < (k / 4 + 1) * ahead_step; byte += 64)
            __builtin_prefetch(ahead + byte, 0, 2);
        Ints left = load_ints(panel), right = load_ints(panel + 4 * LANES);
#pragma GCC unroll 8
        for (int each = 0; each < ROWS; each++) {
            sums[each][0] = add_products<false>(sums[each][0], left, numbers + each * depth + k);
            sums[each][1] = add_products<false>(sums[each][1], right, numbers + each * depth + k);
        }
    }
    auto scales = reinterpret_cast<const float*>(panel);
    for (int each = 0; each < ROWS; each++)
        finish(sums[each], x.scales[row + each], scales, bias, answers + each * PANEL);
}

template <int ROWS = INT_ROW_TILE>
void multiply_some(int64_t rows, const Rows& x, int64_t row, int64_t depth, const char* panel, const char* ahead,
                   int64_t ahead_step, const float* bias, float* answers) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_some<ROWS - 1>(rows, x, row, depth, panel, ahead, ahead_step, bias, answers);
    multiply<ROWS>(x, row, depth, panel, ahead, ahead_step, bias, answers);
}

#ifdef DIPTYCH_TILES
void multiply_tiled(int64_t rows, const Rows& x, int64_t row, int64_t depth, const char* panel, const char* ahead,
                    int64_t ahead_step, const float* bias, float* answers) {
    alignas(64) int32_t sums[2 * TILE_ROWS][PANEL];
    auto numbers = reinterpret_cast<const char*>(x.numbers.data() + row * depth);
    auto product = rows > TILE_ROWS ? tile_product<2, AddBytes> : tile_product<1, AddBytes>;
    product(numbers, depth, panel, depth / WIDTH, ahead, ahead_step, reinterpret_cast<char*>(sums), false);
    auto scales = reinterpret_cast<const float*>(panel + depth * PANEL);
    for (int64_t each = 0; each < rows; each++) {
        Ints offset = all_ints(-BYTE_ZERO * x.sums[row + each]);
        Ints products[2];
        for (int half = 0; half < 2; half++)
            products[half] = _mm512_add_epi32(offset, load_ints(reinterpret_cast<char*>(sums[each] + half * LANES)));
        finish(products, x.scales[row + each], scales, bias, answers + each * PANEL);
    }
}
#endif

}  // namespace

extern "C" {

void diptych_pack_int8(const char* weight, char* panels, int64_t out, int64_t in) {
    int64_t depth = (in + WIDTH - 1) / WIDTH * WIDTH, num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; panel++) {
        char* target = panels + panel * (depth + 4) * PANEL;
        std::memset(target, 0, (depth + 4) * PANEL);
        for (int64_t column = 0; column < std::min<int64_t>(PANEL, out - panel * PANEL); column++) {
            const char* row = weight + (panel * PANEL + column) * (in + 4);
            std::memcpy(target + depth * PANEL + 4 * column, row, 4);
            for (int64_t k = 0; k < in; k++)
                target[(k / 4 * PANEL + column) * 4 + k % 4] = char(uint8_t(row[4 + k]) + BYTE_ZERO);
        }
    }
}

void diptych_linear_int8(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in,
                         int64_t out, int64_t threads) {
    int64_t depth = (in + WIDTH - 1) / WIDTH * WIDTH, panel_bytes = (depth + 4) * PANEL;
    int64_t num_panels = (out + PANEL - 1) / PANEL, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t units = num_panels * row_blocks, tile_rows = INT_ROW_TILE;
    auto product = multiply_some<>;
    [[maybe_unused]] bool tiled = false;
#ifdef DIPTYCH_TILES
    if (rows >= TILED_ROWS && tiles_granted()) tiled = true, tile_rows = 2 * TILE_ROWS, product = multiply_tiled;
#endif
    static thread_local Rows kept;
    Rows& numbers = kept;  // the calling thread's, shared with its team
    if (numbers.scales.size() < size_t(rows)) numbers.scales.resize(rows), numbers.sums.resize(rows);
    size_t wanted = (rows + 31) * depth;  // tiles read whole rows beyond the last one
    if (numbers.numbers.size() < wanted) numbers.numbers.resize(wanted);
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(threads, units)))
    {
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            quantize(x + row * in, in, depth, numbers.numbers.data() + row * depth, numbers.scales[row],
                     numbers.sums[row]);
#ifdef DIPTYCH_TILES
        std::optional<Tiles> tiles_of_thread;
        if (tiled) tiles_of_thread.emplace();
#endif
        int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t unit = thread * units / team; unit < (thread + 1) * units / team; unit++) {
            int64_t panel = unit % num_panels, block = unit / num_panels;
            int64_t row = block * rows / row_blocks, count = (block + 1) * rows / row_blocks - row;
            int64_t tiles = (count + tile_rows - 1) / tile_rows;
            int64_t columns = std::min<int64_t>(PANEL, out - panel * PANEL);
            const char* start = panels + panel * panel_bytes;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t from = tile * count / tiles, many = (tile + 1) * count / tiles - from;
                alignas(64) float answers[32][PANEL];
                int64_t share = panel_bytes / tiles;
                product(many, numbers, row + from, depth, start, start + panel_bytes + tile * share,
                        share / (depth / (tiled ? WIDTH : 4)), bias + panel * PANEL, answers[0]);
                for (int64_t each = 0; each < many; each++)
                    std::memcpy(y + (row + from + each) * out + panel * PANEL, answers[each], columns * sizeof(float));
            }
        }
    }
}
}
