// Products x Wᵀ on a CPU, with a W that is packed in the order in which it is used. Linear layers and prefills need them.
//
// With one token every weight is used once, so the time is that of reading W. With many tokens every weight is used
// many times, so the time is that of multiplying. Both want the weights in the order in which they are used.
// Therefore W [outputs, inputs] is cut into *panels* of LANES outputs, and a panel lies in memory column by column:
//
//     W, LANES = 4     panel 0 (outputs 0-3)              panel 1 (outputs 4-5, padded)
//     a0 a1 a2         a0 b0 c0 d0  a1 b1 c1 d1  …        e0 f0 0 0  e1 f1 0 0  …
//     b0 b1 b2
//     …
//     f0 f1 f2
//
// A column times one number of x adds to LANES outputs together. Some processors multiply pairs of bfloat16: there two
// columns lie interleaved, a0 a1 b0 b1 …, and x stays in bfloat16. Elsewhere x becomes float32 first.

#pragma once
#include <type_traits>

#include "vectors.h"

#ifdef __AVX512BF16__
template <class T> constexpr bool HAS_PAIRS = std::is_same<T, BFloat16>::value;
#else
template <class T> constexpr bool HAS_PAIRS = false;
#endif
template <class T> constexpr int COLUMNS = HAS_PAIRS<T> ? 2 : 1;  // that lie interleaved
template <class T> using Factor = std::conditional_t<HAS_PAIRS<T>, T, float>;  // the type of x in a product

// sum += column · x, for the LANES outputs of a column.
template <class T> inline void multiply(Vec& sum, const T* column, const float* x) { sum += load(column) * *x; }
#ifdef __AVX512BF16__
inline void multiply(Vec& sum, const BFloat16* columns, const BFloat16* x) {
    Bits bits;
    std::memcpy(&bits, columns, sizeof bits);
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

// A tile: TILE_TOKENS tokens by TILE_PANELS panels, or fewer. Its sums stay in registers, of which four or more are left
// for columns and numbers of x.
constexpr int TILE_PANELS = 4;
constexpr int TILE_TOKENS = REGISTERS == 32 ? 6 : 3;
// The first tile reads a panel from memory. It asks for what it needs so many bytes later, because the processor itself
// looks ahead only to the end of a page.
constexpr int64_t AHEAD = 4096;
// While later tiles multiply, memory would be idle. Tile 1 then asks for the first of the next panels, tile 2 for the
// second one, and so on. This pays off where tiles are small and weights large.
template <class T> constexpr bool READS_NEXT = REGISTERS == 16 && sizeof(T) == 4;

// Numbers in a panel of so many columns.
template <class T> constexpr int64_t panel_size(int64_t columns) {
    return (columns + COLUMNS<T> - 1) / COLUMNS<T> * COLUMNS<T> * LANES;
}

// y [num_tokens, outputs] = x [num_tokens, inputs] Wᵀ + b. A panel begins `panel_size` numbers after the one before it.
template <class T, class Y> struct Product {
    const Factor<T>* x;
    const T *packed, *bias;
    Y* y;
    int64_t num_tokens, inputs, outputs, panel_size;
};

template <int TOKENS, int PANELS, class T, class Y>
void tile_kernel(const Product<T, Y>& product, int64_t first_token, int64_t first_panel) {
    const int64_t inputs = product.inputs, outputs = product.outputs, panel_size = product.panel_size;
    const Factor<T>* x = product.x + first_token * inputs;
    const T* column = product.packed + first_panel * panel_size;
    const int64_t tile = first_token / TOKENS;
    const bool reads_next = READS_NEXT<T> && tile >= 1 && tile <= PANELS;
    const T* next = column + (PANELS + tile - 1) * panel_size;
    Y* y = product.y + first_token * outputs + first_panel * LANES;
    // The processor reads a line of memory before it changes it, so the tile asks for the lines of y now.
    for (int t = 0; t < TOKENS; t++)
        for (int p = 0; p < PANELS; p++) __builtin_prefetch(y + t * outputs + p * LANES, 1);
    Vec sums[TOKENS][PANELS] = {};
    int64_t i = 0;
    for (; i + COLUMNS<T> <= inputs; i += COLUMNS<T>, column += COLUMNS<T> * LANES) {
        if (reads_next) __builtin_prefetch(next + i * LANES, 0, 2);
        for (int p = 0; p < PANELS; p++) {
            const T* part = column + p * panel_size;
            if (first_token == 0) __builtin_prefetch((const char*)part + AHEAD, 0, 2);
            for (int t = 0; t < TOKENS; t++) multiply(sums[t][p], part, x + t * inputs + i);
        }
    }
    if (i < inputs)  // an odd number of columns: the second one of the last pair is 0
        for (int t = 0; t < TOKENS; t++) {
            const Factor<T> last[COLUMNS<T>] = {x[t * inputs + i]};
            for (int p = 0; p < PANELS; p++) multiply(sums[t][p], column + p * panel_size, last);
        }
    for (int p = 0; p < PANELS; p++) {
        const int64_t output = (first_panel + p) * LANES, n = outputs - output;
        const Vec bias = product.bias ? load(product.bias + output, n) : Vec{};
        for (int t = 0; t < TOKENS; t++) store(y + t * outputs + p * LANES, sums[t][p] + bias, n);
    }
}

// All tokens from `token` on. Five tokens, TILE_TOKENS = 3: a tile of 3, and one of 2.
template <int TOKENS, int PANELS, class T, class Y>
void panels_kernel(const Product<T, Y>& product, int64_t token, int64_t panel) {
    for (; token + TOKENS <= product.num_tokens; token += TOKENS) tile_kernel<TOKENS, PANELS>(product, token, panel);
    if constexpr (TOKENS > 1) panels_kernel<TOKENS - 1, PANELS>(product, token, panel);
}

// All tokens of PANELS panels from `panel` on, or of the last ones, one by one, if there are fewer.
template <int TOKENS, int PANELS, class T, class Y> void multiply_panels(const Product<T, Y>& product, int64_t panel) {
    const int64_t num_panels = (product.outputs + LANES - 1) / LANES;
    if (panel + PANELS <= num_panels) return panels_kernel<TOKENS, PANELS>(product, 0, panel);
    for (; panel < num_panels; panel++) panels_kernel<TOKENS, 1>(product, 0, panel);
}

// The whole product, on one thread.
template <class T, class Y> void multiply_all(const Product<T, Y>& product) {
    for (int64_t panel = 0; panel * LANES < product.outputs; panel += TILE_PANELS)
        multiply_panels<TILE_TOKENS, TILE_PANELS>(product, panel);
}
