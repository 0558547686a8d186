// Products x Wᵀ on a CPU, with a W that is packed in the order in which it is used. Linear layers and prefills need them.
//
// With one token every weight is used once, so the time is that of reading W. With many tokens every weight is used
// many times, so the time is that of multiplying. Both want the weights in the order in which they are used.
// Therefore W [outputs, inputs] is cut into *panels* of PANEL outputs, and a panel lies in memory column by column:
//
//     W, PANEL = 4     panel 0 (outputs 0-3)              panel 1 (outputs 4-5, padded)
//     a0 a1 a2         a0 b0 c0 d0  a1 b1 c1 d1  …        e0 f0 0 0  e1 f1 0 0  …
//     b0 b1 b2
//     …
//     f0 f1 f2
//
// A column is a few vectors. A vector times one number of x adds to LANES outputs together. Some processors multiply
// pairs of bfloat16: there two columns lie interleaved, a0 a1 b0 b1 …, and x stays in bfloat16. Elsewhere x becomes
// float32 first.

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

// sum += vector · x, for the LANES outputs of a vector.
template <class T> inline void multiply(Vec& sum, const T* vector, const float* x) { sum += load(vector) * *x; }
#ifdef __AVX512BF16__
inline void multiply(Vec& sum, const BFloat16* pairs, const BFloat16* x) {
    Bits bits;
    std::memcpy(&bits, pairs, sizeof bits);
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)bits, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

constexpr int VECTORS = 4;  // of LANES outputs, in a column
constexpr int PANEL = VECTORS * LANES;
// A tile: TILE_TOKENS tokens, or fewer, by one panel. Its sums stay in registers, of which four or more are left for
// vectors and numbers of x.
constexpr int TILE_TOKENS = REGISTERS == 32 ? 6 : 3;
// The first tile reads a panel from memory. It asks for what it needs so many bytes later, because the processor itself
// looks ahead only to the end of a page.
constexpr int64_t AHEAD = 4096;
// While later tiles multiply, memory would be idle. Tile 1 then asks for the first quarter of the next panel, tile 2 for
// the second one, and so on. This pays off where tiles are small and weights large.
template <class T> constexpr bool READS_NEXT = REGISTERS == 16 && sizeof(T) == 4;

// Numbers in a panel of so many columns.
template <class T> constexpr int64_t panel_size(int64_t columns) {
    return (columns + COLUMNS<T> - 1) / COLUMNS<T> * COLUMNS<T> * PANEL;
}

// y [num_tokens, outputs] = x [num_tokens, inputs] Wᵀ + b. A panel begins `panel_size` numbers after the one before it.
template <class T, class Y> struct Product {
    const Factor<T>* x;
    const T *packed, *bias;
    Y* y;
    int64_t num_tokens, inputs, outputs, panel_size;
};

// NUM vectors of a panel, from `first_vector` of all vectors of W on.
template <int TOKENS, int NUM, class T, class Y>
void tile_kernel(const Product<T, Y>& product, int64_t first_token, int64_t first_vector) {
    constexpr int VECTOR = COLUMNS<T> * LANES;  // numbers that are multiplied together
    const int64_t inputs = product.inputs, outputs = product.outputs;
    const Factor<T>* x = product.x + first_token * inputs;
    const T* panel = product.packed + first_vector / VECTORS * product.panel_size;
    const T* column = panel + first_vector % VECTORS * VECTOR;
    const int64_t tile = first_token / TOKENS;
    const bool reads_next = READS_NEXT<T> && tile >= 1 && tile <= VECTORS;
    const T* next = panel + product.panel_size + (tile - 1) * product.panel_size / VECTORS;
    Y* y = product.y + first_token * outputs + first_vector * LANES;
    // The processor reads a line of memory before it changes it, so the tile asks for the lines of y now.
    for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < NUM; v++) __builtin_prefetch(y + t * outputs + v * LANES, 1);
    Vec sums[TOKENS][NUM] = {};
    int64_t i = 0;
    for (; i + COLUMNS<T> <= inputs; i += COLUMNS<T>, column += VECTORS * VECTOR) {
        if (reads_next) __builtin_prefetch(next + i * LANES, 0, 2);
        for (int v = 0; v < NUM; v++) {
            const T* vector = column + v * VECTOR;
            if (first_token == 0) __builtin_prefetch((const char*)vector + AHEAD);
            for (int t = 0; t < TOKENS; t++) multiply(sums[t][v], vector, x + t * inputs + i);
        }
    }
    if (i < inputs)  // an odd number of columns: the second one of the last pair is 0
        for (int t = 0; t < TOKENS; t++) {
            const Factor<T> last[COLUMNS<T>] = {x[t * inputs + i]};
            for (int v = 0; v < NUM; v++) multiply(sums[t][v], column + v * VECTOR, last);
        }
    for (int v = 0; v < NUM; v++) {
        const int64_t output = (first_vector + v) * LANES, n = outputs - output;
        const Vec bias = product.bias ? load(product.bias + output, n) : Vec{};
        for (int t = 0; t < TOKENS; t++) store(y + t * outputs + v * LANES, sums[t][v] + bias, n);
    }
}

// All tokens from `token` on. Five tokens, TILE_TOKENS = 3: a tile of 3, and one of 2.
template <int TOKENS, int NUM, class T, class Y>
void vectors_kernel(const Product<T, Y>& product, int64_t token, int64_t vector) {
    for (; token + TOKENS <= product.num_tokens; token += TOKENS) tile_kernel<TOKENS, NUM>(product, token, vector);
    if constexpr (TOKENS > 1) vectors_kernel<TOKENS - 1, NUM>(product, token, vector);
}

// All tokens of the panel of this output; if it is not full, vector by vector.
template <class T, class Y> void multiply_panel(const Product<T, Y>& product, int64_t output) {
    if (output + PANEL <= product.outputs) return vectors_kernel<TILE_TOKENS, VECTORS>(product, 0, output / LANES);
    for (; output < product.outputs; output += LANES) vectors_kernel<TILE_TOKENS, 1>(product, 0, output / LANES);
}

// The whole product, on one thread.
template <class T, class Y> void multiply_all(const Product<T, Y>& product) {
    for (int64_t output = 0; output < product.outputs; output += PANEL) multiply_panel(product, output);
}
