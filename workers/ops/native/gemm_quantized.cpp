// y = x Wᵀ + b with weights that stay quantized: the blocks of GGUF files.
//
// x is quantized too: 8 bits and one scale per 32 numbers, so products are integers. W [out, in] becomes panels of PANEL
// rows, ordered by use, block by block of 32 columns:
//
//     [header: each row's scales, 16 bit]            once per GROUP blocks
//     [sub-scales, 8 bit]                            q4_k only
//     [4 or 8][PANEL][4 bytes]                       numbers 4i .. 4i+3 of each row; upper nibbles: 16 further
//
// The sum over a block is exact; the blocks are added in one chain that starts from b. So the bits of y[i, o] do not
// depend on the other rows of x, the position of the row, or the number of threads.
#include <omp.h>
#include "gemm_bytes.hpp"
#include "gemm_rounding.hpp"

namespace {

constexpr int64_t BLOCK = 32;
constexpr int64_t ROW_BLOCK = 120;

void put_half(char* panel, int64_t column, const char* from) { std::memcpy(panel + 2 * column, from, 2); }

// Store number i of a block; `number` is in the stored form.
void put_byte(char* quants, int64_t column, int64_t i, uint8_t number) {
    quants[(i / 4 * PANEL + column) * 4 + i % 4] = number;
}
void put_nibble(char* quants, int64_t column, int64_t i, uint8_t number) {
    quants[(i % 16 / 4 * PANEL + column) * 4 + i % 4] |= i < 16 ? number : number << 4;
}

// A format defines its blocks in a file and in a panel. A weight is scale * (number - ZERO) + offset.

struct Q8_0 {
    static constexpr bool NIBBLES = false, OFFSETS = false;
    static constexpr int GROUP = 1, ZERO = BYTE_ZERO, HEADER = 2 * PANEL, SUB = 0, FILE_BYTES = 34;
    static Floats scale(const char* header, const char*, int half) { return halves(header + 2 * LANES * half); }
    static Floats offset(const char*, const char*, int) { return zeros(); }
    static void pack(const char* file, char* panel, int64_t column) {
        put_half(panel, column, file);
        for (int i = 0; i < 32; i++) put_byte(panel + HEADER, column, i, uint8_t(file[2 + i] + BYTE_ZERO));
    }
};

struct Q4_0 {
    static constexpr bool NIBBLES = true, OFFSETS = false;
    static constexpr int GROUP = 1, ZERO = 8, HEADER = 2 * PANEL, SUB = 0, FILE_BYTES = 18;
    static Floats scale(const char* header, const char*, int half) { return halves(header + 2 * LANES * half); }
    static Floats offset(const char*, const char*, int) { return zeros(); }
    static void pack(const char* file, char* panel, int64_t column) {
        put_half(panel, column, file);
        for (int i = 0; i < 32; i++) put_nibble(panel + HEADER, column, i, uint8_t(file[2 + i % 16]) >> i / 16 * 4 & 15);
    }
};

struct Q4_1 {
    static constexpr bool NIBBLES = true, OFFSETS = true;
    static constexpr int GROUP = 1, ZERO = 0, HEADER = 4 * PANEL, SUB = 0, FILE_BYTES = 20;
    static Floats scale(const char* header, const char*, int half) { return halves(header + 2 * LANES * half); }
    static Floats offset(const char* header, const char*, int half) {
        return halves(header + 2 * PANEL + 2 * LANES * half);
    }
    static void pack(const char* file, char* panel, int64_t column) {
        put_half(panel, column, file);
        put_half(panel + 2 * PANEL, column, file + 2);
        for (int i = 0; i < 32; i++) put_nibble(panel + HEADER, column, i, uint8_t(file[4 + i % 16]) >> i / 16 * 4 & 15);
    }
};

// 256 numbers: two 16-bit scales, then for each 32 numbers a 6-bit scale and a 6-bit minimum in 12 bytes.
struct Q4_K {
    static constexpr bool NIBBLES = true, OFFSETS = true;
    static constexpr int GROUP = 8, ZERO = 0, HEADER = 4 * PANEL, SUB = 2 * PANEL, FILE_BYTES = 144;
    static Floats scale(const char* header, const char* sub, int half) {
        return times(halves(header + 2 * LANES * half), bytes(sub + LANES * half));
    }
    static Floats offset(const char* header, const char* sub, int half) {
        Floats step = times(halves(header + 2 * PANEL + 2 * LANES * half), all(-1.0f));
        return times(step, bytes(sub + PANEL + LANES * half));
    }
    static void pack(const char* file, char* panel, int64_t column) {
        put_half(panel, column, file);
        put_half(panel + 2 * PANEL, column, file + 2);
        auto scales = reinterpret_cast<const uint8_t*>(file + 4);
        auto numbers = reinterpret_cast<const uint8_t*>(file + 16);
        for (int block = 0; block < 8; block++) {
            char* sub = panel + HEADER + block * (SUB + 16 * PANEL);
            int four = block % 4;
            sub[column] = block < 4 ? scales[four] & 63 : (scales[8 + four] & 15) | (scales[four] >> 6 << 4);
            sub[PANEL + column] = block < 4 ? scales[4 + four] & 63 : (scales[8 + four] >> 4) | (scales[4 + four] >> 6 << 4);
            for (int i = 0; i < 32; i++)
                put_nibble(sub + SUB, column, i, numbers[block / 2 * 32 + i] >> block % 2 * 4 & 15);
        }
    }
};

template <class Format>
constexpr int64_t QUANT_BYTES = (Format::NIBBLES ? 16 : 32) * PANEL;
template <class Format>
constexpr int64_t GROUP_BYTES = Format::HEADER + Format::GROUP * (Format::SUB + QUANT_BYTES<Format>);

// Rows of x, quantized.
struct Quantized {
    std::vector<int8_t> numbers;  // [rows][blocks][BLOCK], zeros after the last column
    std::vector<float> scales;    // [rows][blocks]
    std::vector<int32_t> sums;    // [rows][blocks] of the numbers

    void resize(int64_t rows, int64_t blocks) {
        if (numbers.size() < size_t(rows * blocks * BLOCK)) numbers.resize(rows * blocks * BLOCK);
        if (scales.size() < size_t(rows * blocks)) scales.resize(rows * blocks), sums.resize(rows * blocks);
    }
};

template <class Format, int ROWS>
void multiply(const Quantized& x, int64_t first_row, int64_t blocks, const char* panel, const char* ahead,
              int64_t ahead_bytes, const float* bias, float* tile) {
    constexpr bool NIBBLES = Format::NIBBLES;
    constexpr int STEPS = NIBBLES ? 4 : 8;
    const int8_t* numbers = x.numbers.data() + first_row * blocks * BLOCK;
    const float* scales = x.scales.data() + first_row * blocks;
    const int32_t* x_sums = x.sums.data() + first_row * blocks;
    int64_t ahead_step = ahead_bytes / blocks;
    Floats sums[ROWS][2];
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) sums[row][half] = load(bias + half * LANES);
    for (int64_t group = 0; group < blocks; group += Format::GROUP) {
        const char* header = panel;
        panel += Format::HEADER;
        for (int64_t block = group; block < group + Format::GROUP; block++) {
            const char* sub = panel;
            panel += Format::SUB;
            for (int64_t byte = block * ahead_step & -64; byte < (block + 1) * ahead_step; byte += 64)
                __builtin_prefetch(ahead + byte, 0, 2);
            Ints products[ROWS][2];
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++)
                products[row][0] = products[row][1] = all_ints(-Format::ZERO * x_sums[row * blocks + block]);
#pragma GCC unroll 8
            for (int step = 0; step < STEPS; step++, panel += 4 * PANEL) {
                Ints left = load_ints(panel), right = load_ints(panel + 4 * LANES);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++) {
                    const int8_t* four = numbers + (row * blocks + block) * BLOCK + 4 * step;
                    Ints(&sum)[2] = products[row];
                    if constexpr (NIBBLES) {
                        sum[0] = add_products<true>(sum[0], lower_nibbles(left), four);
                        sum[1] = add_products<true>(sum[1], lower_nibbles(right), four);
                        sum[0] = add_products<true>(sum[0], upper_nibbles(left), four + 16);
                        sum[1] = add_products<true>(sum[1], upper_nibbles(right), four + 16);
                    } else {
                        sum[0] = add_products<false>(sum[0], left, four);
                        sum[1] = add_products<false>(sum[1], right, four);
                    }
                }
            }
            for (int half = 0; half < 2; half++) {
                Floats scale = Format::scale(header, sub, half), offset = Format::offset(header, sub, half);
#pragma GCC unroll 8
                for (int row = 0; row < ROWS; row++) {
                    float x_scale = scales[row * blocks + block];
                    Floats step = times(scale, all(x_scale));
                    sums[row][half] = fused(to_floats(products[row][half]), step, sums[row][half]);
                    if constexpr (Format::OFFSETS) {
                        Floats total = all(x_scale * float(x_sums[row * blocks + block]));
                        sums[row][half] = fused(offset, total, sums[row][half]);
                    }
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) store(tile + row * PANEL + half * LANES, sums[row][half]);
}

template <class Format, int ROWS = INT_ROW_TILE>
void multiply_some(int64_t rows, const Quantized& x, int64_t first_row, int64_t blocks, const char* panel,
                   const char* ahead, int64_t ahead_bytes, const float* bias, float* tile) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_some<Format, ROWS - 1>(rows, x, first_row, blocks, panel, ahead, ahead_bytes, bias, tile);
    multiply<Format, ROWS>(x, first_row, blocks, panel, ahead, ahead_bytes, bias, tile);
}

template <class Format>
void linear(const float* x, const char* panels, const float* bias, float* y, int64_t rows, int64_t in, int64_t out,
            int64_t threads) {
    constexpr int64_t WIDTH = BLOCK * Format::GROUP;
    int64_t groups = (in + WIDTH - 1) / WIDTH, blocks = groups * Format::GROUP;
    int64_t panel_bytes = groups * GROUP_BYTES<Format>;
    int64_t num_panels = (out + PANEL - 1) / PANEL, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t units = num_panels * row_blocks;
    static thread_local Quantized quantized;
    Quantized& numbers = quantized;  // the calling thread's, shared with its team
    numbers.resize(rows, blocks);
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(threads, units)))
    {
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t at = row * blocks + block, count = std::clamp<int64_t>(in - block * BLOCK, 0, BLOCK);
                quantize(x + row * in + block * BLOCK, count, BLOCK, numbers.numbers.data() + at * BLOCK,
                         numbers.scales[at], numbers.sums[at]);
            }
        int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t unit = thread * units / team; unit < (thread + 1) * units / team; unit++) {
            int64_t panel = unit % num_panels, row_block = unit / num_panels;
            int64_t row = row_block * rows / row_blocks, count = (row_block + 1) * rows / row_blocks - row;
            int64_t tiles = (count + INT_ROW_TILE - 1) / INT_ROW_TILE;
            int64_t columns = std::min<int64_t>(PANEL, out - panel * PANEL);
            const char* start = panels + panel * panel_bytes;
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t from = tile * count / tiles, many = (tile + 1) * count / tiles - from;
                alignas(64) float answers[INT_ROW_TILE][PANEL];
                multiply_some<Format>(many, numbers, row + from, blocks, start,
                                      start + panel_bytes + tile * panel_bytes / tiles, panel_bytes / tiles,
                                      bias + panel * PANEL, answers[0]);
                for (int64_t each = 0; each < many; each++)
                    std::memcpy(y + (row + from + each) * out + panel * PANEL, answers[each], columns * sizeof(float));
            }
        }
    }
}

template <class Format>
void pack(const char* file, char* panels, int64_t out, int64_t in) {
    constexpr int64_t WIDTH = BLOCK * Format::GROUP;
    int64_t groups = (in + WIDTH - 1) / WIDTH, num_panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t group = 0; group < groups; group++) {
            char* target = panels + (panel * groups + group) * GROUP_BYTES<Format>;
            std::memset(target, 0, GROUP_BYTES<Format>);
            for (int64_t column = 0; column < std::min<int64_t>(PANEL, out - panel * PANEL); column++) {
                int64_t row = panel * PANEL + column;
                Format::pack(file + (row * groups + group) * Format::FILE_BYTES, target, column);
            }
        }
}

}  // namespace

#define DIPTYCH_FORMAT(name, Format)                                                                                 \
    extern "C" void diptych_pack_##name(const char* file, char* panels, int64_t out, int64_t in) {                   \
        pack<Format>(file, panels, out, in);                                                                         \
    }                                                                                                                \
    extern "C" void diptych_linear_##name(const float* x, const char* panels, const float* bias, float* y,           \
                                          int64_t rows, int64_t in, int64_t out, int64_t threads) {                  \
        linear<Format>(x, panels, bias, y, rows, in, out, threads);                                                  \
    }

DIPTYCH_FORMAT(q8_0, Q8_0)
DIPTYCH_FORMAT(q4_0, Q4_0)
DIPTYCH_FORMAT(q4_1, Q4_1)
DIPTYCH_FORMAT(q4_k, Q4_K)
