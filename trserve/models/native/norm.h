// Root mean square norms of a row. Knows no layers.
#pragma once

#include <cmath>

#include "simd.h"

namespace trs {

// 1 / sqrt(sum of squares + size * eps): what is missing of 1 / length is in the scales.
inline float inverse_length(const float* x, int64_t size, float eps) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total + float(size) * eps);
}

// out = x / length(x) * scale; without a scale where that is folded into the weights behind it.
template <class X>
inline void normalize_into(const float* x, const float* scale, int64_t size, float eps, X* out) {
  const float inverse = inverse_length(x, size, eps);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats scaled = load(x + i) * inverse;
    store(out + i, scale ? scaled * load(scale + i) : scaled);
  }
  for (; i < size; ++i) store_as(out + i, x[i] * inverse * (scale ? scale[i] : 1.0f));
}

}  // namespace trs
