// Linear layers on a CPU: y = x Wᵀ + b, with a W that is packed once, when the model is loaded.
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

#include <type_traits>
#include <vector>

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

template <class T> struct Layer {
    const Factor<T>* x;
    const T *packed, *bias;
    T* y;
    int64_t num_tokens, inputs, outputs;

    int64_t panel_size() const { return (inputs + COLUMNS<T> - 1) / COLUMNS<T> * COLUMNS<T> * LANES; }
};

template <int TOKENS, int PANELS, class T> void tile_kernel(const Layer<T>& layer, int64_t first_token, int64_t first_panel) {
    const int64_t inputs = layer.inputs, outputs = layer.outputs, panel_size = layer.panel_size();
    const Factor<T>* x = layer.x + first_token * inputs;
    const T* column = layer.packed + first_panel * panel_size;
    Vec sums[TOKENS][PANELS] = {};
    int64_t i = 0;
    for (; i + COLUMNS<T> <= inputs; i += COLUMNS<T>, column += COLUMNS<T> * LANES)
        for (int p = 0; p < PANELS; p++)
            for (int t = 0; t < TOKENS; t++) multiply(sums[t][p], column + p * panel_size, x + t * inputs + i);
    if (i < inputs)  // an odd number of columns: the second one of the last pair is 0
        for (int t = 0; t < TOKENS; t++) {
            const Factor<T> last[COLUMNS<T>] = {x[t * inputs + i]};
            for (int p = 0; p < PANELS; p++) multiply(sums[t][p], column + p * panel_size, last);
        }
    for (int p = 0; p < PANELS; p++) {
        const int64_t output = (first_panel + p) * LANES, n = outputs - output;
        const Vec bias = layer.bias ? load(layer.bias + output, n) : Vec{};
        for (int t = 0; t < TOKENS; t++) store(layer.y + (first_token + t) * outputs + output, sums[t][p] + bias, n);
    }
}

// All tokens from `token` on. Five tokens, TILE_TOKENS = 3: a tile of 3, and one of 2.
template <int TOKENS, int PANELS, class T> void panels_kernel(const Layer<T>& layer, int64_t token, int64_t panel) {
    for (; token + TOKENS <= layer.num_tokens; token += TOKENS) tile_kernel<TOKENS, PANELS>(layer, token, panel);
    if constexpr (TOKENS > 1) panels_kernel<TOKENS - 1, PANELS>(layer, token, panel);
}

template <class T> void launch_linear(const T* x, Layer<T> layer) {
    std::vector<float> floats;
    if constexpr (std::is_same<Factor<T>, T>::value) layer.x = x;
    else {
        const int64_t size = layer.num_tokens * layer.inputs;
        floats.resize(size);
        for (int64_t i = 0; i < size; i += LANES) store(floats.data() + i, load(x + i, size - i), size - i);
        layer.x = floats.data();
    }
    const int64_t num_panels = (layer.outputs + LANES - 1) / LANES;
    // With one token, memory is the limit: it is read at twice as many places together.
    const int64_t num = layer.num_tokens == 1 ? 2 * TILE_PANELS : TILE_PANELS;
#pragma omp parallel for if (layer.inputs * layer.outputs > MIN_WORK)
    for (int64_t panel = 0; panel < num_panels; panel += num) {
        if (panel + num > num_panels)
            for (int64_t last = panel; last < num_panels; last++) panels_kernel<TILE_TOKENS, 1>(layer, 0, last);
        else if (layer.num_tokens == 1) panels_kernel<1, 2 * TILE_PANELS>(layer, 0, panel);
        else panels_kernel<TILE_TOKENS, TILE_PANELS>(layer, 0, panel);
    }
}

// ── launching the kernel ───────────────────────────────────────────────────────────────────────────

extern "C" int num_lanes() { return LANES; }

extern "C" int num_columns(int dtype) { return dtype == 1 ? COLUMNS<BFloat16> : 1; }

extern "C" int linear(
    const void* x, const void* packed, const void* bias, void* y, int64_t num_tokens, int64_t inputs, int64_t outputs,
    int dtype
) {
#ifdef __AMX_BF16__  // PyTorch multiplies bfloat16 with this unit of the processor, which this kernel does not use
    if (dtype == 1) return 0;
#endif
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const Layer<T> layer = {nullptr, (const T*)packed, (const T*)bias, (T*)y, num_tokens, inputs, outputs};
        launch_linear((const T*)x, layer);
    });
}
