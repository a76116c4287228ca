// Vectors of floats as wide as the target has them, and what the kernels need of them.
// Knows no model and no threads. Compiled once per instruction set; GCC and Clang vector types.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#define TRS_LANES 16
#elif defined(__AVX2__)
#define TRS_LANES 8
#else
#define TRS_LANES 4
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__)
#define TRS_DOT_BF16 1
#else
#define TRS_DOT_BF16 0
#endif

namespace trs {

constexpr int kLanes = TRS_LANES;

typedef float Floats __attribute__((vector_size(4 * TRS_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * TRS_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * TRS_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * TRS_LANES)));
typedef int8_t Bytes __attribute__((vector_size(TRS_LANES)));

// A bfloat16: the upper half of a float.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Rounded to nearest even; a NaN stays one, whatever its payload.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return bf16{uint16_t(bits >> 16 | 0x40)};
  return bf16{uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline void store_as(float* to, float value) { *to = value; }
inline void store_as(bf16* to, float value) { *to = to_bf16(value); }

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

inline Floats load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// Widens kLanes 8-bit integers, which both types hold exactly.
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

inline void widen(const int8_t* from, float* to) {
  const Floats value = load(from);
  std::memcpy(to, &value, sizeof value);
}

inline void widen(const int8_t* from, bf16* to) {
  const Halves halves = __builtin_convertvector((Words)load(from) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void store(bf16* to, Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Words kept = value == value ? rounded : (bits >> 16 | 0x40);
  const Halves halves = __builtin_convertvector(kept, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// Comparisons with a NaN are false, so the first argument's NaN survives in neither; callers that
// must keep NaNs look for them elsewhere.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

template <int Distance, int... Lane>
inline Floats partners(Floats a, Floats b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, ((Lane & Distance) ? kLanes + (Lane ^ Distance) : (Lane ^ Distance))...);
}

template <int Distance, int... Lane>
inline Floats blended(Floats a, Floats b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, ((Lane & Distance) ? kLanes + Lane : Lane)...);
}

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lane l of the result belongs to a or b, as the bit Distance of l says, and has half the terms.
template <int Distance>
inline Floats fold(Floats a, Floats b) {
  return blended<Distance>(a, b, Lanes{}) + partners<Distance>(a, b, Lanes{});
}

// The sums of Count vectors, a power of two, in the first Count lanes. The tree of additions is the
// same for every Count: a sum does not depend on how many others are made beside it.
template <int Count, int Distance = 1>
inline Floats sums(const Floats* parts) {
  if constexpr (Distance == kLanes) {
    return parts[0];
  } else {
    constexpr int kLeft = Count > 1 ? Count / 2 : 1;
    Floats folded[kLeft];
    for (int i = 0; i < kLeft; ++i) {
      folded[i] = fold<Distance>(parts[Count > 1 ? 2 * i : 0], parts[Count > 1 ? 2 * i + 1 : 0]);
    }
    return sums<kLeft, Distance * 2>(folded);
  }
}

inline float sum(Floats value) { return sums<1>(&value)[0]; }

// exp(x) within 2 units in the last place for x <= 0 (Cephes' polynomial); a NaN gives a NaN, and
// whatever lies below the smallest normal number gives a zero or that number.
inline Floats exp_negative(Floats x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Floats turns = x * 1.44269504088896341f;
  const Ints whole = __builtin_convertvector(turns - 0.5f, Ints);
  const Floats n = __builtin_convertvector(whole, Floats);
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * (Floats)((whole + 127) << 23);
}

// out[i] = silu(gates[i]) * ups[i]. Reads whole vectors; writes `count` values.
template <class X>
inline void activate(const float* gates, const float* ups, int count, X* out) {
  for (int i = 0; i < count; i += kLanes) {
    const Floats gate = load(gates + i);
    const Floats risen = exp_negative(gate < 0.0f ? gate : -gate);
    const Floats active = gate * (gate < 0.0f ? risen : splat(1.0f)) / (1.0f + risen) * load(ups + i);
    if (i + kLanes <= count) {
      store(out + i, active);
    } else {
      for (int j = 0; i + j < count; ++j) store_as(out + i + j, active[j]);
    }
  }
}

}  // namespace trs
