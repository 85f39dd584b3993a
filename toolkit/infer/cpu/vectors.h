// Vectors of LANES numbers of 32 bits (AVX-512 or AVX2): loads and stores of float32 and bfloat16, sums, exponentials.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef bf16 Halves __attribute__((vector_size(2 * LANES)));

inline float widen(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline float widen(float value) { return value; }

inline Floats load(const float* from) {
  Floats out;
  memcpy(&out, from, sizeof out);
  return out;
}

inline Floats load(const bf16* from) {
  Halves halves;
  memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

// Bits whose upper half is the nearest bfloat16, ties to even. A NaN from sums of bfloat16 products stays a NaN: its
// lower half is zeros.
inline Words rounded(Floats values) {
  const Words bits = (Words)values;
  return bits + 0x7fff + ((bits >> 16) & 1);
}

inline Floats rounded_to_bf16(Floats values) { return (Floats)(rounded(values) & 0xffff0000u); }

inline void store(bf16* to, Floats values, int64_t count = LANES) {
  const Halves out = __builtin_convertvector(rounded(values) >> 16, Halves);
  memcpy(to, &out, 2 * count);
}

// 2 * LANES numbers as two vectors. For bfloat16, a has the even ones and b the odd ones, so that no shuffle is needed.
inline void load(const float* from, Floats& a, Floats& b) {
  a = load(from);
  b = load(from + LANES);
}

inline void load(const bf16* from, Floats& a, Floats& b) {
  Words words;
  memcpy(&words, from, sizeof words);
  a = (Floats)(words << 16);
  b = (Floats)(words & 0xffff0000u);
}

inline void store(float* to, Floats a, Floats b) {
  store(to, a);
  store(to + LANES, b);
}

inline void store(bf16* to, Floats a, Floats b) {
  const Words words = (rounded(a) >> 16) | (rounded(b) & 0xffff0000u);
  memcpy(to, &words, sizeof words);
}

inline bool any(Ints values) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)values, (__m512i)values);
#else
  return !_mm256_testz_si256((__m256i)values, (__m256i)values);
#endif
}

inline float sum(Floats values) {
  float parts[LANES];
  memcpy(parts, &values, sizeof parts);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; i++) parts[i] += parts[i + step];
  return parts[0];
}

// e^x for x <= 0, within 2 units in the last place (Cephes' polynomial, [-ln2/2, ln2/2]); 0 for x <= -87, NaN for NaN.
inline Floats exponential(Floats x) {
  const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats whole = (x * 1.44269504f + ROUND) - ROUND;
  const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats e = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  e = e * rest + 8.3334519073e-3f;
  e = e * rest + 4.1665795894e-2f;
  e = e * rest + 1.6666665459e-1f;
  e = e * rest + 5.0000001201e-1f;
  e = e * rest * rest + rest + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return (Floats)((Ints)(e * (Floats)power) & ~(x <= -87.0f));
}

}  // namespace
