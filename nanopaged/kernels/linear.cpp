// Linear layers on a CPU: y = x Wᵀ + b, with a W that is packed once, when the model is loaded (`panels.h`).

#include <vector>

#include "panels.h"

// More tokens than these are multiplied block by block, so that the x of a block stays in the caches while all panels
// pass.
constexpr int64_t BLOCK_TOKENS = 480;

template <class T> void multiply_block(const Product<T, T>& block) {
#pragma omp parallel for if (block.inputs * block.outputs > MIN_WORK)
    for (int64_t output = 0; output < block.outputs; output += PANEL) multiply_panel(block, output);
}

template <class T> void launch_linear(const T* x, Product<T, T> product) {
    std::vector<float> floats;
    if constexpr (std::is_same<Factor<T>, T>::value) product.x = x;
    else {
        const int64_t size = product.num_tokens * product.inputs;
        floats.resize(size);
        for (int64_t i = 0; i < size; i += LANES) store(floats.data() + i, load(x + i, size - i), size - i);
        product.x = floats.data();
    }
    for (int64_t token = 0; token < product.num_tokens; token += BLOCK_TOKENS) {
        Product<T, T> block = product;
        block.x += token * product.inputs;
        block.y += token * product.outputs;
        block.num_tokens = std::min(BLOCK_TOKENS, product.num_tokens - token);
        multiply_block(block);
    }
}

// ── launching the kernel ───────────────────────────────────────────────────────────────────────────

extern "C" int panel_outputs() { return PANEL; }

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
        launch_linear<T>((const T*)x, {
            nullptr, (const T*)packed, (const T*)bias, (T*)y, num_tokens, inputs, outputs, panel_size<T>(inputs)
        });
    });
}
