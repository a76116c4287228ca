// What routers read off a row of logits, in one pass over it: the sums behind its entropy and its
// two largest probabilities, or its largest logits in order. Knows no model, no router, no threads.
//
// A row's results depend on that row alone. Beyond one vector's worth of registers the pass keeps a
// block of the row in the first-level cache: its largest logit is found, then its exponentials are
// added up, against the largest so far.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "simd.h"

namespace trs {
namespace {

constexpr int kChains = 4;                       // independent additions in flight
constexpr int kStrip = kChains * kLanes;
constexpr int kBlock = 2048;                     // a multiple of every kStrip
constexpr float kLowest = -87.0f;                // exponentials below this one's are its
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The two largest values of each lane.
struct Largest {
  Floats first = splat(-kInfinity), second = splat(-kInfinity);

  void add(Floats value) {
    second = larger(second, value > first ? first : value);
    first = larger(value, first);
  }
};

// Sums over a row's values z, of w = exp(z - largest) and of w (z - largest).
struct Sums {
  float largest = -kInfinity;
  double weight = 0.0, weighted = 0.0;

  void raise(float to) {
    if (!(to > largest)) return;
    // Below the first finite value there was nothing but, perhaps, a NaN, which times 0 stays one.
    const double by = largest == -kInfinity ? 0.0 : double(largest) - to;
    const double factor = largest == -kInfinity ? 0.0 : std::exp(by);
    weighted = factor * (weighted + by * weight);
    weight *= factor;
    largest = to;
  }

  void add(const float* values, int count) {
    Floats weights[kChains] = {}, products[kChains] = {};
    const float base = largest == -kInfinity ? 0.0f : largest;
    for (int at = 0; at < count; at += kStrip) {
      for (int c = 0; c < kChains; ++c) {
        const Floats fallen = load(values + at + c * kLanes) - base;
        // Minus infinity, which a token that cannot be drawn has, must not meet a weight of zero.
        const Floats below = fallen < kLowest ? splat(kLowest) : fallen;
        const Floats risen = exp_negative(below);
        weights[c] += risen;
        products[c] += risen * below;
      }
    }
    weight += sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
    weighted += sum((products[0] + products[1]) + (products[2] + products[3]));
  }
};

float largest_lane(Floats value) {
  float found = value[0];
  for (int lane = 1; lane < kLanes; ++lane) found = std::max(found, value[lane]);
  return found;
}

// A row under way.
class Row {
 public:
  void add(const float* values, int count) {
    for (int at = 0; at < count; at += kStrip) {
      for (int c = 0; c < kChains; ++c) top_[c].add(load(values + at + c * kLanes));
    }
    sums_.raise(largest_lane(larger(larger(top_[0].first, top_[1].first),
                                    larger(top_[2].first, top_[3].first))));
    sums_.add(values, count);
  }

  // out[0]: the entropy over ln size; [count]: the largest probability; [2 count]: its lead.
  void finish(int64_t size, int64_t count, float* out) const {
    const double mean = sums_.weighted / sums_.weight;
    const double lead = 1.0 - std::exp(double(second()) - sums_.largest);
    out[0] = float((std::log(sums_.weight) - mean) / std::log(double(size)));
    out[count] = float(1.0 / sums_.weight);
    out[2 * count] = float(lead / sums_.weight);
    // Comparisons lose a NaN, sums do not; plus infinity makes one of itself.
    if (sums_.weight != sums_.weight || sums_.largest == -kInfinity) out[0] = out[count] = out[2 * count] = NAN;
  }

 private:
  float second() const {
    float first = -kInfinity, second = -kInfinity;
    const auto take = [&](float value) {
      second = std::max(second, std::min(first, value));
      first = std::max(first, value);
    };
    for (const Largest& top : top_) {
      for (int lane = 0; lane < kLanes; ++lane) take(top.first[lane]);
      for (int lane = 0; lane < kLanes; ++lane) take(top.second[lane]);
    }
    return second;
  }

  Largest top_[kChains];
  Sums sums_;
};

void signals(const float* logits, int64_t size, int64_t count, float* out) {
  Row row;
  int64_t at = 0;
  for (; at + kBlock <= size; at += kBlock) row.add(logits + at, kBlock);
  const int whole = int((size - at) / kStrip * kStrip), rest = int(size - at) - whole;
  if (whole) row.add(logits + at, whole);
  if (rest) {
    float last[kStrip];
    std::fill_n(last, kStrip, -kInfinity);
    std::memcpy(last, logits + at + whole, rest * sizeof(float));
    row.add(last, kStrip);
  }
  row.finish(size, count, out);
}

// The `wanted` largest values in falling order; NaNs are passed over. `out` is a heap until the end,
// the least of what it keeps on top; most strips have nothing that is larger.
void largest(const float* values, int64_t size, int wanted, float* out) {
  const std::greater<float> least_on_top;
  std::fill_n(out, wanted, -kInfinity);
  const auto take = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (!(values[i] > out[0])) continue;
      std::pop_heap(out, out + wanted, least_on_top);
      out[wanted - 1] = values[i];
      std::push_heap(out, out + wanted, least_on_top);
    }
  };
  int64_t at = 0;
  for (; at + kStrip <= size; at += kStrip) {
    Floats most = load(values + at);
    for (int c = 1; c < kChains; ++c) most = larger(load(values + at + c * kLanes), most);
    const Ints above = most > out[0];
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= above[lane];
    if (any) take(at, at + kStrip);
  }
  take(at, size);
  std::sort(out, out + wanted, least_on_top);
}

}  // namespace
}  // namespace trs

extern "C" {

// Of `count` rows, `stride` apart, of which the first `size` columns count: out [3, count].
__attribute__((visibility("default"))) void trs_signals(const float* logits, int64_t count, int64_t stride,
                                                        int64_t size, float* out) {
  for (int64_t i = 0; i < count; ++i) trs::signals(logits + i * stride, size, count, out + i);
}

// The same rows' `wanted` largest logits: out [count, wanted].
__attribute__((visibility("default"))) void trs_largest(const float* logits, int64_t count, int64_t stride,
                                                        int64_t size, int32_t wanted, float* out) {
  for (int64_t i = 0; i < count; ++i) trs::largest(logits + i * stride, size, wanted, out + i * wanted);
}
}
