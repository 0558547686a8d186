// Vectors of floats as wide as the processor's registers, and numbers of 16 bits that are loaded and stored as such
// vectors.
//
// GCC and Clang know these types (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html). A vector wider than a
// register would work as well, but GCC 12 keeps it in memory, which is 3 to 30 times as slow.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
constexpr int ROUND_TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else  // SSE
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int CACHE_LINE = 64;         // bytes
constexpr int64_t MIN_WORK = 1 << 16;  // numbers below which waking a second thread costs more than it gains

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(LANES * 2)));

struct BFloat16 { uint16_t bits; };  // the upper half of a float32
#ifdef __aarch64__
typedef __fp16 Float16;
typedef Float16 Halves __attribute__((vector_size(LANES * 2)));
#else
struct Float16 { uint16_t bits; };
#endif

inline Vec all(float x) { return x - Vec{}; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline Vec load(const float* x) {
    Vec v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
inline void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }

// GCC 12 widens a vector of 16-bit numbers one by one, so the x86 processors' own instructions are written out.
inline Vec load(const BFloat16* x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16);
#else
    HalfBits half;
    std::memcpy(&half, x, sizeof half);
    return (Vec)(__builtin_convertvector(half, Bits) << 16);
#endif
}
inline void store(BFloat16* x, Vec v) {
    Bits bits = (Bits)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    HalfBits half = __builtin_convertvector(bits, HalfBits);
    std::memcpy(x, &half, sizeof half);
}

#if defined(__AVX512F__)
#define HAS_FLOAT16
inline Vec load(const Float16* x) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }
inline void store(Float16* x, Vec v) { _mm256_storeu_si256((__m256i*)x, _mm512_cvtps_ph((__m512)v, ROUND_TO_NEAREST)); }
#elif defined(__F16C__)
#define HAS_FLOAT16
inline Vec load(const Float16* x) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x)); }
inline void store(Float16* x, Vec v) { _mm_storeu_si128((__m128i*)x, _mm256_cvtps_ph((__m256)v, ROUND_TO_NEAREST)); }
#elif defined(__aarch64__)
#define HAS_FLOAT16
inline Vec load(const Float16* x) {
    Halves half;
    std::memcpy(&half, x, sizeof half);
    return __builtin_convertvector(half, Vec);
}
inline void store(Float16* x, Vec v) {
    Halves half = __builtin_convertvector(v, Halves);
    std::memcpy(x, &half, sizeof half);
}
#endif

// The first n lanes, for the end of a row whose size is not a multiple of LANES. The other lanes are 0.
template <class T> inline Vec load(const T* x, int64_t n) {
    if (n >= LANES) return load(x);
    T padded[LANES] = {};
    if (n > 0) std::memcpy(padded, x, n * sizeof(T));
    return load(padded);
}
template <class T> inline void store(T* x, Vec v, int64_t n) {
    if (n >= LANES) return store(x, v);
    T padded[LANES];
    store(padded, v);
    if (n > 0) std::memcpy(x, padded, n * sizeof(T));
}

// `low` takes lanes without bit W from a and the others from b, each from the lower of a pair of runs of W lanes;
// `high` takes them from the upper one.   W = 8: low a0 … a7 b0 … b7     high a8 … a15 b8 … b15
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
template <int W, int... I> inline Vec low(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return SHUFFLE(a, b, (I & W ? LANES + I - W : I)...);
}
template <int W, int... I> inline Vec high(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return SHUFFLE(a, b, (I & W ? LANES + I : I + W)...);
}
using Lanes = std::make_integer_sequence<int, LANES>;
template <int W> inline Vec fold(Vec a, Vec b) { return low<W>(a, b, Lanes{}) + high<W>(a, b, Lanes{}); }
template <int W> inline Vec fold_maximum(Vec a, Vec b) { return maximum(low<W>(a, b, Lanes{}), high<W>(a, b, Lanes{})); }

// LANES sums together: lane i of the result is the sum of the lanes of parts[i].
template <int W = LANES / 2> inline Vec sums(Vec parts[2 * W]) {
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) parts[i] = fold<W>(parts[i], parts[i + W]);
    if constexpr (W == 1) return parts[0];
    else return sums<W / 2>(parts);
}
template <int W = LANES / 2> inline float sum(Vec v) {
    if constexpr (W == 1) return v[0] + v[1];
    else return sum<W / 2>(fold<W>(v, v));
}
template <int W = LANES / 2> inline float maximum(Vec v) {
    if constexpr (W == 1) return std::max(v[0], v[1]);
    else return maximum<W / 2>(fold_maximum<W>(v, v));
}

// 0 1 2 … LANES - 1
inline Vec lane_numbers() {
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// 2^x, to about 2e-7 of it: 2^-126 or more, so that a masked score counts for nothing, and infinite for x ≥ 128 and
// for NaN. 2^x = 2^whole · 2^rest with rest from -1/2 to 1/2, and 2^rest is a polynomial: the first terms of
// Σ (rest · ln 2)^i / i!.
inline Vec exp2(Vec x) {
    Vec clamped = x < 128.0f ? maximum(x, all(-126.0f)) : all(128.0f);
    Ints whole = __builtin_convertvector(clamped + (clamped < 0.0f ? all(-0.5f) : all(0.5f)), Ints);
    Vec rest = clamped - __builtin_convertvector(whole, Vec);
    Vec y = rest * 1.5252734e-5f + 1.5403530e-4f;
    y = y * rest + 1.3333558e-3f;
    y = y * rest + 9.6181291e-3f;
    y = y * rest + 5.5504109e-2f;
    y = y * rest + 2.4022651e-1f;
    y = y * rest + 6.9314718e-1f;
    y = y * rest + 1.0f;
    return (Vec)((Ints)y + (whole << 23));
}

// Call f with a zero of the dtype: 0 is float32, 1 bfloat16, 2 float16. Returns whether there is this type.
template <class F> int with_dtype(int dtype, F f) {
    if (dtype == 0) return f(0.0f), 1;
    if (dtype == 1) return f(BFloat16{}), 1;
#ifdef HAS_FLOAT16  // some x86 processors before 2013 cannot convert it
    if (dtype == 2) return f(Float16{}), 1;
#endif
    return 0;
}
