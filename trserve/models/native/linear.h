// Products of a few tokens with a weight matrix that lies in memory as the checkpoint has it: [rows,
// columns], row by row. Knows no layers and no threads; a caller splits the rows among them.
//
// Every output is one chain of multiply-adds over the columns and one tree of additions at the end,
// both independent of how many tokens or rows are computed beside it. So a token's results do not
// depend on its neighbours in the batch, bit for bit.
#pragma once

#include "simd.h"

namespace trs {

enum class Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// Symmetric 8-bit weights, one scale a row, are exact in bfloat16.
struct Matrix {
  const void* weights;
  const float* scales;  // [rows] of an int8 matrix, else null
  const float* bias;    // [rows] or null
  int64_t rows;
  int64_t columns;
  Kind kind;
};

// What a weight of type W is multiplied with.
template <class W>
struct Input {
  using Type = float;
};

#if TRS_DOT_BF16
template <>
struct Input<bf16> {
  using Type = bf16;
};

inline void multiply_add(Floats& total, const bf16* weights, const bf16* input) {
  const __m512bh w = (__m512bh)_mm512_loadu_si512(weights);
  const __m512bh x = (__m512bh)_mm512_loadu_si512(input);
  total = (Floats)_mm512_dpbf16_ps((__m512)total, w, x);
}
#endif

template <class W>
inline void multiply_add(Floats& total, const W* weights, const float* input) {
  total += load(weights) * load(input);
}

template <class W, class X>
constexpr int kStride = sizeof(W) == 2 && sizeof(X) == 2 ? 2 * kLanes : kLanes;

template <int Count>
inline void totals(const Floats* parts, float* out) {
  if constexpr (Count > kLanes) {
    totals<kLanes>(parts, out);
    totals<Count - kLanes>(parts + kLanes, out + kLanes);
  } else {
    constexpr int kPadded = Count <= 1 ? 1 : Count <= 2 ? 2 : Count <= 4 ? 4 : Count <= 8 ? 8 : 16;
    Floats padded[kPadded] = {};
    for (int i = 0; i < Count; ++i) padded[i] = parts[i];
    const Floats found = sums<kPadded>(padded);
    std::memcpy(out, &found, Count * sizeof(float));
  }
}

// What lies past the last whole vector of columns; few models have any such.
template <int Rows, int Tokens, class W, class X>
__attribute__((noinline)) void add_rest(const W* weights, const X* input, int64_t columns,
                                        int64_t stride, int64_t at, Floats* parts) {
  constexpr int kStep = kStride<W, X>;
  for (int r = 0; r < Rows; ++r) {
    W last_weights[kStep] = {};
    std::memcpy(last_weights, weights + r * columns + at, (columns - at) * sizeof(W));
    for (int t = 0; t < Tokens; ++t) {
      X last_input[kStep] = {};
      std::memcpy(last_input, input + t * stride + at, (columns - at) * sizeof(X));
      multiply_add(parts[r * Tokens + t], last_weights, last_input);
    }
  }
}

// out[r * Tokens + t] = weights[r] . input[t] for Rows rows and Tokens tokens.
//
// The next rows are asked for while these are computed: a tile's additions at its end would
// otherwise leave the memory without work. With one token there is so little to compute that the
// processor's own reading ahead is faster.
template <int Rows, int Tokens, class W, class X>
inline void tile(const W* weights, const X* input, int64_t columns, int64_t stride, float* out) {
  Floats parts[Rows * Tokens] = {};
  constexpr int kStep = kStride<W, X>;
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) {
    for (int r = 0; r < Rows; ++r) {
      if constexpr (Tokens > 1) __builtin_prefetch(weights + (r + Rows) * columns + at);
      for (int t = 0; t < Tokens; ++t) {
        multiply_add(parts[r * Tokens + t], weights + r * columns + at, input + t * stride + at);
      }
    }
  }
  if (__builtin_expect(at < columns, 0)) {
    Floats rest[Rows * Tokens] = {};
    add_rest<Rows, Tokens>(weights, input, columns, stride, at, rest);
    for (int i = 0; i < Rows * Tokens; ++i) parts[i] += rest[i];
  }
  totals<Rows * Tokens>(parts, out);
}

// As many accumulators as the registers hold.
constexpr int kTileRows = kLanes == 16 ? 4 : 2;
constexpr int kTileTokens = 4;
constexpr int kWideRows = 2 * kTileRows;  // with one or two tokens: more rows in flight from memory

template <int Rows, int Tokens, class W, class X, class Emit>
inline void emit_tile(const W* weights, const X* input, int64_t columns, int64_t stride, int row,
                      int token, Emit emit) {
  float out[Rows * Tokens];
  tile<Rows, Tokens>(weights, input, columns, stride, out);
  for (int r = 0; r < Rows; ++r) {
    for (int t = 0; t < Tokens; ++t) emit(row + r, token + t, out[r * Tokens + t]);
  }
}

template <int Rows, class W, class X, class Emit>
inline void emit_rows(const W* weights, const X* input, int64_t columns, int64_t stride, int row,
                      int tokens, Emit emit) {
  int token = 0;
  if constexpr (Rows <= kTileRows) {
    for (; token + kTileTokens <= tokens; token += kTileTokens) {
      const X* from = input + token * stride;
      emit_tile<Rows, kTileTokens>(weights, from, columns, stride, row, token, emit);
    }
  }
  const X* rest = input + token * stride;
  switch (tokens - token) {
    case 1: emit_tile<Rows, 1>(weights, rest, columns, stride, row, token, emit); break;
    case 2: emit_tile<Rows, 2>(weights, rest, columns, stride, row, token, emit); break;
    case 3:
      if constexpr (Rows <= kTileRows) {
        emit_tile<Rows, 3>(weights, rest, columns, stride, row, token, emit);
      }
      break;
  }
}

// Calls emit(row, token, value) for the rows [first, last) and all tokens, without scale or bias.
template <class W, class X, class Emit>
inline void multiply_rows(const W* weights, const X* input, int64_t columns, int64_t stride, int first,
                          int last, int tokens, Emit emit) {
  int row = first;
  if (tokens <= 2) {
    for (; row + kWideRows <= last; row += kWideRows) {
      emit_rows<kWideRows>(weights + row * columns, input, columns, stride, row, tokens, emit);
    }
  }
  for (; row + kTileRows <= last; row += kTileRows) {
    emit_rows<kTileRows>(weights + row * columns, input, columns, stride, row, tokens, emit);
  }
  for (; row < last; ++row) {
    emit_rows<1>(weights + row * columns, input, columns, stride, row, tokens, emit);
  }
}

// 8-bit weights become the input's type a few rows at a time, in `scratch` [kWideRows * columns]:
// in the first-level cache that costs less than reading twice as many bytes from memory.
template <class X, class Emit>
inline void multiply_rows(const int8_t* weights, const X* input, int64_t columns, int64_t stride,
                          int first, int last, int tokens, X* scratch, Emit emit) {
  for (int row = first; row < last; row += kWideRows) {
    const int count = last - row < kWideRows ? last - row : kWideRows;
    const int8_t* from = weights + row * columns;
    const int64_t size = count * columns;
    // The next rows arrive while these are multiplied.
    for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(from + size + line);
    int64_t at = 0;
#if TRS_DOT_BF16
    if constexpr (sizeof(X) == 2) {
      for (; at + 2 * kLanes <= size; at += 2 * kLanes) {
        const __m512 low = (__m512)load(from + at), high = (__m512)load(from + at + kLanes);
        _mm512_storeu_si512(scratch + at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
#endif
    for (; at + kLanes <= size; at += kLanes) widen(from + at, scratch + at);
    for (; at < size; ++at) store_as(scratch + at, float(from[at]));
    multiply_rows(static_cast<const X*>(scratch), input, columns, stride, 0, count, tokens,
                  [&](int r, int t, float value) { emit(row + r, t, value); });
  }
}

// Calls emit(row, token, value) for the rows [first, last) of `matrix` times every token's input.
template <class W, class X, class Emit>
inline void multiply(const Matrix& matrix, const X* input, int64_t stride, int first, int last,
                     int tokens, X* scratch, Emit emit) {
  const float* bias = matrix.bias;
  const W* weights = static_cast<const W*>(matrix.weights);
  if constexpr (sizeof(W) == 1) {
    const float* scales = matrix.scales;
    multiply_rows(weights, input, matrix.columns, stride, first, last, tokens, scratch,
                  [&](int r, int t, float value) {
                    emit(r, t, value * scales[r] + (bias ? bias[r] : 0.0f));
                  });
  } else {
    multiply_rows(weights, input, matrix.columns, stride, first, last, tokens,
                  [&](int r, int t, float value) { emit(r, t, bias ? value + bias[r] : value); });
  }
}

}  // namespace trs
