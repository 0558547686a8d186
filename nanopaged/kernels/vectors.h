// Vectors of 16 floats, and numbers of 16 bits that are loaded and stored as such vectors.
//
// The compiler turns a Vec into what the processor has: one AVX-512 register, two of AVX2, four of NEON. GCC and
// Clang know these types (https://gcc.gnu.org/onlinedocs/gcc/Vector-Extensions.html).

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));

struct BFloat16 { uint16_t bits; };  // the upper half of a float32
#ifdef __FLT16_MANT_DIG__
typedef _Float16 Float16;
typedef Float16 Halves __attribute__((vector_size(32)));
#endif

inline Vec all(float x) { return x - Vec{}; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline Vec load(const float* x) {
    Vec v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
inline void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }

inline Vec load(const BFloat16* x) {
    Bits bits;
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)x[i].bits << 16;
    return (Vec)bits;
}
inline void store(BFloat16* x, Vec v) {
    Bits bits = (Bits)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
    HalfBits half = __builtin_convertvector(bits, HalfBits);
    std::memcpy(x, &half, sizeof half);
}

#ifdef __FLT16_MANT_DIG__
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

// The first n lanes, for the end of a row whose size is not a multiple of 16. The other lanes are 0.
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

// LOW takes lanes without bit W from a and the others from b, each from the lower of a pair of runs of W lanes;
// HIGH takes them from the upper one.   W = 8: LOW a0 … a7 b0 … b7     HIGH a8 … a15 b8 … b15
#define LOW(L) (((L) & W) ? 16 + (L) - W : (L))
#define HIGH(L) (((L) & W) ? 16 + (L) : (L) + W)
#define EACH(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#ifdef __clang__
#define SHUFFLE(F) __builtin_shufflevector(a, b, EACH(F))
#else
#define SHUFFLE(F) __builtin_shuffle(a, b, Ints{EACH(F)})
#endif
template <int W> inline Vec fold(Vec a, Vec b) { return SHUFFLE(LOW) + SHUFFLE(HIGH); }
template <int W> inline Vec fold_maximum(Vec a, Vec b) { return maximum(SHUFFLE(LOW), SHUFFLE(HIGH)); }

// Sixteen sums together: lane i of the result is the sum of the lanes of parts[i].
inline Vec sums(Vec parts[LANES]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) parts[i] = fold<8>(parts[i], parts[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) parts[i] = fold<4>(parts[i], parts[i + 4]);
    for (int i = 0; i < 2; i++) parts[i] = fold<2>(parts[i], parts[i + 2]);
    return fold<1>(parts[0], parts[1]);
}
inline float sum(Vec v) {
    v = fold<8>(v, v), v = fold<4>(v, v), v = fold<2>(v, v);
    return v[0] + v[1];
}
inline float maximum(Vec v) {
    v = fold_maximum<8>(v, v), v = fold_maximum<4>(v, v), v = fold_maximum<2>(v, v);
    return std::max(v[0], v[1]);
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

// Call f with a zero of the dtype: 0 is float32, 1 bfloat16, 2 float16. Returns whether the compiler had this type.
template <class F> int with_dtype(int dtype, F f) {
    if (dtype == 0) return f(0.0f), 1;
    if (dtype == 1) return f(BFloat16{}), 1;
#ifdef __FLT16_MANT_DIG__
    if (dtype == 2) return f(Float16{}), 1;
#endif
    return 0;
}
