// Rotary embedding and grouped-query attention of one token over a paged KV cache.
// Knows the cache's layout and a block table; nothing of layers, weights or threads.
//
// The cache of a layer is [blocks, kv_heads, 2, block_size, dim]. Keys are read in segments of a fixed size whose partial results are merged in order, so the result
// does not depend on who computes which segment.
#pragma once

#include <cmath>

#include "linear.h"

namespace trs {

constexpr int kSegment = 128;    // positions; their keys and values stay in the first-level cache
constexpr int kMaxGroup = 16;    // query heads that share a KV head
constexpr int kMaxHeadDim = 256;

struct HeadShape {
  int group;
  int kv_heads;
  int dim;
};

// A softmax under way: sums of exp(score - largest), and of the same times the values.
struct Partial {
  float largest[kMaxGroup];
  float weight[kMaxGroup];
  float values[kMaxGroup * kMaxHeadDim];
};

// One head's keys and values in a layer's cache, reached through a row's block table.
template <class T>
struct HeadCache {
  const T* base;
  const int32_t* blocks;
  int64_t block_stride;
  int block_size;
  int dim;

  // The addresses of the keys of `count` positions from `first` on.
  void find(int first, int count, const T** keys) const {
    int block = first / block_size, within = first % block_size;
    for (int i = 0; i < count; ++i) {
      keys[i] = base + blocks[block] * block_stride + within * dim;
      if (++within == block_size) {
        within = 0;
        ++block;
      }
    }
  }

  // From a key to its value.
  int64_t value_offset() const { return int64_t(block_size) * dim; }
};

// x / sqrt(mean(x^2) + eps) * weight, with scale = weight * sqrt(dim) and floor = dim * eps.
inline void normalize(float* x, int dim, const float* scale, float floor) {
  Floats squares = {};
  for (int i = 0; i < dim; i += kLanes) squares += load(x + i) * load(x + i);
  const float inverse = 1.0f / std::sqrt(sum(squares) + floor);
  for (int i = 0; i < dim; i += kLanes) {
    const Floats scaled = load(x + i) * inverse;
    store(x + i, scale ? scaled * load(scale + i) : scaled);
  }
}

// Rotates the pairs (2i, 2i + 1) by `turns`, [dim / 2] complex numbers, and multiplies by `factor`.
inline void rotate(float* x, const float* turns, int dim, float factor) {
  for (int i = 0; i < dim; i += 2) {
    const float c = turns[i] * factor, s = turns[i + 1] * factor;
    const float a = x[i], b = x[i + 1];
    x[i] = a * c - b * s;
    x[i + 1] = a * s + b * c;
  }
}

// scores[g * kSegment + i] = queries[g] . keys[i]; up to the next whole vector, minus infinity.
template <class T, class Q>
inline void score(const HeadShape& shape, const Q* queries, const T* const* keys, int count,
                  float* scores) {
  constexpr int kStep = kStride<T, Q>;
  for (int i = 0; i < count; i += kLanes) {
    const T* near[kLanes];
    for (int j = 0; j < kLanes; ++j) near[j] = keys[i + j < count ? i + j : i];
    for (int g = 0; g < shape.group; ++g) {
      const Q* query = queries + g * shape.dim;
      Floats parts[kLanes] = {};
      // Key by key, in the order in which they lie in memory.
      for (int j = 0; j < kLanes; ++j) {
        for (int at = 0; at < shape.dim; at += kStep) multiply_add(parts[j], near[j] + at, query + at);
      }
      float* to = scores + g * kSegment + i;
      store(to, sums<kLanes>(parts));
      for (int j = count - i; j < kLanes; ++j) to[j] = -INFINITY;
    }
  }
}

// In place, scores become exp(score - largest). Returns the largest.
//
// A NaN hides from comparisons but not from the exponential, so it reaches weight and values.
inline float exponentiate(float* scores, int count, float* weight) {
  Floats largest = load(scores);
  for (int i = kLanes; i < count; i += kLanes) largest = larger(largest, load(scores + i));
  float top = largest[0];
  for (int j = 1; j < kLanes; ++j) top = largest[j] > top ? largest[j] : top;
  Floats total = {};
  for (int i = 0; i < count; i += kLanes) {
    const Floats risen = exp_negative(load(scores + i) - top);
    store(scores + i, risen);
    total += risen;
  }
  *weight = sum(total);
  return top;
}

// out[g] = sum over i of weights[g * kSegment + i] * value i, for Group queries and Vectors vectors
// of the head from `at` on.
template <int Group, int Vectors, class T>
inline void weigh_part(int dim, int at, const T* const* values, int count, const float* weights,
                       float* out) {
  Floats totals[Group * Vectors] = {};
  for (int i = 0; i < count; ++i) {
    for (int v = 0; v < Vectors; ++v) {
      const Floats value = load(values[i] + at + v * kLanes);
      for (int g = 0; g < Group; ++g) totals[g * Vectors + v] += value * weights[g * kSegment + i];
    }
  }
  for (int g = 0; g < Group; ++g) {
    for (int v = 0; v < Vectors; ++v) store(out + g * dim + at + v * kLanes, totals[g * Vectors + v]);
  }
}

template <int Group, class T>
inline void weigh(int dim, const T* const* values, int count, const float* weights, float* out) {
  constexpr int kTogether = kLanes == 16 ? 4 : 2;
  int at = 0;
  for (; at + kTogether * kLanes <= dim; at += kTogether * kLanes) {
    weigh_part<Group, kTogether>(dim, at, values, count, weights, out);
  }
  for (; at < dim; at += kLanes) weigh_part<Group, 1>(dim, at, values, count, weights, out);
}

template <class T>
inline void weigh_all(const HeadShape& shape, const T* const* values, int count, const float* weights,
                      float* out) {
  const int dim = shape.dim;
  int g = 0;
  for (; g + 4 <= shape.group; g += 4) {
    weigh<4>(dim, values, count, weights + g * kSegment, out + g * dim);
  }
  const float* rest = weights + g * kSegment;
  switch (shape.group - g) {
    case 1: weigh<1>(dim, values, count, rest, out + g * dim); break;
    case 2: weigh<2>(dim, values, count, rest, out + g * dim); break;
    case 3: weigh<3>(dim, values, count, rest, out + g * dim); break;
  }
}

// Asks for rows of `dim` elements. A head's share of a block is too short for the processor to see
// a stream in it.
template <class T>
inline void fetch(const T* const* rows, int count, int dim) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < count; ++i) {
    for (int at = 0; at < dim; at += kLine) __builtin_prefetch(rows[i] + at);
  }
}

// The keys and values of a KV head at the positions [first, first + count), at most a segment.
template <class T>
struct Segment {
  const T* keys[kSegment];
  const T* values[kSegment];

  Segment(const HeadShape& shape, const HeadCache<T>& cache, int first, int count) {
    cache.find(first, count, keys);
    for (int i = 0; i < count; ++i) values[i] = keys[i] + cache.value_offset();
    fetch(keys, count, shape.dim);
    fetch(values, count, shape.dim);
  }
};

// Attention of a token's queries over the first `count` positions of a segment.
template <class T, class Q>
inline void attend_segment(const HeadShape& shape, const Q* queries, const Segment<T>& segment, int count,
                           Partial& out) {
  alignas(64) float scores[kMaxGroup * kSegment];
  score(shape, queries, segment.keys, count, scores);
  for (int g = 0; g < shape.group; ++g) {
    out.largest[g] = exponentiate(scores + g * kSegment, count, &out.weight[g]);
  }
  weigh_all(shape, segment.values, count, scores, out.values);
}

// Takes a later segment's result into `total`.
inline void merge(const HeadShape& shape, const Partial& part, Partial& total) {
  for (int g = 0; g < shape.group; ++g) {
    const float a = total.largest[g], b = part.largest[g];
    const float largest = a > b ? a : b;
    const float keep = std::exp(a - largest), add = std::exp(b - largest);
    total.largest[g] = largest;
    total.weight[g] = total.weight[g] * keep + part.weight[g] * add;
    float* to = total.values + g * shape.dim;
    const float* from = part.values + g * shape.dim;
    for (int at = 0; at < shape.dim; at += kLanes) {
      store(to + at, load(to + at) * keep + load(from + at) * add);
    }
  }
}

// Writes the finished softmax averages, [group, dim].
template <class X>
inline void finish(const HeadShape& shape, const Partial& total, X* out) {
  for (int g = 0; g < shape.group; ++g) {
    const float inverse = 1.0f / total.weight[g];
    for (int at = 0; at < shape.dim; at += kLanes) {
      store(out + g * shape.dim + at, load(total.values + g * shape.dim + at) * inverse);
    }
  }
}

// Attention of `tokens` consecutive tokens of one row, the last of which sees `length` positions.
// `queries(i)` and `out(i)` are those of the i-th token. Segment by segment for all of them: what
// one token has read into the cache the next ones find there.
template <class T, class Queries, class Out>
inline void attend(const HeadShape& shape, const HeadCache<T>& cache, int tokens, int length,
                   Queries queries, Out out, Partial* totals, Partial& part) {
  for (int first = 0; first < length; first += kSegment) {
    const int most = length - first < kSegment ? length - first : kSegment;
    const Segment<T> segment(shape, cache, first, most);
    for (int i = 0; i < tokens; ++i) {
      const int left = length - (tokens - 1 - i) - first, count = left < most ? left : most;
      if (count <= 0) continue;
      attend_segment(shape, queries(i), segment, count, first ? part : totals[i]);
      if (first) merge(shape, part, totals[i]);
    }
  }
  for (int i = 0; i < tokens; ++i) finish(shape, totals[i], out(i));
}

}  // namespace trs
